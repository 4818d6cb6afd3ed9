"""What `accelerate launch` was told, read from the environment that it leaves to its processes."""

from __future__ import annotations

import os

from groupwise.config.sections import RunConfig
from groupwise.errors import ConfigError


def layout_of(run: RunConfig) -> str:
    """Return how several processes share the update: ddp, fsdp or context."""
    if run.parallel is not None:
        return run.parallel
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ConfigError(
            "accelerate was told to use DeepSpeed, which is not used here: its FSDP setting divides the "
            "same things (configs/accelerate-fsdp.yaml), or set run.parallel"
        )
    return "fsdp" if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" else "ddp"
