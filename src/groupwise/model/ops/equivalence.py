"""A model in training or evaluation mode for as long as a block lasts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from groupwise.model.adapters.quantization import is_quantized_model
from groupwise.model.attention.packed import PackedLayout

if TYPE_CHECKING:
    from groupwise.model.policy import Policy


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


SCALES = (1.0, 16.0)
"""Of inputs: what is clamped shows in large ones."""
LIMIT = 1e-3
"""Of the difference, relative to the result."""

Pass = Callable[[Any, Tensor], Tensor]


@torch.no_grad()
def computes_the_same(module: nn.Module, x: Tensor, own: Pass, short: Pass) -> bool:
    """Whether two passes of a module agree on an input in float32, scaled, in evaluation and in training."""
    exact = _in_float32(module)
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        for training in (False, True):
            with in_mode(exact, training=training):
                if not all(_agree(exact, scale * x, own, short) for scale in SCALES):
                    return False
    return True


def _agree(module: nn.Module, x: Tensor, own: Pass, short: Pass) -> bool:
    try:
        ours, theirs = short(module, x), own(module, x)
        # A result of zeros, as new layers may have, tells nothing.
        return bool(theirs.norm() > 0 and (ours - theirs).norm() <= LIMIT * theirs.norm())
    except (TypeError, RuntimeError, AttributeError, ValueError, LookupError):
        return False  # it asks for more than what it is given, or has parts of another kind


def _in_float32(module: nn.Module) -> nn.Module:
    """A copy, unless it is so already; quantized weights are unpacked to the precision of their input."""
    if is_quantized_model(module) or all(p.dtype == torch.float32 for p in module.parameters()):
        return module
    return copy.deepcopy(module).float()


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


TOKENS = 8


@torch.no_grad()
def compute_short_row(policy: Policy) -> None:
    """A forward pass in training mode, through every layer."""
    places_T = torch.arange(TOKENS, device=policy.device)
    layout = PackedLayout.build([(TOKENS, ())], device=policy.device)
    with in_mode(policy.model, training=True):
        policy.hidden(places_T % len(policy.head_weight), places_T, layout)


def draws_noise(policy: Policy) -> bool:
    """Compute a short row, and see whether a generator of random numbers has moved."""
    device = policy.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = _states(device)
        compute_short_row(policy)
        after = _states(device)
    return not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _states(device: torch.device) -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]
