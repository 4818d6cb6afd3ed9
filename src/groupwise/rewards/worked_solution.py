"""Reading `<start_working_out>…<end_working_out><SOLUTION>…</SOLUTION>` out of a completion.

The working out is where the model may write what it likes, a `<SOLUTION>` included. What counts is
the one block after it.
"""

from __future__ import annotations

import re

from groupwise.rewards.blocks import only_block

START, END = "<start_working_out>", "<end_working_out>"
SOLUTION, END_SOLUTION = "<SOLUTION>", "</SOLUTION>"
TAGS = (START, END, SOLUTION, END_SOLUTION)
DIFFERENT = 4
"""Characters that any work has: `11+11=22` has these."""
ENOUGH = 1000
"""Characters of the working out that are looked at."""
ANY_TAG = re.compile("|".join(TAGS))


def solution_of(completion: str) -> str | None:
    """Return what stands in the one solution block after the working out, or None."""
    return only_block(completion, after=END, opening=SOLUTION, closing=END_SOLUTION)


def is_exact(completion: str, *, least_working: int) -> bool:
    """Tell whether a completion is the working out, the solution, and nothing else.

    Each tag stands once, and the working out has at least `least_working` characters besides spaces: half of
    them or more letters or digits, and not the same few again and again.
    """
    text = completion.strip()
    if not (text.startswith(START) and text.endswith(END_SOLUTION)):
        return False
    if tags_once(text) < len(TAGS):
        return False
    working, _, rest = text.removeprefix(START).partition(END)
    block = rest.strip()
    solution = block.removeprefix(SOLUTION).removesuffix(END_SOLUTION).strip()
    return has_work(working, least=least_working) and block.startswith(SOLUTION) and bool(solution)


def has_work(working: str, *, least: int) -> bool:
    """Tell whether something stands there that may be work: `........` is none."""
    start = "".join(working[:ENOUGH].split())
    said = sum(map(str.isalnum, start))
    return len(start) >= least and 2 * said >= least and len(set(start)) >= DIFFERENT


def has_tags(completion: str) -> bool:
    """Tell whether any of the four tags stands in the completion."""
    return ANY_TAG.search(completion) is not None


def tags_once(completion: str) -> int:
    """Return how many of the four tags stand in the completion exactly once."""
    found = ANY_TAG.findall(completion)
    return [found.count(tag) for tag in TAGS].count(1)
