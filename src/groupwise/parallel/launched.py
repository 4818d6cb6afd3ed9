"""What `accelerate launch` was told, read from the environment that it leaves to its processes."""

from __future__ import annotations

import os
from dataclasses import replace

from groupwise.config import Config
from groupwise.config.sections import RunConfig
from groupwise.errors import ConfigError

DIVIDING = ("fsdp", "zero1", "zero2", "zero3")
"""Layouts that divide the policy, or what its optimizer keeps."""


def layout_of(run: RunConfig) -> str:
    """Return how several processes share the update: ddp, fsdp, zero1, zero2, zero3 or context."""
    if run.parallel is not None:
        return run.parallel
    if told("USE_DEEPSPEED", "false") == "true":
        return f"zero{zero_stage()}"
    return "fsdp" if told("USE_FSDP", "false") == "true" else "ddp"


def as_launched(config: Config) -> Config:
    """Take over where accelerate's DeepSpeed settings put the optimizer; the rest is ours to say."""
    if config.run.parallel is not None or not layout_of(config.run).startswith("zero"):
        return config
    if told("DEEPSPEED_CONFIG_FILE") != "none":
        raise ConfigError(
            "deepspeed_config_file is not read: most of what it says is said by settings of this program; "
            "give accelerate a zero_stage instead"
        )
    if told("DEEPSPEED_OFFLOAD_PARAM_DEVICE") != "none":
        raise ConfigError("offload_param_device must be none: only the optimizer can be kept in main memory")
    place = told("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")
    if place not in ("none", "cpu"):
        raise ConfigError(f"offload_optimizer_device must be none or cpu; got {place}")
    return config if place == "none" else replace(config, optim=replace(config.optim, offload=True))


def zero_stage() -> int:
    stage = told("DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("1", "2", "3"):
        raise ConfigError(f"accelerate's zero_stage must be 1, 2 or 3; got {stage}")
    return int(stage)


def told(name: str, default: str = "none") -> str:
    return os.environ.get(f"ACCELERATE_{name}", default).lower()
