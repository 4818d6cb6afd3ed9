"""Arrays of the host on their way to a device, which goes on with what it is doing."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor there.

    A copy from memory that may be swapped out makes the host wait until the GPU has done all it was given;
    from pinned memory it takes its place behind that, and the host can give it more.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
