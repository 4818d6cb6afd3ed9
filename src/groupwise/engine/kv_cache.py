"""The KV cache's blocks: which are free, prompts that a whole group reads, and what turns leave behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from groupwise.engine.sampler import PromptLogprobs


class BlockPool:
    """A fixed number of blocks; equal runs get equal blocks."""

    def __init__(self, count: int, *, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "the scheduler checks for room before it takes blocks"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.count, "a block was given back twice"


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt in the cache, shared by every running member of its group.

    Members write behind it in blocks of their own, so a shared block is never written again. Blocks
    and logits come with the first member and go with the last.
    """

    tokens: tuple[int, ...]
    blocks: list[int] = field(default_factory=list)
    users: int = 0
    """Members running on it now, and finished ones that may be continued."""
    done: int = 0
    """Tokens whose keys and values are in the blocks."""
    logits_V: Tensor | None = None
    """Of the token after the prompt; None: not all of it is computed."""
    history: History | None = None
    """What its beginning can be taken over from."""
    adapter: int = 0
    """Which of several adapters reads it."""
    scores: PromptLogprobs | None = None
    """Where its tokens' log-probabilities go, if anyone wants to know them."""

    def clear(self) -> list[int]:
        """Forget what was computed, and return the blocks that held it."""
        blocks, self.blocks = self.blocks, []
        self.done, self.logits_V, self.history = 0, None, None
        return blocks


@dataclass(slots=True, eq=False)
class History:
    """A finished sequence whose keys and values are still there, for a prompt that continues it."""

    prefix: Prefix
    blocks: list[int]
    length: int
    """Tokens behind the prompt whose keys and values were computed: all but the last."""
    taken: bool = False
    """Its continuation has a copy."""
    gone: bool = False
    """Its blocks are somebody else's."""
