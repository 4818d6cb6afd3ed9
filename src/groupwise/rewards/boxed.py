r"""Finding the answer that a completion puts in `\boxed{…}`."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BARE = re.compile(r"[^\s{}$\\,;]+")


def last_box(text: str) -> str | None:
    r"""Return what stands in the last balanced `\boxed{…}` or `\fbox{…}`; None for nothing at all.

    `\boxed 42` counts too. A box that is never closed hides no earlier one, and a box inside another
    is part of that one. The time is linear in the text.
    """
    first = BOX.search(text)
    if first is None:
        return None
    closes = closing_braces(text, first.start())
    content: str | None = None
    end = 0
    for box in BOX.finditer(text, first.start()):
        start = box.end()
        if start < end:
            continue  # inside the box before
        if text[start : start + 1] == "{":
            if start in closes:
                end = closes[start]
                content = text[start + 1 : end]
        elif bare := BARE.match(text, start):
            end = bare.end()
            content = bare[0].rstrip(".")
    if content is None:
        return None
    content = content.strip()
    # The whole of it may be a box again.
    inner = BOX.match(content)
    if inner and content[inner.end() : inner.end() + 1] == "{" and content.endswith("}"):
        return last_box(content) if content.count("\\boxed") + content.count("\\fbox") < 9 else None
    return content or None


def closing_braces(text: str, start: int) -> dict[int, int]:
    """Return where each opening brace from there on that is closed is closed; escaped braces do not count."""
    open_at: list[int] = []
    closes: dict[int, int] = {}
    for brace in BRACE.finditer(text, start):
        if brace[0] == "{":
            open_at.append(brace.start())
        elif brace[0] == "}" and open_at:
            closes[open_at.pop()] = brace.start()
    return closes
