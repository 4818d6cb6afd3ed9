"""A float32 excerpt of a model: its first layers and a few of its tokens.

In bfloat16, rounding grows with depth and depends on the weights. A sound model may differ by half of its
logits from itself when attention is computed in another order, so a comparison in half precision cannot tell
rounding from another function. In float32 it can, and a few layers show what all of them do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

MOST_LAYERS = 8
"""Enough for every pattern of layers in use: dense before experts, five windows to one full attention."""
Kind = tuple[tuple[str, tuple[tuple[str, object], ...]], ...]


@torch.no_grad()
def float32_excerpt(model: Any, *, tokens: int) -> Any:
    """Copy the first layers of a model in float32, with a vocabulary of `tokens` of its tokens.

    The tokens are spread over the whole vocabulary: the first ones are untrained in many models.
    The copy is the same class with the same config, and it shares no memory with the model.
    """
    memo: dict[int, Any] = {}
    layers = _decoder_layers(model)
    if layers is not None:
        memo[id(layers)] = nn.ModuleList(
            copy.deepcopy(layer, memo) for layer in layers[: _first_of_each_kind(layers)]
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary = min(embedding.weight.shape[0], head.weight.shape[0])
    chosen_N = torch.arange(1, tokens + 1, device=head.weight.device) * vocabulary // (tokens + 2)
    for rows in (embedding.weight, head.weight, getattr(head, "bias", None)):
        if isinstance(rows, Tensor):
            memo[id(rows)] = nn.Parameter(rows[chosen_N].float(), requires_grad=False)
    excerpt = copy.deepcopy(model, memo)
    if layers is not None:
        excerpt.config.get_text_config().num_hidden_layers = len(memo[id(layers)])
    excerpt.get_input_embeddings().padding_idx = None  # it may lie outside of the excerpt
    nn.Module.float(excerpt)  # transformers refuses this for quantized models, whose weights stay as they are
    return excerpt


def _decoder_layers(model: Any) -> nn.ModuleList | None:
    """Return the list of a model's decoder layers, whatever its family calls it."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList))
    return next((child for child in lists if len(child) == count), None)


def _first_of_each_kind(layers: nn.ModuleList) -> int:
    """How many of the first layers hold one layer of each kind."""
    kinds: dict[Kind, int] = {}
    for number, layer in enumerate(layers, start=1):
        kinds.setdefault(_kind(layer), number)
    return min(max(2, *kinds.values()), MOST_LAYERS)


def _kind(layer: nn.Module) -> Kind:
    """What tells layers apart: their modules and the plain attributes of these, without the layer index."""
    return tuple(
        (
            type(module).__name__,
            tuple(
                (name, value)
                for name, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str) and name != "layer_idx"
            ),
        )
        for module in layer.modules()
    )
