"""The output layer's logits, in float32 whatever the weights are in.

A bfloat16 between 16 and 32, where the logits of likely tokens are, is 1/8 from the next: rounded to that,
the log-probabilities that two kernels give one token differ by some 0.05 nats. A GPU adds products up in
float32 anyway and only has to write them down as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def float_logits(hidden_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return logits_NV; axes: N tokens, M hidden size, V vocabulary."""
    if weight_VM.dtype == torch.float32 or weight_VM.device.type != "cuda":
        return linear(hidden_NM, weight_VM, bias_V).float()
    logits_NV = torch.mm(hidden_NM, weight_VM.T, out_dtype=torch.float32)
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)


def chunks(tokens_N: Tensor, weight_VM: Tensor, logits: int) -> list[slice]:
    """Parts of the tokens with at most so many logits each."""
    size = max(1, logits // weight_VM.shape[0])
    return [slice(start, start + size) for start in range(0, len(tokens_N), size)]
