"""Write report.html, the page of `groupwise watch` with its data in one file, and the plots."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from groupwise.errors import ConfigError
from groupwise.files import remove_temporaries, write_atomically
from groupwise.report.run_reader import Row, RunReader, StoredEvaluation, as_json, distribution, spread
from groupwise.tracking.run_folder import RunFolder

PAGE = Path(__file__).parent / "page"
STEPS = 5
"""Number of steps whose groups the report includes: the first, the last and some in between."""
MOST_BYTES = 3_000_000
"""Size limit of groups and tokens; groups are added round-robin over the steps until it is reached."""
IMPORT = re.compile(r'(from\s+)"\./([\w./-]+)"')


def write_report(run: RunReader, *, state: str) -> Path:
    """Write the report of a run and return its path."""
    write_atomically(run.folder.report, page(dict(answers(run, state=state)), title=run.folder.name))
    return run.folder.report


def answers(run: RunReader, *, state: str) -> Iterator[tuple[str, Any]]:
    """Yield the API responses that the page will request, by URL."""
    name = run.folder.name
    root = f"api/runs/{quote(name, safe=UNTOUCHED)}"
    yield "api/runs", [{"id": name, **run.overview(state=state)}]
    yield f"{root}/curves", run.curves()
    yield f"{root}/alarms", run.alarmed()
    yield f"{root}/settings", run.settings()
    if (population := run.population()) is not None:
        yield f"{root}/population", population
    yield f"{root}/distribution", distribution(run.rollouts)
    steps = spread(run.rollouts.steps(), STEPS)
    lists = dict(listed(run, steps))
    for step, groups in lists.items():
        yield f"{root}/steps/{step}", groups
    bytes_left = MOST_BYTES
    for index in range(max(map(len, lists.values()), default=0)):
        for step, groups in lists.items():
            if index < len(groups):
                try:
                    responses = dict(whole_group(run, root, step, groups[index]["group"]))
                except OSError:
                    continue  # the list of groups is readable, but this part of the file is not
                bytes_left -= sum(len(as_json(value)) for value in responses.values())
                if bytes_left < 0:
                    return
                yield from responses.items()


def listed(run: RunReader, steps: Iterable[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield each step with its groups; steps with a damaged file are skipped."""
    for step in steps:
        with suppress(OSError):
            yield step, run.rollouts.groups(step)


UNTOUCHED = "!'()*-._~"
"""Characters besides letters and digits that JavaScript's encodeURIComponent leaves unescaped."""


def whole_group(run: RunReader, root: str, step: int, group: int) -> Iterator[tuple[str, Any]]:
    """Yield the responses for a group with its texts, and for the tokens of each member."""
    content = run.rollouts.group(step, group)
    assert content is not None, "listed groups exist"
    url = f"{root}/steps/{step}/groups/{group}"
    yield url, content
    for member in content["members"]:
        yield f"{url}/members/{member['member']}", run.rollouts.tokens(step, group, member["member"])


def page(carried: dict[str, Any], *, title: str) -> str:
    """Return the page with its styles, scripts and data inlined."""
    style = "\n".join(read(name) for name in ("vendor/uplot/uPlot.min.css", "style.css"))
    imports = json.dumps({"imports": {f"groupwise/{name}": as_data_url(name) for name in modules()}})
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
<a class="skip" href="#main">Skip to content</a>
<header id="header"></header>
<main id="main" tabindex="-1"></main>
<noscript>This report needs JavaScript to draw. It makes no network requests.</noscript>
<script type="module">{start}</script>
</body>
</html>
"""


def modules() -> list[str]:
    return sorted(path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*.js"))


def read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def as_data_url(name: str) -> str:
    """Return a module as a data: URL, with its imports renamed to those of the import map."""
    source = IMPORT.sub(r'\1"groupwise/\2"', read(name))
    return f"data:text/javascript;base64,{base64.b64encode(source.encode()).decode()}"


def as_script(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever text it contains."""
    return as_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def allowed(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#8a6d00", "#3b9dd6", "#5a646c")
"""Okabe-Ito palette, safe for colour-blind readers."""
INK, MUTED, GRID = "#1c2226", "#5a646c", "#e4e5e1"
SMOOTHING = 0.8
"""Weight of the exponential average."""
MANY = 60
"""Number of steps above which curves are smoothed."""


def write_plots(run: RunReader) -> None:
    """Write both plots into the run's folder."""
    rows = run.tail.rows()
    if rows:
        write_atomically(run.folder.plots / "rewards.png", rewards(run.title, rows, run.measured()))
    histogram = distribution(run.rollouts)
    if histogram["steps"]:
        write_atomically(run.folder.plots / "reward_distribution.png", distributed(run.title, histogram))


def rewards(title: str, rows: Sequence[Row], measured: Sequence[StoredEvaluation]) -> bytes:
    """Plot the reward and its parts, and held-out accuracy with its intervals."""
    figure, (left, right) = new_figure(title, columns=2)
    steps = [row["step"] for row in rows]
    names = [name for name in rows[-1] if name.startswith("reward/") and name.endswith("/mean")]
    for index, name in enumerate(names):
        values = np.array([np.nan if row.get(name) is None else row[name] for row in rows], dtype=float)
        colour = COLOURS[index % len(COLOURS)]
        label = "total" if name == "reward/mean" else name.removeprefix("reward/").removesuffix("/mean")
        if len(steps) > MANY:
            left.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            values = smooth(values, SMOOTHING)
        left.plot(steps, values, color=colour, label=label, linewidth=1.8)
    finish(left, "reward", legend=len(names) > 1)
    for index, name in enumerate(measured[0].scores if measured else ()):
        having = [one for one in measured if name in one.scores]
        mean, low, high = (np.array([100 * one.scores[name][i] for one in having]) for i in range(3))
        colour = COLOURS[index % len(COLOURS)]
        right.fill_between([one.step for one in having], low, high, color=colour, alpha=0.15, linewidth=0)
        right.plot(
            [one.step for one in having], mean, color=colour, label=name, linewidth=1.8, marker="o", ms=4
        )
    finish(right, "held-out accuracy, %, with 95 % intervals", legend=bool(measured))
    return as_png(figure)


def distributed(title: str, histogram: dict[str, Any]) -> bytes:
    """Plot how often each reward occurs in each step; darker is more often."""
    figure, (axes,) = new_figure(title, columns=1)
    counts = np.array(histogram["counts"], dtype=float)
    shares = counts / np.maximum(counts.sum(axis=0, keepdims=True), 1)
    middles = [(low + high) / 2 for low, high in histogram["bins"]]
    steps = histogram["steps"]
    image = axes.pcolormesh(
        edges(steps), edges(middles), np.sqrt(shares), cmap="Blues", vmin=0, vmax=1.25, linewidth=0
    )
    axes.plot(steps, histogram["mean"], color=COLOURS[1], linewidth=1.8, label="mean")
    axes.plot(
        steps, histogram["quantiles"]["0.5"], color=INK, linewidth=1.2, linestyle=(0, (3, 2)), label="median"
    )
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_ticks([0, 0.5, 0.7071, 1], labels=["0 %", "25 %", "50 %", "100 %"])
    bar.set_label("share of the step's answers", color=MUTED, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8, length=0)
    bar.ax.set_ylim(0, 1)
    finish(axes, "reward", legend=False, grid=False)
    figure.legend(loc="upper right", ncols=2, frameon=False, fontsize=8, labelcolor=MUTED)
    return as_png(figure)


def edges(middles: Sequence[float]) -> list[float]:
    """Return the edges of the cells around the given centres."""
    if len(middles) == 1:
        return [middles[0] - 0.5, middles[0] + 0.5]
    between = [(a + b) / 2 for a, b in itertools.pairwise(middles)]
    return [2 * middles[0] - between[0], *between, 2 * middles[-1] - between[-1]]


def smooth(values: Any, weight: float) -> Any:
    """Return the bias-corrected exponential moving average."""
    total = norm = 0.0
    smoothed = []
    for value in values:
        if not np.isnan(value):
            total = weight * total + (1 - weight) * value
            norm = weight * norm + (1 - weight)
        smoothed.append(total / norm if norm else np.nan)
    return np.array(smoothed)


def new_figure(title: str, *, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from error
    # Without pyplot, there is no window and no state shared with the user's plots.
    figure = Figure(figsize=(5.4 * columns if columns > 1 else 8.0, 3.9), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def finish(axes: Any, label: str, *, legend: bool, grid: bool = True) -> None:
    axes.set_title(label, color=MUTED, fontsize=9, loc="left")
    axes.set_xlabel("step", color=MUTED, fontsize=9)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for side in axes.spines.values():
        side.set_visible(False)
    if grid:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    if legend:
        axes.legend(frameon=False, fontsize=8, labelcolor=MUTED)


def as_png(figure: Any) -> bytes:
    buffer = BytesIO()
    # Without the software version, the same run gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def write_all(folder: RunFolder, *, own: bool, stats: Mapping[str, object] | None = None) -> Path:
    """Write the report and the plots.

    own: whether this process is the one that trains in the folder
    stats: the content of training_stats.json, if it is not written yet
    """
    run = RunReader(folder, stats=stats)
    try:
        for path in (folder.path, folder.plots):
            remove_temporaries(path)
        path = write_report(run, state=run.state_at_rest() if own else run.state())
        write_plots(run)
    except OSError as error:
        raise ConfigError(f"cannot write the report in {folder.path}: {error.strerror or error}") from error
    return path
