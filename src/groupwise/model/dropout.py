"""Whether training mode adds noise: seen by looking at the modules, as families keep it in several ways."""

from __future__ import annotations

from torch import nn


def has_dropout(model: nn.Module) -> bool:
    return any(_drops(module) for module in model.modules())


def _drops(module: nn.Module) -> bool:
    """Whether a module is a dropout layer, or has a share to drop that it hands to a function.

    Attention's share is not looked at: our attention drops nothing.
    """
    if isinstance(module, nn.Dropout):
        return module.p > 0
    shares = {name: value for name, value in vars(module).items() if "drop" in name}
    return any(
        isinstance(share, float) and share > 0 and name != "attention_dropout"
        for name, share in shares.items()
    )
