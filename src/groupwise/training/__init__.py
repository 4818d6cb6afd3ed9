"""The training loop. Start with `loop`."""

from groupwise.training.loop import train

__all__ = ["train"]
