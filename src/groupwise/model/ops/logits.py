"""Logits in float32 for weights of any dtype, and the sampling distribution derived from them.

Between 16 and 32, where the logits of likely tokens are, bfloat16 values are 1/8 apart. With logits rounded
to bfloat16, the log-probabilities of two kernels differ by about 0.05 nats. A GPU accumulates in float32
anyway and only has to store the sums unrounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.errors import ConfigError
from groupwise.model.device import repeatable_linear
from groupwise.records import Sampling


def float_logits(hidden_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return logits_NV; axes: N tokens, M hidden size, V vocabulary."""
    if weight_VM.dtype == torch.float32 or weight_VM.device.type != "cuda":
        return repeatable_linear(hidden_NM, weight_VM, bias_V).float()
    logits_NV: Tensor = _FloatProduct.apply(hidden_NM, weight_VM)  # type: ignore[no-untyped-call]
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)


class _FloatProduct(torch.autograd.Function):
    """Logits in float32 from weights of lower precision. Torch has no gradient of such a product."""

    @staticmethod
    def forward(ctx: Any, hidden_NM: Tensor, weight_VM: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_NM, weight_VM)
        return torch.mm(hidden_NM, weight_VM.T, out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_NM, weight_VM = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad
        dlogits_NV = dlogits_NV.to(weight_VM.dtype)
        return (
            dlogits_NV @ weight_VM if need_hidden else None,
            dlogits_NV.T @ hidden_NM if need_weight else None,
        )


def capped(logits_NV: Tensor, cap: float | None) -> Tensor:
    """Return the logits with a model's soft cap: cap · tanh(logit / cap)."""
    return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)


def chunks(tokens_N: Tensor, weight_VM: Tensor, logits: int) -> list[slice]:
    """Split tokens into slices with at most `logits` logits each."""
    size = max(1, logits // weight_VM.shape[0])
    return [slice(start, start + size) for start in range(0, len(tokens_N), size)]


def scaled_logits(logits_NV: Tensor, sampling: Sampling, *, keep_N: Tensor | None = None) -> Tensor:
    """Return float32 logits whose softmax is the sampling distribution; excluded tokens have -inf.

    Order: temperature, then top-k, top-p and min-p, each on the remaining tokens; ties with the k-th
    token all stay. Greedy sampling uses the distribution at temperature 1, without truncation.
    `keep_N` is a token of each row that is never excluded. In training it is the sampled token, which
    rounding or an update may have moved just outside of the distribution.
    """
    logits_NV = logits_NV.float()
    if sampling.greedy:
        return logits_NV
    if sampling.temperature != 1.0:
        logits_NV = logits_NV / sampling.temperature
    if not sampling.truncates:
        return logits_NV
    allowed_NV = torch.ones_like(logits_NV, dtype=torch.bool)
    if 0 < sampling.top_k < logits_NV.shape[-1]:
        threshold_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        allowed_NV &= logits_NV >= threshold_N1
    if sampling.top_p < 1.0:
        remaining_NV = logits_NV.masked_fill(~allowed_NV, float("-inf"))
        sorted_NV, order_NV = remaining_NV.softmax(-1).sort(dim=-1, descending=True, stable=True)
        # A token stays while the mass before it is below top_p, so the most likely token always stays.
        short_NV = running_sum(sorted_NV) - sorted_NV < sampling.top_p
        allowed_NV &= torch.zeros_like(short_NV).scatter(1, order_NV, short_NV)
    if sampling.min_p > 0.0:
        # A probability ratio is a logit difference, whichever tokens are excluded.
        allowed_NV &= logits_NV >= logits_NV.amax(-1, keepdim=True) + math.log(sampling.min_p)
    if keep_N is not None:
        allowed_NV.scatter_(1, keep_N[:, None], True)
    return logits_NV.masked_fill(~allowed_NV, float("-inf"))


def running_sum(x_NK: Tensor) -> Tensor:
    """Return the cumulative sums of each row. With deterministic kernels, torch refuses its own on a GPU."""
    if x_NK.is_cuda and torch.are_deterministic_algorithms_enabled():
        return doubling_sum(x_NK)
    return x_NK.cumsum(-1)


def doubling_sum(x_NK: Tensor) -> Tensor:
    """Return the cumulative sums of each row from sums of 2, 4, 8, … neighbors, always in the same order."""
    reach = 1
    while reach < x_NK.shape[1]:
        x_NK = torch.cat([x_NK[:, :reach], x_NK[:, reach:] + x_NK[:, :-reach]], dim=1)
        reach *= 2
    return x_NK


def masked_logits(logits_NV: Tensor, masks_NW: Tensor, *, keep_N: Tensor | None = None) -> Tensor:
    """Return logits with -inf for every token whose bit is 0 (`model.grammar`), except those of `keep_N`."""
    bits_B = torch.arange(32, dtype=torch.int32, device=masks_NW.device)
    allowed_NV = (masks_NW[:, :, None] >> bits_B & 1).flatten(1).bool()
    # Models that share a tokenizer may differ in the rows of their embedding.
    allowed_NV = torch.nn.functional.pad(allowed_NV, (0, logits_NV.shape[1] - allowed_NV.shape[1]))
    if keep_N is not None:
        allowed_NV.scatter_(1, keep_N[:, None], True)
    return logits_NV.masked_fill(~allowed_NV, float("-inf"))


class LogitsProcessor:
    """A sampling rule of the user: (tokens so far, logits of the next token) to logits, before temperature.

    The sampler and the trainer apply the same rule, so it must depend on its arguments alone. A logit of -inf
    excludes a token.
    """

    def __init__(self, name: str, function: Callable[[list[int], Tensor], Any]) -> None:
        self.name, self.function = name, function

    def __call__(self, contexts: Iterable[Sequence[int]], logits_NV: Tensor) -> Tensor:
        """Apply the rule to each row; `contexts` has the tokens before each, prompt included."""
        lengths, rows = [], []
        for context, row_V in zip(contexts, logits_NV.float(), strict=True):
            lengths.append(len(context))
            rows.append(self._applied(list(context), row_V))
        processed_NV = torch.stack(rows)
        # One check of all rows: on a GPU each check waits for the device.
        usable_N = processed_NV.isfinite().any(-1) & ~processed_NV.isnan().any(-1)
        if not bool(usable_N.all()):
            raise ConfigError(
                f"rollout.logits_processor {self.name} returned NaN, or excluded every token, after "
                f"{lengths[int(usable_N.int().argmin())]} tokens"
            )
        return processed_NV

    def _applied(self, context: list[int], row_V: Tensor) -> Tensor:
        try:
            # A copy: a rule that writes in place must not change what the engine has cached.
            processed_V = self.function(context, row_V.clone())
        except Exception as error:
            raise ConfigError(
                f"rollout.logits_processor {self.name} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(processed_V, Tensor) or processed_V.shape != row_V.shape:
            got = tuple(processed_V.shape) if isinstance(processed_V, Tensor) else type(processed_V).__name__
            raise ConfigError(
                f"rollout.logits_processor {self.name} must return logits of shape {tuple(row_V.shape)}; "
                f"got {got}"
            )
        return processed_V


def entropy(logprobs_NV: Tensor) -> Tensor:
    """Return the entropy_N in nats; excluded tokens count as 0."""
    return -(logprobs_NV.exp() * logprobs_NV.nan_to_num(neginf=0.0)).sum(-1)
