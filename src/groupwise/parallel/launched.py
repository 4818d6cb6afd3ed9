"""What `accelerate launch` was told, read from the environment that it leaves to its processes."""

from __future__ import annotations

import os

from groupwise.config.sections import RunConfig
from groupwise.errors import ConfigError

DIVIDING = ("fsdp", "zero1", "zero2", "zero3")
"""Layouts that divide the policy, or what its optimizer keeps."""
DEEPSPEED = "ACCELERATE_DEEPSPEED_"


def layout_of(run: RunConfig) -> str:
    """Return how several processes share the update: ddp, fsdp, zero1, zero2, zero3 or context."""
    if run.parallel is not None:
        return run.parallel
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return f"zero{zero_stage()}"
    return "fsdp" if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" else "ddp"


def zero_stage() -> int:
    """The ZeRO stage of accelerate's DeepSpeed settings; what they cannot decide here is refused."""
    told = {name.removeprefix(DEEPSPEED): value for name, value in os.environ.items() if name.startswith(DEEPSPEED)}
    if told.get("CONFIG_FILE", "none") != "none":
        raise ConfigError(
            "accelerate names a DeepSpeed file, but its settings are this program's own: "
            "say zero_stage instead of deepspeed_config_file"
        )
    stage = told.get("ZERO_STAGE", "2")
    if stage not in ("1", "2", "3"):
        raise ConfigError(f"accelerate's zero_stage must be 1, 2 or 3; got {stage}")
    return int(stage)
