"""The optimizer: AdamW on the device, in 8 bits, sharded by DeepSpeed, or offloaded to the CPU.

`CPUAdamW` keeps its moments in main memory and steps one slice of a parameter at a time. The next slice is
transferred during the step of the current one. Both use pinned staging buffers that are allocated once:
pinned transfers are several times faster, and allocating would take longer than the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from groupwise.config.schema import OptimConfig
from groupwise.errors import ConfigError
from groupwise.model.policy import Policy


def make_optimizer(policy: Policy, optim: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters: fused, 8-bit, CPU-offloaded, or sharded by DeepSpeed."""
    assert optim.learning_rate is not None, "the config must be resolved first"
    parameters = list(policy.owned().values())
    settings: dict[str, Any] = {
        "lr": optim.learning_rate,
        "betas": (optim.beta1, optim.beta2),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    if policy.zero is not None:
        return make_zero_optimizer(policy, optim, settings)
    if optim.offload:
        return CPUAdamW(parameters, **settings)
    if optim.kind == "adamw8bit":
        if find_spec("bitsandbytes") is None:
            raise ConfigError("optim.kind=adamw8bit requires bitsandbytes: pip install bitsandbytes")
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **settings)
        return optimizer
    return torch.optim.AdamW(parameters, fused=True, **settings)


def make_zero_optimizer(
    policy: Policy, optim: OptimConfig, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return AdamW with its state sharded by DeepSpeed, optionally in main memory."""
    assert policy.zero is not None
    if optim.kind != "adamw":
        raise ConfigError(f"run.parallel=zero1, zero2 and zero3 require optim.kind=adamw; got {optim.kind}")
    optimizer = torch.optim.AdamW(list(policy.trainable().values()), fused=True, **settings)
    policy.zero.start(optimizer, max_grad_norm=optim.max_grad_norm, offload=optim.offload)
    return optimizer


PIECE = 1 << 22
"""Elements per slice."""


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A slice of a parameter with its gradient and optimizer state."""

    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    steps: float
    """Optimizer steps before this one."""
    group: dict[str, Any]


class StagingBuffer:
    """Pinned main memory that receives a slice of any dtype."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._weight, self._gradient = (
            torch.empty(4 * PIECE, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        )
        self._arrived = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def fetch(self, piece: ParameterSlice) -> None:
        """Start copying a slice to this buffer, after earlier copies in the stream."""
        _like(self._weight, piece.weight).copy_(piece.weight, non_blocking=True)
        _like(self._gradient, piece.gradient).copy_(piece.gradient, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self, piece: ParameterSlice) -> tuple[Tensor, Tensor]:
        """Wait for a fetched slice and return its weight and gradient."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return _like(self._weight, piece.weight), _like(self._gradient, piece.gradient)


def _like(memory: Tensor, other: Tensor) -> Tensor:
    return memory[: other.numel() * other.element_size()].view(other.dtype)


class CPUAdamW(torch.optim.Optimizer):
    """AdamW with moments and arithmetic in float32 in main memory."""

    def __init__(self, parameters: list[torch.nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, settings)
        self._buffers = [StagingBuffer(parameters[0].device) for _ in range(2)]
        self._weight, self._gradient = torch.empty(2, PIECE)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        non_contiguous: list[tuple[Tensor, Tensor]] = []
        pieces = list(self._pieces(non_contiguous))
        for number, piece in enumerate(pieces):
            current, other = self._buffers[number % 2], self._buffers[1 - number % 2]
            if number == 0:
                current.fetch(piece)
            if number + 1 < len(pieces):
                other.fetch(pieces[number + 1])
            self._step(piece, *current.wait(piece))
        for parameter, flat in non_contiguous:
            parameter.copy_(flat.view(parameter.shape))

    def _pieces(self, non_contiguous: list[tuple[Tensor, Tensor]]) -> Iterator[ParameterSlice]:
        """Yield slices of every parameter with a gradient; copy and list non-contiguous parameters."""
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
                    non_contiguous.append((parameter, weight))
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
        """Step a slice in its staging buffer and copy it back to the parameter."""
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
        """Restore a saved state in float32 on the CPU; torch would cast it and move it to the parameters."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            self.state[parameters[index]] = {
                name: value.to("cpu", torch.float32, copy=True) for name, value in state.items()
            }
