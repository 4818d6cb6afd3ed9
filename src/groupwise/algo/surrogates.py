"""Surrogates other than the clipped ratio of `losses`: CISPO, DPPO, SAPO, and losses of the user.

A surrogate returns the loss of each token and a dict of metrics, which are sums over tokens.
`losses.SURROGATES` and `CUSTOM_LOSSES` have them by name; CONTRIBUTING.md lists what a new one needs.

Axes: N trained tokens of one micro-batch, flattened without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.algo.losses import LossSettings, Tokens

Surrogate = Callable[["Tokens", "LossSettings"], tuple[Tensor, dict[str, Tensor]]]


def capped_reinforce(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return REINFORCE weighted by the ratio, capped at 1 + clip_high (CISPO, arXiv 2506.13585).

    The cap is on the weight, not on the gradient: every token keeps its gradient. As in the paper there is
    no lower bound; `clip_low` and `clip_two_sided` are not used.
    """
    ratio_N = (tokens.logprobs_N - tokens.old_N).exp().detach()
    cap = 1 + settings.clip_high
    metrics = {"policy/ratio": ratio_N.sum(), "policy/clip_high": (ratio_N > cap).sum()}
    return -ratio_N.clamp(max=cap) * tokens.advantages_N * tokens.logprobs_N, metrics


def inside_trust_region(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return REINFORCE weighted by the ratio, on tokens inside a trust region (DPPO, arXiv 2602.04879).

    A token leaves the region when the policy has moved it in the direction of its advantage, and the
    divergence between the policy and the sampler exceeds `divergence_limit`. The divergence is that of two
    outcomes, this token or any other: total variation |p - q| (dppo_tv) or KL(q || p) (dppo_kl), where p is
    the token's probability now and q the one that it was sampled with.
    """
    with torch.no_grad():
        now_N, sampled_N = tokens.logprobs_N.exp(), tokens.sampled_N.exp()
        if settings.kind == "dppo_tv":
            divergence_N, default = (now_N - sampled_N).abs(), 0.15
        else:
            divergence_N, default = binary_kl(sampled_N, now_N), 0.05
        limit = default if settings.divergence_limit is None else settings.divergence_limit
        outward_N = torch.where(tokens.advantages_N > 0, now_N > sampled_N, now_N < sampled_N)
        masked_N = outward_N & (divergence_N > limit)
        ratio_N = (tokens.logprobs_N - tokens.old_N).exp().clamp(max=DPPO_RATIO_CAP)
    metrics = {
        "policy/ratio": ratio_N.sum(),
        "policy/clip_low": (masked_N & (tokens.advantages_N < 0)).sum(),
        "policy/clip_high": (masked_N & (tokens.advantages_N > 0)).sum(),
    }
    return -ratio_N.masked_fill(masked_N, 0.0) * tokens.advantages_N * tokens.logprobs_N, metrics


DPPO_RATIO_CAP = 20.0
"""Bound of the ratio, as in the authors' code; tokens that far out are almost always masked."""


def binary_kl(q_N: Tensor, p_N: Tensor) -> Tensor:
    """Return KL between Bernoulli(q) and Bernoulli(p)."""
    tiny = torch.finfo(q_N.dtype).tiny
    rest_N = ((1 - q_N).clamp(min=tiny) / (1 - p_N).clamp(min=tiny)).log()
    return q_N * (q_N.clamp(min=tiny) / p_N.clamp(min=tiny)).log() + (1 - q_N) * rest_N


def soft_gate(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -advantage * 4 / tau * sigmoid(tau * (ratio - 1)) (SAPO, arXiv 2511.20347).

    The gate replaces the clip: its slope is 1 at a ratio of 1 and fades smoothly on both sides, faster for
    punished tokens (`tau_negative`).
    """
    ratio_N = (tokens.logprobs_N - tokens.old_N).exp()
    tau_N = torch.where(tokens.advantages_N > 0, settings.tau_positive, settings.tau_negative)
    gate_N = (tau_N * (ratio_N - 1)).sigmoid() * 4 / tau_N
    return -tokens.advantages_N * gate_N, {"policy/ratio": ratio_N.detach().sum()}


CUSTOM_LOSSES: dict[str, Surrogate] = {}
"""Functions of the user, by the name that algo.loss gives them."""


def register_loss(name: str, function: Callable[[Tokens, LossSettings], Any]) -> None:
    """Let algo.loss name a function of the user."""
    CUSTOM_LOSSES[name] = checked_loss(name, function)


def checked_loss(name: str, function: Callable[[Tokens, LossSettings], Any]) -> Surrogate:
    """Return the user's function as a `Surrogate` that names its mistakes.

    It returns the loss of each token, or that and a dict of metrics, which are sums over tokens.
    """

    def surrogate(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            returned = function(tokens, settings)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"algo.loss {name} raised {type(error).__name__}: {error}") from error
        loss_N, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        shape = tuple(tokens.logprobs_N.shape)
        if not isinstance(loss_N, Tensor) or tuple(loss_N.shape) != shape:
            got = f"shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
            raise ConfigError(
                f"algo.loss {name} must return one loss per token, a tensor of shape {shape}; got {got}"
            )
        if tokens.logprobs_N.requires_grad and not loss_N.requires_grad:
            raise ConfigError(
                f"algo.loss {name} has no gradient; compute its loss from tokens.logprobs_N without detach()"
            )
        if not bool(loss_N.isfinite().all()):
            count = int((~loss_N.isfinite()).sum())
            raise ConfigError(f"algo.loss {name} returned NaN or inf for {count} of {len(loss_N)} tokens")
        return loss_N, {key: as_sum(name, key, value, loss_N) for key, value in dict(metrics).items()}

    return surrogate


def as_sum(name: str, key: str, value: Any, like: Tensor) -> Tensor:
    """Return a metric of the user's loss as a scalar tensor."""
    number = torch.as_tensor(value, device=like.device).detach()
    if number.numel() != 1:
        raise ConfigError(
            f"algo.loss {name} returned the metric {key!r} with shape {tuple(number.shape)}; return its sum "
            "over tokens"
        )
    return number.reshape(())
