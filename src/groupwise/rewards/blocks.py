"""The one block of a completion that counts: after the thinking, between two tags.

Counting and splitting only, never a backtracking pattern: the time is linear in the text.
"""

from __future__ import annotations


def only_block(completion: str, *, after: str, opening: str, closing: str) -> str | None:
    """Return what stands in the one block after the tag that ends the thinking, or None.

    Two blocks, or a second end of the thinking that would let the writer pick which part counts, are none
    at all: nothing is gained by writing more. A completion that never ends its thinking may still have
    exactly one block in all. Text around the block is allowed here.
    """
    _, ended, rest = completion.partition(after)
    if after in rest:
        return None
    scope = rest if ended else completion
    if scope.count(opening) != 1 or scope.count(closing) != 1:
        return None
    before, _, block = scope.partition(opening)
    if closing in before:
        return None
    return block.partition(closing)[0].strip()
