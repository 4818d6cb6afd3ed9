"""The runner for CPUs: prefill and decode, with a fused forward pass for common decoder layers.

A decode step has hundreds of small operations, and each costs a call and a thread barrier. Layers with
RMSNorm, rotary attention and SwiGLU (Llama, Qwen2, Mistral, SmolLM …) run as four matrix products with
little between them. `fused_cpu_forward` compares the result with the original module; a model that differs
generates with the original module.

Stacking projections, merging an adapter and dequantizing each need a copy. The copies keep their addresses
(CUDA graphs depend on them) and are refreshed before each call. The values of the policy's weights never
change.

Axes: T tokens, M hidden size, H query heads, K key heads, D head size, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from groupwise.engine.paged_attention import KVCache, PagedLayout
from groupwise.engine.prefill import Prefill
from groupwise.engine.scheduler import Prefix, Scheduler
from groupwise.model.adapters.lora import base_of, effective_weight, is_adapted
from groupwise.model.adapters.quantization import is_quantized
from groupwise.model.attention.hf_interface import AttentionVariant, Layout
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.device import products_keep_bits, raise_device_error, repeatable_linear
from groupwise.model.ops.rotary import rotate, sine_halves
from groupwise.model.policy import Policy

if TYPE_CHECKING:
    from groupwise.engine.multi_lora import LoRABank

CHECKED_TOKENS = 24


class Product(Protocol):
    """Linear layers that share an input, as one matmul; `own` selects the adapter of each row.

    The input is a tensor, or `FP8Rows` for a product in FP8.
    """

    def __call__(self, x_TI: Any, own: Tensor | None = None, /) -> Tensor: ...

    def refresh(self) -> None: ...


class MakeWeight(Protocol):
    """Builds a `Product` from linear layers that share an input."""

    def __call__(self, *parts: Any) -> Product: ...


class StackedWeight:
    """One or more linear layers that share an input, as one matmul with adapters merged."""

    def __init__(self, *parts: Any, like: Tensor) -> None:
        self._parts = parts
        base = [base_of(part) for part in parts]
        quantized = [is_quantized(part) for part in base]
        assert all(type(part) is nn.Linear for part in base) or all(quantized), (
            "only plain linear layers can be stacked"
        )
        self._copied = len(parts) > 1 or any(is_adapted(part) for part in parts) or any(quantized)
        self.weight: Tensor = base[0].weight
        self.bias: Tensor | None = base[0].bias
        if self._copied:
            rows = sum(part.out_features for part in base)
            self.weight = torch.empty(rows, base[0].in_features, dtype=like.dtype, device=like.device)
            if self.bias is not None:
                self.bias = torch.empty(rows, dtype=like.dtype, device=like.device)
        self.refresh()

    def refresh(self) -> None:
        """Copy the policy's current weights."""
        if not self._copied:
            return
        start = 0
        for part in self._parts:
            base = base_of(part)
            rows = slice(start, start + base.out_features)
            self.weight[rows].copy_(effective_weight(part))
            if self.bias is not None:
                self.bias[rows].copy_(base.bias)
            start = rows.stop

    def __call__(self, x_TN: Tensor, _own: Tensor | None = None) -> Tensor:
        return repeatable_linear(x_TN, self.weight, self.bias)


def rows_of(parts: list[Any]) -> list[slice]:
    """Return the row range of each layer in the stacked weight."""
    rows, start = [], 0
    for part in parts:
        rows.append(slice(start, start + part.out_features))
        start += part.out_features
    return rows


def rank_of(layer: Any) -> int:
    (name,) = layer.active_adapters
    return int(layer.r[name])


def one_rank(policy: Policy) -> int:
    """Return the LoRA rank, which must be the same in every layer."""
    ranks = {rank_of(layer) for layer in policy.model.modules() if is_adapted(layer)}
    assert len(ranks) == 1, "all layers must have the same LoRA rank"
    return ranks.pop()


OwnColumns = Callable[[Any], Tensor | None]
"""Maps a layout to the adapter selection of its rows; None: no adapters."""


def weights_for(policy: Policy, members: LoRABank | None) -> tuple[MakeWeight, OwnColumns]:
    """Return the weight factory of a policy (adapter merged, or all members batched) and the row selector."""
    if members is not None:
        return members.cpu_weights()
    return partial(StackedWeight, like=policy.head_weight), lambda layout: None


class CPULayer:
    """The weights of one decoder layer, in the order in which they are used."""

    def __init__(self, layer: Any, matrix: MakeWeight) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        assert not hasattr(attention, "q_norm"), "normalized queries are not fused on a CPU"
        assert isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation"
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = matrix(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = matrix(attention.o_proj)
        self.gate_up = matrix(mlp.gate_proj, mlp.up_proj)
        self.down = matrix(mlp.down_proj)
        self.scale = float(attention.scaling)


class FusedCPUForward:
    """`Policy.hidden` without gradients, in fewer and larger operations."""

    def __init__(self, policy: Policy, members: LoRABank | None = None) -> None:
        assert policy.unpacks, "dequantized weights do not fit in memory"
        matrix, self._own = weights_for(policy, members)
        decoder: Any = policy.decoder
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._rotary = decoder.rotary_emb
        self._layers = [CPULayer(layer, matrix) for layer in decoder.layers]
        self._norm = decoder.norm
        self._key_heads, self._size = policy.key_heads, policy.head_size
        assert all(layer.plain for layer in policy.attention), "soft caps and sinks are not fused on a CPU"
        self._variants = [AttentionVariant(window=layer.window) for layer in policy.attention]

    def refresh(self) -> None:
        """Copy the policy's current weights."""
        for layer in self._layers:
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
                matrix.refresh()

    @property
    def matrices(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The weights and biases that `hidden` multiplies by, without those of members."""
        for layer in self._layers:
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
                if isinstance(matrix, StackedWeight):
                    yield matrix.weight, matrix.bias

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states_TM of one packed row."""
        own_TS = self._own(layout)
        x_TM = nn.functional.embedding(tokens_T, self._embedding)
        cos_1TD, sin_1TD = self._rotary(x_TM[None], positions_T[None])
        cos_T1D, halves = cos_1TD[0, :, None], sine_halves(sin_1TD[0, :, None])
        for number, layer in enumerate(self._layers):
            qkv_TN = layer.qkv(_normed(x_TM, layer.before_attention), own_TS)
            qkv_TND = qkv_TN.view(len(x_TM), -1, self._size)
            q_1HTD, k_1KTD, v_1KTD = self._heads(qkv_TND, cos_T1D, halves)
            mixed_1THD = layout.attend(
                q_1HTD, k_1KTD, v_1KTD, layer=number, scale=layer.scale, variant=self._variants[number]
            )
            x_TM += layer.output(mixed_1THD[0].flatten(1), own_TS)
            gate_TI, up_TI = layer.gate_up(_normed(x_TM, layer.before_mlp), own_TS).chunk(2, dim=1)
            x_TM += layer.down(nn.functional.silu(gate_TI, inplace=True).mul_(up_TI), own_TS)
        return _normed(x_TM, self._norm)

    def _heads(
        self, qkv_TND: Tensor, cos_T1D: Tensor, halves: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys in one operation, and split queries, keys and values."""
        qk_TND, values_TKD = qkv_TND[:, : -self._key_heads], qkv_TND[:, -self._key_heads :]
        rotated_TND = rotate(qk_TND, cos_T1D, *halves)
        queries_THD, keys_TKD = rotated_TND[:, : -self._key_heads], rotated_TND[:, -self._key_heads :]
        return tuple(x.transpose(0, 1)[None] for x in (queries_THD, keys_TKD, values_TKD))  # type: ignore[return-value]


def _normed(x_TM: Tensor, norm: Any) -> Tensor:
    square_T1: Tensor = torch.linalg.vector_norm(x_TM, dim=-1, keepdim=True).square_()
    scale_T1 = square_T1.div_(x_TM.shape[1]).add_(norm.variance_epsilon).rsqrt_()
    return (x_TM * scale_T1).mul_(norm.weight)


@torch.no_grad()
def fused_cpu_forward(policy: Policy, members: LoRABank | None = None) -> FusedCPUForward | None:
    """Return the fused forward pass of this policy, or None if it does not match the original module.

    With `members`, the comparison runs without adapters.
    """
    weight = policy.head_weight
    if policy.general is not None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    try:
        fused = FusedCPUForward(policy, members)
        layout = PackedLayout.build([(10, (CHECKED_TOKENS - 10,))], device=weight.device)
        tokens_T = torch.arange(3, 3 + CHECKED_TOKENS) % weight.shape[0]
        positions_T = torch.arange(CHECKED_TOKENS)
        with policy.without_adapter() if members else nullcontext(policy) as compared:
            reference_TM = compared.hidden(tokens_T, positions_T, layout)
        difference = fused.hidden(tokens_T, positions_T, layout) - reference_TM
        return fused if difference.norm() <= 1e-4 * reference_TM.norm() else None
    except (AttributeError, AssertionError, TypeError, ValueError, RuntimeError) as error:
        raise_device_error(error)
        return None


SUMMED_BY_SEVERAL = 32_768
"""Elements from which torch divides the sum of one row among its threads, and so rounds differently."""
MOST_COMPARED = 50_000_000
"""Parameters of the largest model whose products are compared; that takes a second or two."""


def keeps_bits(policy: Policy, *, threads: int) -> bool:
    """Whether this policy generates and trains with the same bits on one thread as on two.

    True only where this was established: the fused forward pass and the update compute all products of few
    rows by `repeatable_linear`, all weights are trained, and no sum over a vocabulary is divided. More than
    two threads divide the work in further ways.
    """
    vocabulary = policy.head_weight.shape[0]
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    if torch.get_num_threads() != 2 or threads != 1 or policy.has_adapter:
        return False
    if vocabulary >= SUMMED_BY_SEVERAL or size > MOST_COMPARED:
        return False
    with policy.in_eval_mode():
        fused = fused_cpu_forward(policy)
    if fused is None:
        return False
    single = [(layer.weight, layer.bias) for layer in policy.model.modules() if isinstance(layer, nn.Linear)]
    shapes = {(weight.shape, bias is None): (weight, bias) for weight, bias in [*fused.matrices, *single]}
    with torch.no_grad():
        return products_keep_bits([*shapes.values(), (policy.head_weight, None)], threads=threads)


class Runner:
    """Runs the policy module itself, or its fused form, on the weights that are trained."""

    def __init__(
        self, policy: Policy, *, blocks: int, block_size: int, members: LoRABank | None = None
    ) -> None:
        self.policy = policy
        self.blocks = blocks
        self.fused = fused_cpu_forward(policy, members)
        self.members = 0 if members is None else len(members)
        """Number of LoRA adapters that rows select from; 0: the policy's own adapter."""
        self._hidden = policy.hidden if self.fused is None else self.fused.hidden
        self.cache = KVCache(
            layers=policy.layers,
            blocks=blocks,
            block_size=block_size,
            heads=policy.key_heads,
            size=policy.head_size,
            like=policy.head_weight,
        )
        self._prompts = Prefill(policy, self.cache, shared=bool(self.members))

    def ready(self) -> AbstractContextManager[None]:
        """Load the policy's current weights, with adapters merged, inside the returned context."""
        if self.fused is None:
            return self.policy.merged_adapters()
        self.fused.refresh()
        return nullcontext()

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Compute prompts into their blocks and store the next-token logits on each."""
        self._prompts.compute(prefixes, self._hidden)

    def decode(self, scheduler: Scheduler) -> Tensor:
        """Run one decode step over all running sequences and return the next-token logits_RV."""
        slots = scheduler.slots()
        prompt = scheduler.prompt_length[scheduler.request[slots]]
        last = scheduler.length[slots] - 1
        layout = PagedLayout.build(self.cache, scheduler, like=self.policy.head_weight)
        hidden_RM = self._hidden(self._move(scheduler.tokens[slots, last]), self._move(prompt + last), layout)
        return self.policy.logits(hidden_RM)

    def _move(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.policy.device)
