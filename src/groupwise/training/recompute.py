"""Whether activations are kept or computed again in the backward pass (gradient checkpointing)."""

from __future__ import annotations

from dataclasses import replace

from groupwise.config import Config
from groupwise.training.preflight import FILLED, PROMPT_TOKENS, Place, preflight
from groupwise.training.shape import Shape


def choose_recomputing(
    config: Config, shape: Shape, place: Place, *, free: int, prompt_tokens: int = PROMPT_TOKENS
) -> tuple[Config, str]:
    """Settle model.gradient_checkpointing where it is left open, and say why: on where kept ones do not fit.

    `free`: bytes that the run may take. Generating is not looked at: it keeps no activations.
    """
    if config.model.gradient_checkpointing is not None:
        state = "on" if config.model.gradient_checkpointing else "off"
        return config, f"gradient checkpointing is {state}, as the settings say"
    kept = replace(config, model=replace(config.model, gradient_checkpointing=False))
    needed = preflight(kept, shape, place, prompt_tokens=prompt_tokens).updating
    sizes = f"about {needed / 1e9:.1f} GB of the {free / 1e9:.1f} GB that are free"
    if needed <= FILLED * free:
        return kept, f"gradient checkpointing is off: without it an update takes {sizes}"
    again = replace(config, model=replace(config.model, gradient_checkpointing=True))
    return again, f"gradient checkpointing is on: without it an update would take {sizes}"
