"""Checks that a fused operation matches the original module, and tools for such checks.

`in_mode` switches training mode temporarily. `float32_excerpt` makes a small float32 copy of a model.
`draws_noise` detects dropout and the like.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from groupwise.model.adapters.quantization import is_quantized_model
from groupwise.model.attention.hf_interface import STANDARD, AttentionVariant
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.device import raise_device_error

if TYPE_CHECKING:
    from groupwise.model.policy import Policy


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set training or evaluation mode inside this context, and restore every module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


SCALES = (1.0, 16.0)
"""Scales of the test input: large inputs reveal clamping."""
LIMIT = 1e-3
"""Largest allowed difference, relative to the result."""

Pass = Callable[[Any, Tensor], Tensor]


@torch.no_grad()
def computes_the_same(module: nn.Module, x: Tensor, original: Pass, fused: Pass) -> bool:
    """Whether two forward passes of a module agree in float32, in evaluation and in training mode."""
    exact = _in_float32(module)
    with random_states_kept(x.device):
        for training in (False, True):
            with in_mode(exact, training=training):
                if not all(_agree(exact, scale * x, original, fused) for scale in SCALES):
                    return False
    return True


def _agree(module: nn.Module, x: Tensor, original: Pass, fused: Pass) -> bool:
    try:
        result, expected = fused(module, x), original(module, x)
        # A result of zeros, as of freshly initialized layers, proves nothing.
        return bool(expected.norm() > 0 and (result - expected).norm() <= LIMIT * expected.norm())
    except (TypeError, RuntimeError, AttributeError, ValueError, LookupError) as error:
        raise_device_error(error)
        return False  # the module needs other arguments or has other submodules


def _in_float32(module: nn.Module) -> nn.Module:
    """Return the module, or a float32 copy; quantized layers compute in the dtype of their input."""
    if is_quantized_model(module) or all(p.dtype == torch.float32 for p in module.parameters()):
        return module
    return copy.deepcopy(module).float()


MOST_LAYERS = 8
"""Enough for every layer pattern in use: dense before experts, five sliding windows per full attention."""
Kind = tuple[tuple[str, tuple[tuple[str, object], ...]], ...]


@torch.no_grad()
def float32_excerpt(model: Any, *, tokens: int) -> Any:
    """Return a float32 copy of a model's first layers, with a vocabulary of `tokens` of its tokens.

    The tokens are spread over the whole vocabulary, because the first ones are untrained in many models.
    The copy has the same class and config, and shares no memory with the model.
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
    excerpt.get_input_embeddings().padding_idx = None  # it may be outside of the excerpt's vocabulary
    nn.Module.float(excerpt)  # transformers' own `float` rejects quantized models
    return excerpt


def _decoder_layers(model: Any) -> nn.ModuleList | None:
    """Return a model's list of decoder layers, whatever its attribute is called."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList))
    return next((child for child in lists if len(child) == count), None)


def _first_of_each_kind(layers: nn.ModuleList) -> int:
    """Return how many of the first layers include one of each kind."""
    kinds: dict[Kind, int] = {}
    for number, layer in enumerate(layers, start=1):
        kinds.setdefault(_kind(layer), number)
    return min(max(2, *kinds.values()), MOST_LAYERS)


def _kind(layer: nn.Module) -> Kind:
    """Return a layer's kind: its modules and their plain attributes, without the layer index."""
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


@dataclass(frozen=True, slots=True)
class RecordedAttention:
    """What one call of attention was given."""

    layer: int
    heads: int
    key_heads: int
    size: int
    window: int | None
    plain: bool
    """Whether its scores have neither a soft cap nor sinks."""


@dataclass(frozen=True, slots=True)
class RecordingLayout:
    """A layout that records the calls of attention."""

    layout: PackedLayout
    calls: list[RecordedAttention] = field(default_factory=list)

    def attend(
        self,
        q_1HTD: Tensor,
        k_1KTD: Tensor,
        v_1KTD: Tensor,
        *,
        layer: int,
        scale: float,
        variant: AttentionVariant = STANDARD,
    ) -> Tensor:
        assert k_1KTD.shape == v_1KTD.shape, "keys and values have different shapes"
        assert q_1HTD.shape[1] % k_1KTD.shape[1] == 0, "key heads do not divide the query heads"
        self.calls.append(
            RecordedAttention(
                layer=layer,
                heads=q_1HTD.shape[1],
                key_heads=k_1KTD.shape[1],
                size=k_1KTD.shape[3],
                window=variant.window,
                plain=variant.cap is None and variant.sinks_H is None,
            )
        )
        return self.layout.attend(q_1HTD, k_1KTD, v_1KTD, layer=layer, scale=scale, variant=variant)


@torch.no_grad()
def recorded_attention(policy: Policy) -> list[RecordedAttention]:
    """Return the calls of attention in a short forward pass."""
    positions_T = torch.arange(TOKENS, device=policy.device)
    layout = RecordingLayout(PackedLayout.build([(TOKENS, ())], device=policy.device))
    with in_mode(policy.model, training=False):
        policy.hidden(positions_T % len(policy.head_weight), positions_T, layout)
    return layout.calls


@torch.no_grad()
def compute_short_row(policy: Policy) -> None:
    """Run a short forward pass through every layer in training mode."""
    positions_T = torch.arange(TOKENS, device=policy.device)
    layout = PackedLayout.build([(TOKENS, ())], device=policy.device)
    with in_mode(policy.model, training=True):
        policy.hidden(positions_T % len(policy.head_weight), positions_T, layout)


def draws_noise(policy: Policy) -> bool:
    """Whether a forward pass in training mode advances a random number generator."""
    device = policy.device
    with random_states_kept(device):
        before = random_states(device)
        compute_short_row(policy)
        after = random_states(device)
    return not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def random_states_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random states of the CPU and of a GPU (cuda or mps) after this context."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the random number generators that a pass on a device may use."""
    module: Any = torch.get_device_module(device)
    on_gpu = [] if device.type == "cpu" else [module.get_rng_state(device)]
    return [torch.get_rng_state(), *on_gpu]
