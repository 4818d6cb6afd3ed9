"""Which device a model is on."""

from __future__ import annotations

import torch

from groupwise.errors import ConfigError


def device_of(name: str | None) -> torch.device:
    """The device of that name, or the GPU when there is one; refuses one that is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        here = f"GPUs are numbered from 0 to {count - 1} here" if count else "torch sees no GPU here"
        raise ConfigError(f"model.device={name}: {here}")
    return device
