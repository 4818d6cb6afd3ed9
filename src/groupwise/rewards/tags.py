"""Reading `<think>…</think><answer>…</answer>` out of a completion.

The prompt already ends in `<think>`, so a completion begins inside the thinking. Everything before
`</think>` is thinking, where the model may write what it likes, an `<answer>` included. The answer
is the one `<answer>` block after it. Two blocks, or a second `</think>` that would let it pick
which part counts, are no answer at all: nothing is gained by writing more.

Counting and splitting only, never a backtracking pattern: the time is linear in the text.
"""

from __future__ import annotations

THINK, END_THINK = "<think>", "</think>"
ANSWER, END_ANSWER = "<answer>", "</answer>"


def final_answer(completion: str) -> str | None:
    """Return what stands in the one answer block after the thinking, or None.

    A completion that never closes its thinking may still have exactly one block in all. Text around
    the block is allowed here; `is_well_formed` is what refuses it.
    """
    if completion.count(END_THINK) > 1:
        return None
    _, closed, rest = completion.partition(END_THINK)
    scope = rest if closed else completion
    if scope.count(ANSWER) != 1 or scope.count(END_ANSWER) != 1:
        return None
    before, _, after = scope.partition(ANSWER)
    if END_ANSWER in before:
        return None
    return after.partition(END_ANSWER)[0].strip()


def is_well_formed(completion: str) -> bool:
    """Tell whether a completion is: thinking, `</think>`, space, one answer block, space.

    Thinking and answer must not be blank, and neither may hold a think tag.
    """
    thinking, _, rest = completion.partition(END_THINK)
    block = rest.strip()
    return (
        completion.count(END_THINK) == 1
        and THINK not in completion
        and bool(thinking.strip())
        and block.startswith(ANSWER)
        and block.endswith(END_ANSWER)
        and bool(final_answer(completion))
    )
