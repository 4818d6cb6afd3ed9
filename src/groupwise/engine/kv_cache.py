"""Block bookkeeping of the KV cache: the free pool, prompts shared by a group, and finished turns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from groupwise.engine.sampler import PromptLogprobs


class BlockPool:
    """A fixed number of blocks; allocation is deterministic."""

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
        assert count <= len(self._free), "the scheduler must check for free blocks before it takes them"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.count, "a block was given back twice"


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt in the cache, shared by every running member of its group.

    Members append to blocks of their own, so a shared block is written only once. Blocks and logits
    are allocated with the first member and freed with the last.
    """

    tokens: tuple[int, ...]
    blocks: list[int] = field(default_factory=list)
    users: int = 0
    """Reference count: running members and histories."""
    done: int = 0
    """Tokens whose keys and values are in the blocks."""
    logits_V: Tensor | None = None
    """Logits of the token after the prompt; None: prefill is incomplete."""
    history: History | None = None
    """A finished sequence whose cached keys and values begin this prompt."""
    adapter: int = 0
    """Index of the LoRA adapter that computes it."""
    scores: PromptLogprobs | None = None
    """Receives the prompt's log-probabilities, if requested."""

    def clear(self) -> list[int]:
        """Discard the computed state and return its blocks."""
        blocks, self.blocks = self.blocks, []
        self.done, self.logits_V, self.history = 0, None, None
        return blocks


@dataclass(slots=True, eq=False)
class History:
    """A finished sequence whose keys and values stay cached for a prompt that continues it."""

    prefix: Prefix
    blocks: list[int]
    length: int
    """Tokens after the prompt whose keys and values were computed: all but the last."""
    copied: bool = False
    """Whether its continuation has copied the keys and values."""
    evicted: bool = False
    """Whether its blocks have been freed."""
