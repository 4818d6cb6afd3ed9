"""How long a step takes: the work of each phase over what this machine does in a second, measured here."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from groupwise.config import Config
from groupwise.training.preflight import BYTES
from groupwise.training.shape import Shape

SHARE = {"cpu": 0.45, "cuda": 0.4}
"""Of the rate of one large product, what whole passes reach."""
STEP_SECONDS = {"cpu": 0.002, "cuda": 0.0005}
"""What a decoding step costs besides its arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a device can do."""

    kind: str
    flops: float
    """In a second, of one large product."""
    bandwidth: float
    """Bytes read in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of one step."""

    rollout: float
    update: float

    @property
    def step(self) -> float:
        return self.rollout + self.update


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Time one product and one copy: a second or so."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = seconds_of(lambda: a @ b, device)
    whole = torch.empty((1 << 26) if device.type == "cpu" else (1 << 30), dtype=torch.int8, device=device)
    copy = seconds_of(whole.clone, device)
    return Machine(kind=device.type, flops=2 * size**3 / product, bandwidth=2 * whole.numel() / copy)


def seconds_of(work: object, device: torch.device) -> float:
    """The best of several tries."""
    assert callable(work)
    best = float("inf")
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def pace(config: Config, shape: Shape, machine: Machine, *, prompt_tokens: int, answer_tokens: float) -> Pace:
    """Predict a step in which answers have `answer_tokens` on average."""
    rollout = config.rollout
    answers = rollout.prompts * rollout.group_size
    rate = machine.flops * SHARE[machine.kind]
    size = BYTES[config.model.dtype or ("float32" if machine.kind == "cpu" else "bfloat16")]
    active = shape.linear_size + shape.head_params
    at_once = min(answers, config.engine.max_sequences)
    steps = -(-answers // at_once) * answer_tokens
    cache = at_once * (prompt_tokens + answer_tokens) * 2 * shape.layers * shape.key_width * size
    reading = (active * size + cache) / machine.bandwidth
    decoding = steps * (max(2 * active * at_once / rate, reading) + STEP_SECONDS[machine.kind])
    prefill = 2 * shape.linear_size * rollout.prompts * prompt_tokens / rate
    # Forward and backward; a frozen weight needs no gradient of its own. Both passes of the output layer.
    passes = (4 if config.lora.r else 6) + (2 if config.model.gradient_checkpointing else 0)
    trained = answers * answer_tokens
    tokens = trained + rollout.prompts * prompt_tokens
    reference = 2 if config.algo.beta else 0
    update = ((passes + reference) * shape.linear_size * tokens + passes * shape.head_params * trained) / rate
    return Pace(rollout=decoding + prefill, update=update)
