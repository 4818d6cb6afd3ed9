"""What a decoding step reads and writes, in device memory that never moves: a CUDA graph keeps addresses.

The host decides who runs and where their blocks are; the device moves each sequence on by itself.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.sampler import MOST_ALTERNATIVES, likeliest


class StepState:
    """Slots of sequences, and one more that idle rows stand for: ended, with a block that nobody reads."""

    def __init__(
        self,
        *,
        slots: int,
        members: int,
        prompt_blocks: int,
        own_blocks: int,
        idle_block: int,
        device: torch.device,
    ) -> None:
        self.slots, self.members = slots, members
        self.prompt_width, self.own_width = prompt_blocks, own_blocks
        every = _aligned(slots + 1)
        sizes = [
            _aligned(size)
            for size in (slots, slots * (members + 2), every, every * prompt_blocks, every * own_blocks)
        ]
        self._host = np.zeros(sum(sizes), dtype=np.int32)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        ends = np.cumsum(sizes)[:-1].tolist()
        rows, tiles, prompt_lengths, prompt_tables, tables = np.split(self._host, ends)
        self.host_rows = rows
        self.host_tiles = tiles[: slots * (members + 2)].reshape(slots, members + 2)
        self.host_prompt_length = prompt_lengths
        self.host_prompt_table = prompt_tables[: every * prompt_blocks].reshape(every, prompt_blocks)
        self.host_table = tables[: every * own_blocks].reshape(every, own_blocks)
        self.rows, self.tiles, self.prompt_length, self.prompt_table, self.table = self._device.tensor_split(
            ends
        )

        self.seed = torch.zeros(every, dtype=torch.int64, device=device)
        self.adapter = torch.zeros(every, dtype=torch.int64, device=device)
        self.scale = torch.ones(every, device=device)
        """What logits are multiplied by: 1 over the temperature."""
        self.length = torch.ones(every, dtype=torch.int32, device=device)
        """Tokens sampled so far; the last one's key is not stored yet."""
        self.status_and_likely = torch.zeros(
            4 + 2 * MOST_ALTERNATIVES, every, dtype=torch.int32, device=device
        )
        """What the host wants to know after each step, in one copy; the likeliest tokens if someone asks."""
        self.status, likely = self.status_and_likely.tensor_split([4])
        self.done, self.token, logprob, entropy = self.status
        self.logprob, self.entropy = logprob.view(torch.float32), entropy.view(torch.float32)
        self.likely_tokens, likely_logprobs = likely.chunk(2)
        self.likely_logprobs = likely_logprobs.view(torch.float32)
        self.done.fill_(1)

        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """By row, for the step under way: what is fed, where it stands, where its key and value go."""
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.places = torch.zeros(slots, dtype=torch.int64, device=device)
        self.row_length = torch.zeros(slots, dtype=torch.int32, device=device)

        self.host_table[slots] = idle_block
        self.idle()

    def idle(self) -> None:
        """Let no row stand for any sequence."""
        self.host_rows[:] = self.slots
        self.host_tiles[:] = -1
        self.push()

    def set_rows(self, slots_R: NDArray[np.int64], request_R: NDArray[np.int64]) -> None:
        """Say which slots the rows stand for; members of a request are neighbours."""
        count = len(slots_R)
        self.host_rows[:count], self.host_rows[count:] = slots_R, self.slots
        rows = np.arange(count)
        first_R = np.ones(count, dtype=np.bool_)
        first_R[1:] = request_R[1:] != request_R[:-1]
        member = rows - np.flatnonzero(first_R)[np.cumsum(first_R) - 1]
        # A group larger than a tile takes several.
        place = member % self.members
        tile, slot = np.cumsum(place == 0) - 1, slots_R[place == 0]
        self.host_tiles[:] = -1
        self.host_tiles[: len(slot), 0] = slot
        self.host_tiles[: len(slot), 1] = self.host_prompt_length[slot]
        self.host_tiles[tile, 2 + place] = rows

    def push(self) -> None:
        """Send the host's side to the device, in the order of the stream."""
        staged = torch.from_numpy(self._host)
        staged = staged.pin_memory() if self._device.is_cuda else staged.clone()
        self._device.copy_(staged, non_blocking=True)

    def keep_likeliest(self, logits_RV: Tensor, slots_R: Tensor, *, scaled: bool) -> None:
        """Leave the likeliest tokens of each row for the host; `scaled`: the temperature is in the logits."""
        if not scaled:
            logits_RV = logits_RV * self.scale[slots_R, None]
        tokens_RA, logprobs_RA = likeliest(logits_RV.log_softmax(-1))
        self.likely_tokens.index_copy_(1, slots_R, tokens_RA.T.int())
        self.likely_logprobs.index_copy_(1, slots_R, logprobs_RA.T)


def _aligned(count: int) -> int:
    """Round up, so that what follows starts where wide loads may."""
    return -(-count // 64) * 64
