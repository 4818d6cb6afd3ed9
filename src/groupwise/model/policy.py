"""The policy: a Hugging Face causal language model, used as it is for training and for generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from groupwise.files import let_read
from groupwise.model.adapters.lora import base_of, effective_weight, is_adapted
from groupwise.model.adapters.quantization import is_quantized
from groupwise.model.attention.hf_interface import Layout
from groupwise.model.device import free_memory, kept_numbers
from groupwise.model.ops.equivalence import draws_noise
from groupwise.model.ops.logits import float_logits
from groupwise.model.tokenizer import TokenizerCodec

if TYPE_CHECKING:
    from groupwise.model.distributed.deepspeed_zero import ZeroEngine
    from groupwise.model.distributed.fsdp import FSDPShards

T = TypeVar("T")


class Policy(TokenizerCodec):
    """A model and its tokenizer, with the few things that the engine and the learner ask of them."""

    def __init__(self, model: Any, tokenizer: Any, *, reference: Any | None = None) -> None:
        self.model = model
        """A `PreTrainedModel`, or a `PeftModel` around one."""
        self._causal = model.get_base_model() if self.has_adapter else model
        self._decoder = self._causal.get_decoder()
        self._head: nn.Linear = self._causal.get_output_embeddings()
        super().__init__(tokenizer, vocabulary=self._head.weight.shape[0])
        self._frozen = reference
        self.anchor: Mapping[str, Tensor] | None = None
        """What the reference has in the place of the trained weights; None: those before training."""
        self.end_tokens = _end_tokens(self._causal, tokenizer)
        self.shards: FSDPShards | None = None
        """Set when the decoder's layers are divided among processes."""
        self.zero: ZeroEngine | None = None
        """Set when DeepSpeed divides the policy, or what its optimizer keeps, among processes."""
        self.version = 0
        """Grows with every update: a generator elsewhere sees by it that it needs new weights."""

    @cached_property
    def unpacks(self) -> bool:
        """Whether generation may unpack quantized weights into a copy: it fits into half of what is free."""
        return self.unpacked_bytes <= free_memory(self.device) // 2

    @cached_property
    def unpacked_bytes(self) -> int:
        """Size of the linear layers' weights without quantization; 0 where nothing is quantized."""
        linears = (m for m in self.model.modules() if isinstance(m, nn.Linear) and is_quantized(m))
        return sum(m.in_features * m.out_features for m in linears) * self.head_weight.element_size()

    def notices(self) -> Iterator[str]:
        """Yield what was chosen for this policy that a reader should know."""
        size = f"{self.unpacked_bytes / 1e9:.2f} GB"
        if self.unpacked_bytes and self.unpacks:
            yield f"the weights are quantized; generation unpacks them into a copy of {size}"
        elif self.unpacked_bytes:
            yield f"the weights are quantized; generation uses them so, as a copy of {size} does not fit"

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.model, "get_base_model")

    @property
    def plain_adapter(self) -> bool:
        """Whether adapters add a low-rank product to linear layers and change nothing else."""
        settings = getattr(self.model, "peft_config", {}).values()
        return all(not (config.modules_to_save or config.use_dora) for config in settings)

    @property
    def decoder(self) -> nn.Module:
        """The model without its output layer."""
        decoder: nn.Module = self._decoder
        return decoder

    @property
    def heads(self) -> int:
        return int(self._causal.config.num_attention_heads)

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def head(self) -> nn.Linear:
        """The output layer."""
        return self._head

    @property
    def head_weight(self) -> Tensor:
        return self._head.weight

    @property
    def head_bias(self) -> Tensor | None:
        return self._head.bias

    @property
    def layers(self) -> int:
        return int(self._causal.config.num_hidden_layers)

    @property
    def key_heads(self) -> int:
        config = self._causal.config
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    @property
    def head_size(self) -> int:
        config = self._causal.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @property
    def context_length(self) -> int:
        """Longest sequence: as far as positions go, and no further than a window that we do not compute."""
        config = self._causal.config
        limits = ["max_position_embeddings", "sliding_window", "attention_chunk_size"]
        # Beyond its first length, longrope turns all texts of a row otherwise.
        if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
            limits.append("original_max_position_embeddings")
        return min(int(getattr(config, name, None) or 1 << 30) for name in limits)

    @property
    def activation_bytes(self) -> int:
        """About what one token leaves behind in a forward pass for the backward pass, at most."""
        config = self._causal.config
        width = int(config.hidden_size)
        inner = int(getattr(config, "intermediate_size", None) or 4 * width)
        recomputed = self.model.is_gradient_checkpointing
        return (
            kept_numbers(width, inner, self.layers, recomputed=recomputed) * self.head_weight.element_size()
        )

    @cached_property
    def noisy(self) -> bool:
        """Whether training mode adds noise of its own."""
        return draws_noise(self)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states_TM of one packed row."""
        output = self._decoder(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, layout=layout
        )
        hidden_TM: Tensor = output.last_hidden_state[0]
        return hidden_TM

    def logits(self, hidden_NM: Tensor) -> Tensor:
        return float_logits(hidden_NM, self.head_weight, self.head_bias)

    @contextmanager
    def reference(self) -> Iterator[Policy]:
        """What a KL penalty holds to: the anchor, or the policy before training (adapters off, or a copy)."""
        if self.anchor is not None:
            with self.holding(self.anchor):
                yield self
        elif self.has_adapter:
            with self.without_adapter():
                yield self
        else:
            assert self._frozen is not None, "full fine-tuning with a KL penalty loads a frozen copy"
            yield Policy(self._frozen, self.tokenizer)

    @contextmanager
    def without_adapter(self) -> Iterator[Policy]:
        """The base alone, for as long as the block lasts."""
        with self.model.disable_adapter():
            yield self

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Other weights in the place of the trained ones, for as long as the block lasts."""
        parameters = self.trainable()
        before = {name: parameter.data for name, parameter in parameters.items()}
        try:
            place(parameters, weights)
            yield
        finally:
            place(parameters, before)

    @contextmanager
    def merged_adapters(self) -> Iterator[None]:
        """Add the adapters into the weights they adapt: no extra products for each generated token.

        The weights come back bit for bit, since the originals are set aside rather than subtracted from.
        Left alone in bfloat16, whose rounding would swallow part of a small adapter.
        """
        layers = [module for module in self.model.modules() if is_adapted(module)]
        simple = all(type(base_of(layer)) is nn.Linear for layer in layers) and not self._saves_modules
        if not layers or not simple or self.head_weight.dtype != torch.float32:
            yield
            return
        weights: list[tuple[nn.Parameter, Tensor]] = []
        try:
            merged_adapters = [(base_of(layer).weight, effective_weight(layer)) for layer in layers]
            with torch.no_grad(), self.model.disable_adapter():
                for weight, whole in merged_adapters:
                    weights.append((weight, weight.data))
                    weight.data = whole
                yield
        finally:
            for weight, original in weights:
                weight.data = original

    @property
    def _saves_modules(self) -> bool:
        """Whether modules are trained whole beside adapters: switching adapters off would switch them too."""
        settings = getattr(self.model, "peft_config", {}).values()
        return any(config.modules_to_save for config in settings)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, in a stable order; tied weights once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def trained_numbers(self) -> int:
        """How many numbers are trained, in all processes together."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.trainable().values())

    def owned(self) -> dict[str, nn.Parameter]:
        """What this process's optimizer steps on, by name: trained parameters, or its parts of them."""
        parts = {} if self.shards is None else self.shards.parts
        return {name: parts.get(name, parameter) for name, parameter in self.trainable().items()}

    @property
    def is_sharded(self) -> bool:
        """Whether the passes of an update are made by all processes together."""
        return self.shards is not None or self.zero is not None

    def computing(self, compute: Callable[[], T]) -> T:
        """Do a forward pass of an update; it may use any module and weight of the policy."""
        return compute() if self.zero is None else self.zero.computing(compute)

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradient to what this process has of the update's."""
        if self.zero is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.zero.backward(loss)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While the block lasts, this process can use the modules alone; a divided policy is gathered."""
        divided = self.shards or self.zero
        with nullcontext() if divided is None else divided.whole():
            yield

    def gathered(self) -> dict[str, Tensor] | None:
        """A divided policy whole, for files; all processes come by here. None: it is not divided."""
        divided = self.shards or self.zero
        return None if divided is None else divided.gathered_state(self.model)

    def save(
        self, folder: Path, *, gathered: dict[str, Tensor] | None = None, tokenizer: bool = True
    ) -> None:
        """Write the adapter or the whole model in Hugging Face layout, with its tokenizer."""
        # PEFT would look the base model up online to see whether embeddings changed; they never do.
        options: dict[str, Any] = {"save_embedding_layers": False} if self.has_adapter else {}
        self.model.save_pretrained(folder, state_dict=gathered, **options)
        let_read(folder)
        if tokenizer:
            self.tokenizer.save_pretrained(folder)


def place(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    """Let parameters hold these tensors: pointers move, numbers do not."""
    for name, parameter in parameters.items():
        parameter.data = weights[name]


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: the tokenizer's, and those that the model's files name."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}
    return frozenset(int(token) for token in ends)
