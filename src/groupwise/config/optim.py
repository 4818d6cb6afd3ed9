"""The section of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.config.checks import between, one_of
from groupwise.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adamw8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How gradients become weights (AdamW)."""

    learning_rate: float | None = None
    """None: 1e-4 for the built-in model, 1e-5 with adapters, 1e-6 for full fine-tuning; in a warm start 5e-4,
    2e-4 and 2e-5."""
    schedule: str = "constant"
    """constant, linear or cosine, counted in optimizer steps."""
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    kind: str = "adamw"
    """adamw, or adamw8bit: its state in eight bits (bitsandbytes)."""
    offload: bool = False
    """Keep the optimizer's state and a copy of the trained weights in main memory, and step there."""
    epochs: int = 1
    """Passes over each step's samples."""
    minibatches: int | None = None
    """Optimizer steps in each pass. None: 2 for the built-in model, 1 for any other."""
    micro_batch_tokens: int | None = None
    """Tokens in one forward and backward pass: bounds memory, never changes the gradient. None: by model."""

    def __post_init__(self) -> None:
        one_of("optim.schedule", self.schedule, SCHEDULES)
        one_of("optim.kind", self.kind, OPTIMIZERS)
        if self.offload and self.kind != "adamw":
            raise ConfigError("optim.offload goes with optim.kind=adamw: there is memory enough over there")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise ConfigError(f"optim.learning_rate must lie between 0 and 1; got {self.learning_rate!r}")
        for setting, beta in (("optim.beta1", self.beta1), ("optim.beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ConfigError(f"{setting} must be at least 0 and less than 1; got {beta!r}")
        between("optim.eps", self.eps, 0.0)
        between("optim.weight_decay", self.weight_decay, 0.0)
        between("optim.warmup_steps", self.warmup_steps, 0)
        between("optim.max_grad_norm", self.max_grad_norm, 0.0)
        between("optim.epochs", self.epochs, 1)
        between("optim.minibatches", self.minibatches, 1)
        between("optim.micro_batch_tokens", self.micro_batch_tokens, 1)

    @property
    def updates(self) -> int:
        """Optimizer steps per training step."""
        return self.epochs * (self.minibatches or 1)
