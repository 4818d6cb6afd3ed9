"""Attention over stretches of a row without any padding: for a GPU in half precision.

There torch's flash kernel takes the row as it is, with the places where stretches begin.

Axes: T query tokens, S key tokens, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from groupwise.model.padded import Integers
from groupwise.model.transfer import to_device

LARGEST_HEAD = 256


def fits(q_THD: Tensor) -> bool:
    """Whether the kernel takes queries of this kind."""
    half, size = q_THD.dtype in (torch.float16, torch.bfloat16), q_THD.shape[-1]
    return q_THD.device.type == "cuda" and half and size <= LARGEST_HEAD and size % 8 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenAttention:
    """Each stretch of queries attends to the stretch of keys of its number."""

    starts_q: Tensor
    """Where each stretch of queries begins, and the end of the last."""
    starts_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool

    @classmethod
    def build(
        cls, queries: Integers, keys: Integers, *, causal: bool, device: torch.device
    ) -> VarlenAttention:
        """For stretches of these lengths that follow one another."""

        def starts(lengths: Integers) -> Tensor:
            bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            return to_device(bounds, device)

        starts_q = starts(queries)
        return cls(
            starts_q=starts_q,
            starts_k=starts_q if causal else starts(keys),
            longest_q=int(queries.max()),
            longest_k=int(keys.max()),
            causal=causal,
        )

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Return (output_THD, lse_TH)."""
        output_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD, k_SKD, v_SKD, *self._stretches, 0.0, self.causal, False, scale=scale
        )
        return output_THD, lse_HT.T

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        output_THD: Tensor,
        lse_TH: Tensor,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_THD, dk_SKD, dv_SKD), given the output and lse over these keys and any others."""
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q_THD.device)
        dq_THD, dk_SKD, dv_SKD = torch.ops.aten._flash_attention_backward(
            grad_THD,
            q_THD,
            k_SKD,
            v_SKD,
            output_THD,
            lse_TH.T.contiguous(),
            *self._stretches,
            0.0,
            self.causal,
            no_dropout,
            no_dropout,
            scale=scale,
        )
        return dq_THD, dk_SKD, dv_SKD

    @property
    def _stretches(self) -> tuple[Tensor, Tensor, int, int]:
        return self.starts_q, self.starts_k, self.longest_q, self.longest_k
