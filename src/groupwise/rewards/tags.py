"""Reading `<think>…</think><answer>…</answer>` out of a completion.

The prompt already ends in `<think>`, so a completion begins inside the thinking. Everything before
`</think>` is thinking, where the model may write what it likes, an `<answer>` included. The answer
is the one `<answer>` block after it.
"""

from __future__ import annotations

from groupwise.rewards.blocks import only_block

THINK, END_THINK = "<think>", "</think>"
ANSWER, END_ANSWER = "<answer>", "</answer>"


def final_answer(completion: str) -> str | None:
    """Return what stands in the one answer block after the thinking, or None.

    Text around the block is allowed here; `is_well_formed` is what refuses it.
    """
    return only_block(completion, after=END_THINK, opening=ANSWER, closing=END_ANSWER)


def is_well_formed(completion: str) -> bool:
    """Tell whether a completion is: thinking, `</think>`, space, one answer block, space.

    Thinking and answer must not be blank, and neither may hold a think tag.
    """
    thinking, ended, rest = completion.partition(END_THINK)
    if not ended or END_THINK in rest:
        return False
    block = rest.strip()
    return (
        THINK not in completion
        and bool(thinking.strip())
        and block.startswith(ANSWER)
        and block.endswith(END_ANSWER)
        and bool(final_answer(completion))
    )
