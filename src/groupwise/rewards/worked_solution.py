"""Reading `<start_working_out>…<end_working_out><SOLUTION>…</SOLUTION>` out of a completion.

The working out is where the model may write what it likes, a `<SOLUTION>` included. What counts is
the one block after it.
"""

from __future__ import annotations

from groupwise.rewards.blocks import only_block

START, END = "<start_working_out>", "<end_working_out>"
SOLUTION, END_SOLUTION = "<SOLUTION>", "</SOLUTION>"
TAGS = (START, END, SOLUTION, END_SOLUTION)


def solution_of(completion: str) -> str | None:
    """Return what stands in the one solution block after the working out, or None."""
    return only_block(completion, after=END, opening=SOLUTION, closing=END_SOLUTION)


def is_exact(completion: str, *, least_working: int) -> bool:
    """Tell whether a completion is the working out, the solution, and nothing else.

    Each tag stands once, and the working out has at least `least_working` characters besides spaces.
    """
    text = completion.strip()
    if not (text.startswith(START) and text.endswith(END_SOLUTION)):
        return False
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    working, _, rest = text.removeprefix(START).partition(END)
    block = rest.strip()
    return (
        len("".join(working.split())) >= least_working
        and block.startswith(SOLUTION)
        and bool(solution_of(completion))
    )


def tags_once(completion: str) -> int:
    """Return how many of the four tags stand in the completion exactly once."""
    return sum(completion.count(tag) == 1 for tag in TAGS)
