"""AdamW whose moments live in main memory: gradients and weights visit them, a piece at a time.

A piece travels while the one before it is stepped, and both land in memory that is taken once: what is
pinned travels several times as fast as what is not, and new memory costs more than the step itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from groupwise.config.schema import OptimConfig
from groupwise.errors import ConfigError
from groupwise.invariants import check_finite
from groupwise.model.policy import Policy

PIECE = 1 << 22
"""Numbers that travel at a time."""


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A segment of a parameter, and what belongs to it."""

    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    steps: float
    """Made before this one."""
    group: dict[str, Any]


class StagingBuffer:
    """Where a piece lands in main memory, whatever its precision."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._weight, self._gradient = (
            torch.empty(4 * PIECE, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        )
        self._arrived = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def fetch(self, piece: ParameterSlice) -> None:
        """Send for a piece; it comes after whatever left from here before."""
        _like(self._weight, piece.weight).copy_(piece.weight, non_blocking=True)
        _like(self._gradient, piece.gradient).copy_(piece.gradient, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def landed(self, piece: ParameterSlice) -> tuple[Tensor, Tensor]:
        """Wait for a piece that was sent for: its weight and its gradient."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return _like(self._weight, piece.weight), _like(self._gradient, piece.gradient)


def _like(memory: Tensor, other: Tensor) -> Tensor:
    return memory[: other.numel() * other.element_size()].view(other.dtype)


class CPUAdamW(torch.optim.Optimizer):
    """The moments, and the steps themselves, are in float32."""

    def __init__(self, parameters: list[torch.nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, settings)
        self._berths = [StagingBuffer(parameters[0].device) for _ in range(2)]
        self._weight, self._gradient = torch.empty(2, PIECE)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        scattered: list[tuple[Tensor, Tensor]] = []
        pieces = list(self._pieces(scattered))
        for number, piece in enumerate(pieces):
            here, other = self._berths[number % 2], self._berths[1 - number % 2]
            if number == 0:
                here.fetch(piece)
            if number + 1 < len(pieces):
                other.fetch(pieces[number + 1])
            self._step(piece, *here.landed(piece))
        for parameter, flat in scattered:
            parameter.copy_(flat.view(parameter.shape))

    def _pieces(self, scattered: list[tuple[Tensor, Tensor]]) -> Iterator[ParameterSlice]:
        """Cut up every parameter that has a gradient; those not in one piece are copied, and noted."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(parameter.shape) for _ in range(2))
                weight = parameter.detach().flatten()
                if not parameter.is_contiguous():
                    scattered.append((parameter, weight))
                flat = (
                    weight,
                    parameter.grad.flatten(),
                    state["exp_avg"].view(-1),
                    state["exp_avg_sq"].view(-1),
                )
                steps = float(state["step"])
                state["step"] += 1
                for one, gradient, first, second in zip(*(x.split(PIECE) for x in flat), strict=True):
                    yield ParameterSlice(one, gradient, (first, second), steps, group)

    def _step(self, piece: ParameterSlice, weight: Tensor, gradient: Tensor) -> None:
        """Step a piece where it has landed, and send it back."""
        group, count = piece.group, len(weight)
        beta1, beta2 = group["betas"]
        exact = self._weight[:count].copy_(weight)
        adamw(
            [exact],
            [self._gradient[:count].copy_(gradient)],
            [piece.moments[0]],
            [piece.moments[1]],
            [],
            [torch.tensor(piece.steps)],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        piece.weight.copy_(weight.copy_(exact), non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a saved state back as it is; torch would round it and move it to where the parameters are."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            self.state[parameters[index]] = {
                name: value.to("cpu", torch.float32, copy=True) for name, value in state.items()
            }


def make_optimizer(policy: Policy, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over what the policy trains: fused, with its state in eight bits, or in main memory."""
    assert optim.learning_rate is not None, "the config is resolved before a run starts"
    parameters = list(policy.owned().values())
    settings: dict[str, Any] = {
        "lr": optim.learning_rate,
        "betas": (optim.beta1, optim.beta2),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    if policy.zero is not None:
        return make_divided(policy, optim, settings)
    if optim.offload:
        return CPUAdamW(parameters, **settings)
    if optim.kind == "adamw8bit":
        if find_spec("bitsandbytes") is None:
            raise ConfigError("optim.kind=adamw8bit takes a package: pip install bitsandbytes")
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **settings)
        return optimizer
    return torch.optim.AdamW(parameters, fused=True, **settings)


def make_divided(policy: Policy, optim: OptimConfig, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW as DeepSpeed divides it among processes, in main memory or not."""
    assert policy.zero is not None
    if optim.kind != "adamw":
        raise ConfigError(f"run.parallel=zero… goes with optim.kind=adamw; got {optim.kind}")
    optimizer = torch.optim.AdamW(list(policy.trainable().values()), fused=True, **settings)
    policy.zero.start(optimizer, max_grad_norm=optim.max_grad_norm, offload=optim.offload)
    return optimizer


def clipped_step(
    policy: Policy, optimizer: torch.optim.Optimizer, *, rate: float, max_grad_norm: float
) -> float:
    """Clip, step, forget the gradient; returns its norm before clipping. A limit of 0 clips nothing."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if policy.zero is not None:
        norm = policy.zero.step()  # clips as it was told when it was made
        check_finite("the gradient norm", norm)
    else:
        norm = clip(policy, max_grad_norm or float("inf"))
        check_finite("the gradient norm", norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    policy.version += 1
    return norm


def clip(policy: Policy, limit: float) -> float:
    """Scale the gradient down to `limit` where it is larger; returns its norm before."""
    if policy.shards is None:
        return float(torch.nn.utils.clip_grad_norm_(list(policy.trainable().values()), limit))
    policy.shards.take_gradients()
    owned = list(policy.owned().values())
    whole = [p.grad for n, p in policy.owned().items() if n not in policy.shards.parts and p.grad is not None]
    norm = policy.shards.norm(whole)
    torch.nn.utils.clip_grads_with_norm_(owned, limit, norm)
    return float(norm)


def learning_rate(update: int, *, peak: float, kind: str, warmup: int, total: int) -> float:
    """Return the rate of optimizer step `update` (from 0) of `total`.

    The first warm-up step already learns; linear and cosine reach 0 just after the last step.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return peak * (1 - done) if kind == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
