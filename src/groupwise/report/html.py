"""report.html: the page of `groupwise watch` with all the answers it asks for, in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from groupwise.report.catalogue import SeenRun
from groupwise.report.distribution import distribution, spread
from groupwise.report.notation import as_json
from groupwise.tracking.files import write_atomically

PAGE = Path(__file__).parent / "page"
STEPS = 5
"""Steps whose groups the report carries: the first, the last and some between."""
MOST_BYTES = 3_000_000
"""Of groups and tokens together; groups come one from each step in turn until this is used up."""
IMPORT = re.compile(r'(from\s+)"\./([\w./-]+)"')


def write_report(run: SeenRun, *, state: str) -> Path:
    """Write the report of a run and return where it lies."""
    write_atomically(run.folder.report, page(dict(answers(run, state=state)), title=run.folder.name))
    return run.folder.report


def answers(run: SeenRun, *, state: str) -> Iterator[tuple[str, Any]]:
    """Yield what the page will ask for, by address."""
    name = run.folder.name
    root = f"api/runs/{quote(name, safe=UNTOUCHED)}"
    yield "api/runs", [{"id": name, **run.overview(state=state)}]
    yield f"{root}/curves", run.curves()
    yield f"{root}/alarms", run.alarmed()
    yield f"{root}/settings", run.settings()
    yield f"{root}/distribution", distribution(run.slices)
    steps = spread(run.slices.steps(), STEPS)
    lists = dict(listed(run, steps))
    for step, groups in lists.items():
        yield f"{root}/steps/{step}", groups
    room = MOST_BYTES
    for place in range(max(map(len, lists.values()), default=0)):
        for step, groups in lists.items():
            if place < len(groups):
                try:
                    found = dict(whole_group(run, root, step, groups[place]["group"]))
                except OSError:
                    continue  # the part of the file that lists it can be read, and this one cannot
                room -= sum(len(as_json(value)) for value in found.values())
                if room < 0:
                    return
                yield from found.items()


def listed(run: SeenRun, steps: Iterable[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield each step with its groups; one whose file is damaged is left out, as of the distribution."""
    for step in steps:
        with suppress(OSError):
            yield step, run.slices.groups(step)


UNTOUCHED = "!'()*-._~"
"""Besides letters and digits: what encodeURIComponent leaves as it is, so that both sides say the same."""


def whole_group(run: SeenRun, root: str, step: int, group: int) -> Iterator[tuple[str, Any]]:
    """Yield a group with its texts, and each member by token."""
    found = run.slices.group(step, group)
    assert found is not None, "groups that were listed exist"
    place = f"{root}/steps/{step}/groups/{group}"
    yield place, found
    for member in found["members"]:
        yield f"{place}/members/{member['member']}", run.slices.tokens(step, group, member["member"])


def page(carried: dict[str, Any], *, title: str) -> str:
    """Return the page with its styles, scripts and answers inside."""
    style = "\n".join(read(name) for name in ("vendor/uplot/uPlot.min.css", "style.css"))
    imports = json.dumps({"imports": {f"groupwise/{name}": as_address(name) for name in modules()}})
    start = 'import "groupwise/app.js";'
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src {allowed(imports)} {allowed(start)} data:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · groupwise</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<script type="application/json" id="carried">{as_script(carried)}</script>
<script type="importmap">{imports}</script>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header id="header"></header>
<main id="main" tabindex="-1"></main>
<noscript>This report draws with JavaScript of its own; it asks nothing of the network.</noscript>
<script type="module">{start}</script>
</body>
</html>
"""


def modules() -> list[str]:
    return sorted(path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*.js"))


def read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def as_address(name: str) -> str:
    """Return a module as a data: address, its imports by the names that the import map knows."""
    source = IMPORT.sub(r'\1"groupwise/\2"', read(name))
    return f"data:text/javascript;base64,{base64.b64encode(source.encode()).decode()}"


def as_script(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in, whatever a model wrote."""
    return as_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def allowed(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
