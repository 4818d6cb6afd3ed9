"""The policy: a Hugging Face causal language model with its tokenizer, for training and generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from groupwise.files import let_read, sign_weights
from groupwise.model.adapters.lora import base_of, effective_weight, is_adapted
from groupwise.model.adapters.quantization import is_quantized
from groupwise.model.attention.hf_interface import Layout
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.device import free_memory, kept_numbers
from groupwise.model.general_forward import GeneralPath, own_forward, text_decoder, unpacked_hidden
from groupwise.model.ops.equivalence import RecordedAttention, draws_noise, in_mode, recorded_attention
from groupwise.model.ops.logits import LogitsProcessor, capped, float_logits
from groupwise.model.ops.logprobs import token_logprobs
from groupwise.model.token_grammar import TokenGrammar
from groupwise.model.tokenizer import TokenizerCodec
from groupwise.records import Sampling

if TYPE_CHECKING:
    from groupwise.model.sharding import FSDPShards, ZeroEngine

T = TypeVar("T")


class Policy(TokenizerCodec):
    """A model and its tokenizer, with the interface that the engine and the learner need."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        reference: Any | None = None,
        general: GeneralPath | None = None,
    ) -> None:
        self.model = model
        """A `PreTrainedModel`, or a `PeftModel` around one."""
        self.general = general
        """Set if the model computes its own attention; None: packed attention, the fast path."""
        self._causal = model.get_base_model() if self.has_adapter else model
        self._config = self._causal.config.get_text_config()
        self._decoder = text_decoder(self._causal)
        self._head: nn.Linear = self._causal.get_output_embeddings()
        self.logit_scale, self.logit_cap = logit_scale(self._config), logit_cap(self._config)
        super().__init__(tokenizer, vocabulary=self._head.weight.shape[0])
        self._frozen = reference
        self.anchor: Mapping[str, Tensor] | None = None
        """The reference's values of the trained weights; None: the values before training."""
        self.end_tokens = _end_tokens(self._causal, tokenizer)
        self.shards: FSDPShards | None = None
        """Set when FSDP shards the decoder's layers."""
        self.zero: ZeroEngine | None = None
        """Set when DeepSpeed shards the policy or its optimizer state."""
        self.logits_processor: LogitsProcessor | None = None
        """A sampling rule of the user, for the sampler and the trained log-probabilities."""
        self.grammar: TokenGrammar | None = None
        """A grammar that completions must match, for the sampler and the trained log-probabilities."""
        self.text_part: str | None = None
        """A notice for the user if the model has other parts than text."""
        self.version = 0
        """Incremented by every update; external engines compare it to detect stale weights."""

    def use_logits_processor(self, name: str, function: Callable[..., Any]) -> None:
        """Apply a sampling rule of the user; `name` stands for it in messages."""
        self.logits_processor = LogitsProcessor(name, function)

    @property
    def has_sampling_rules(self) -> bool:
        """Whether tokens are sampled from another distribution than the model's own at some temperature."""
        return self.logits_processor is not None or self.grammar is not None

    @cached_property
    def unpacks(self) -> bool:
        """Whether generation dequantizes weights into a copy: only if it fits in half of the free memory."""
        return self.unpacked_bytes <= free_memory(self.device) // 2

    @cached_property
    def unpacked_bytes(self) -> int:
        """Size of the quantized linear weights when dequantized; 0 if nothing is quantized."""
        linears = (m for m in self.model.modules() if isinstance(m, nn.Linear) and is_quantized(m))
        return sum(m.in_features * m.out_features for m in linears) * self.head_weight.element_size()

    def notices(self) -> Iterator[str]:
        """Yield notices for the user about choices made for this policy."""
        if self.text_part is not None:
            yield self.text_part
        if self.general is not None:
            yield str(self.general)
        size = f"{self.unpacked_bytes / 1e9:.2f} GB"
        if self.unpacked_bytes and self.unpacks:
            yield f"the weights are quantized; generation uses a dequantized copy of {size}"
        elif self.unpacked_bytes:
            yield f"the weights are quantized; a dequantized copy of {size} for generation does not fit"
        if self.tokenizer.chat_template is None:
            yield (
                "the model has no chat template: prompts are plain text, and the messages of a chat are "
                "joined by line breaks without roles; an instruction-tuned model usually learns faster"
            )

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.model, "get_base_model")

    @property
    def plain_adapter(self) -> bool:
        """Whether adapters are plain LoRA: without DoRA and without fully trained modules."""
        settings = getattr(self.model, "peft_config", {}).values()
        return all(not (config.modules_to_save or config.use_dora) for config in settings)

    @property
    def decoder(self) -> nn.Module:
        """The model without its output layer."""
        decoder: nn.Module = self._decoder
        return decoder

    @property
    def heads(self) -> int:
        return self.attention[0].heads

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
        return int(self._config.num_hidden_layers)

    @cached_property
    def attention(self) -> list[RecordedAttention]:
        """What each layer's attention is called with, on the fast path."""
        return recorded_attention(self)

    @property
    def key_heads(self) -> int:
        """Key heads in the cache: the most that a layer has."""
        return max(layer.key_heads for layer in self.attention)

    @property
    def head_size(self) -> int:
        """Head size in the cache: the largest that a layer has."""
        return max(layer.size for layer in self.attention)

    @property
    def context_length(self) -> int:
        """Longest supported sequence: up to the position limit, and within chunks that are not masked."""
        config = self._config
        limits = ["max_position_embeddings"]
        if self.general is None:  # packed attention does not know of chunks
            limits.append("attention_chunk_size")
            slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
            window = getattr(config, "sliding_window", None)
            if window and slides and all(call.window is None for call in self.attention):
                limits.append("sliding_window")  # a window that the attention call does not receive
        # Beyond its original length, longrope changes the angles of all sequences in a packed row.
        if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
            limits.append("original_max_position_embeddings")
        return min(int(getattr(config, name, None) or 1 << 30) for name in limits)

    @property
    def activation_bytes(self) -> int:
        """Upper estimate of the activation memory per token."""
        width = int(self._config.hidden_size)
        inner = inner_size(self._config)
        recomputed = self.model.is_gradient_checkpointing
        return (
            kept_numbers(width, inner, self.layers, recomputed=recomputed) * self.head_weight.element_size()
        )

    @cached_property
    def noisy(self) -> bool:
        """Whether training mode draws random numbers, such as for dropout."""
        return draws_noise(self)

    @contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Switch dropout off inside this context, and restore every module's mode afterwards."""
        with in_mode(self.model, training=False):
            yield

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states_TM of one packed row, scaled like the model's logits."""
        if self.general is not None:
            assert isinstance(layout, PackedLayout), "the general path caches nothing in layouts"
            return self._scaled(unpacked_hidden(self._decoder, tokens_T, layout))
        output = self._decoder(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, layout=layout
        )
        return self._scaled(output.last_hidden_state[0])

    def own_hidden(self, tokens_BL: Tensor, *, cache: Any) -> tuple[Tensor, Any]:
        """Return the last hidden states_BLM by the model's own attention, and its cache: `own_forward`."""
        hidden_BLM, cache = own_forward(self._decoder, tokens_BL, cache=cache)
        return self._scaled(hidden_BLM), cache

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.logit_scale == 1.0 else hidden * self.logit_scale

    def logits(self, hidden_NM: Tensor) -> Tensor:
        return capped(float_logits(hidden_NM, self.head_weight, self.head_bias), self.logit_cap)

    def token_logprobs(
        self,
        hidden_NM: Tensor,
        tokens_N: Tensor,
        sampling: Sampling,
        *,
        entropy_gradient: bool,
        masks_NW: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs_N, entropy_N) of tokens, each from the hidden state before it."""
        return token_logprobs(
            hidden_NM,
            self.head_weight,
            self.head_bias,
            tokens_N,
            sampling,
            entropy_gradient=entropy_gradient,
            cap=self.logit_cap,
            masks_NW=masks_NW,
        )

    @contextmanager
    def reference(self) -> Iterator[Policy]:
        """Yield the reference policy of the KL penalty: the anchor, or the policy before training."""
        if self.anchor is not None:
            with self.holding(self.anchor):
                yield self
        elif self.has_adapter:
            with self.without_adapter():
                yield self
        else:
            assert self._frozen is not None, "full fine-tuning with a KL penalty needs a frozen copy"
            frozen = Policy(self._frozen, self.tokenizer, general=self.general)
            frozen.logits_processor, frozen.grammar = self.logits_processor, self.grammar
            yield frozen

    @contextmanager
    def without_adapter(self) -> Iterator[Policy]:
        """Disable the adapter inside this context."""
        with self.model.disable_adapter():
            yield self

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the trained weights by others inside this context."""
        parameters = self.trainable()
        before = {name: parameter.data for name, parameter in parameters.items()}
        try:
            place(parameters, weights)
            yield
        finally:
            place(parameters, before)

    @contextmanager
    def merged_adapters(self) -> Iterator[None]:
        """Merge the adapters into their base weights inside this context, which makes generation faster.

        The originals are kept and restored exactly. Nothing is merged in half precision, where rounding
        would lose part of a small adapter.
        """
        layers = [module for module in self.model.modules() if is_adapted(module)]
        simple = all(type(base_of(layer)) is nn.Linear for layer in layers) and not self._saves_modules
        if not layers or not simple or self.head_weight.dtype != torch.float32:
            yield
            return
        weights: list[tuple[nn.Parameter, Tensor]] = []
        try:
            pairs = [(base_of(layer).weight, effective_weight(layer)) for layer in layers]
            with torch.no_grad(), self.model.disable_adapter():
                for weight, merged in pairs:
                    weights.append((weight, weight.data))
                    weight.data = merged
                yield
        finally:
            for weight, original in weights:
                weight.data = original

    @property
    def _saves_modules(self) -> bool:
        """Whether some modules are fully trained beside adapters; disabling adapters disables them, too."""
        settings = getattr(self.model, "peft_config", {}).values()
        return any(config.modules_to_save for config in settings)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name, in a stable order; tied weights once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def trained_numbers(self) -> int:
        """Number of trained elements over all processes."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.trainable().values())

    def owned(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this process's optimizer by name: trained parameters or their shards."""
        parts = {} if self.shards is None else self.shards.parts
        return {name: parts.get(name, parameter) for name, parameter in self.trainable().items()}

    @property
    def is_sharded(self) -> bool:
        """Whether the policy is sharded, so that all processes must run every pass together."""
        return self.shards is not None or self.zero is not None

    def computing(self, compute: Callable[[], T]) -> T:
        """Run a forward pass of an update, which may use any module and weight of the policy."""
        return compute() if self.zero is None else self.zero.computing(compute)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss."""
        if self.zero is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.zero.backward(loss)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather a sharded policy inside this context, so that each process can use it alone."""
        sharded = self.shards or self.zero
        with nullcontext() if sharded is None else sharded.whole():
            yield

    def gathered(self) -> dict[str, Tensor] | None:
        """Return the full state of a sharded policy for saving; None if not sharded. A collective call."""
        sharded = self.shards or self.zero
        return None if sharded is None else sharded.gathered_state(self.model)

    def save(
        self, folder: Path, *, gathered: dict[str, Tensor] | None = None, tokenizer: bool = True
    ) -> None:
        """Save the adapter or the full model in Hugging Face format, with its tokenizer."""
        # Otherwise PEFT looks the base model up online to check for changed embeddings; they never change.
        options: dict[str, Any] = {"save_embedding_layers": False} if self.has_adapter else {}
        self.model.save_pretrained(folder, state_dict=gathered, **options)
        if self.has_adapter:
            sign_weights(folder)
            (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty card names a local path
        let_read(folder)
        if tokenizer:
            self.tokenizer.save_pretrained(folder)


def place(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    """Point parameters to these tensors, without copying."""
    for name, parameter in parameters.items():
        parameter.data = weights[name]


def logit_scale(config: Any) -> float:
    """Return the factor between a model's output layer and its logits."""
    for name in ("logit_scale", "lm_head_multiplier"):
        if isinstance(value := getattr(config, name, None), float | int):
            return float(value)
    for name in ("logits_scaling", "logits_mup_width_multiplier"):
        if value := getattr(config, name, None):
            return 1.0 / float(value)
    if base := getattr(config, "dim_model_base", None):
        return float(base) / float(config.hidden_size)
    return 1.0


def logit_cap(config: Any) -> float | None:
    """Return a model's soft cap on its logits."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((float(cap) for name in names if (cap := getattr(config, name, None))), None)


def inner_size(config: Any) -> int:
    """Return the width of a layer's MLP, the largest if layers differ."""
    inner = getattr(config, "intermediate_size", None) or 4 * int(config.hidden_size)
    return int(max(inner) if isinstance(inner, list | tuple) else inner)


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens of the tokenizer and of the model's generation config."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}
    return frozenset(int(token) for token in ends)
