"""The shape of a model, read from its config. No weight is loaded or allocated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import ConfigError
from groupwise.files import hub_reason
from groupwise.model.load import freeze_other_modalities
from groupwise.model.policy import inner_size
from groupwise.model.resolve import (
    auto_class,
    check_config,
    first_line,
    known_path,
    local_folder,
    model_folder,
    quantization_kind,
    text_part_notice,
    unloadable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """One linear layer inside the decoder."""

    name: str
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions that memory and time depend on."""

    parameters: int
    linears: tuple[LinearShape, ...]
    """Of the text part, without the output layer."""
    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    inner_kept: int = 2
    """Vectors of the MLP width that a layer keeps for the backward pass."""
    tiled: bool = False
    """Whether a recomputed layer processes its MLP in tiles of tokens."""
    quantization: str | None = None
    """Quantization of the linear layers, on disk or applied when loaded."""
    modules: Mapping[str, int] = field(default_factory=dict)
    """Number of parameters of every module by name, parents before children."""
    capped: bool = False
    """Whether attention has a soft cap on its scores."""
    path: str | None = None
    """Path that the model takes, `fast` or `general`; None: not known before it is loaded."""
    frozen: int = 0
    """Number of parameters of other parts than text, which are loaded and not trained."""
    notice: str | None = None
    """What becomes of these parts."""
    head: str = "lm_head"
    """The name of the output layer."""

    @property
    def linear_size(self) -> int:
        return sum(linear.size for linear in self.linears)

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.width

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_size

    def adapted(self, lora: LoraConfig) -> list[LinearShape]:
        """Return the layers that get adapters; fully trained modules get none."""
        saved = self.saved(lora)
        linears = [linear for linear in self.linears if not inside(linear.name, saved)]
        if lora.targets == ("all-linear",):
            return linears
        ends = tuple(target.rpartition(".")[2] for target in lora.targets)
        return [linear for linear in linears if linear.name.rpartition(".")[2] in ends]

    def saved(self, lora: LoraConfig) -> list[str]:
        """Return the modules that PEFT trains as copies: names that end in one of `lora.modules_to_save`."""
        saved: list[str] = []
        for name in self.modules:
            if name.endswith(lora.modules_to_save) and not inside(name, saved):
                saved.append(name)
        return saved

    def saved_size(self, lora: LoraConfig) -> int:
        """Number of parameters of those copies."""
        return sum(self.modules[name] for name in self.saved(lora))

    def adapter_size(self, lora: LoraConfig) -> int:
        """Number of parameters of the adapters."""
        rank = lora.r or 0
        magnitudes = sum(linear.outputs for linear in self.adapted(lora)) if lora.dora else 0
        return sum(rank * (linear.inputs + linear.outputs) for linear in self.adapted(lora)) + magnitudes

    def trained_size(self, lora: LoraConfig) -> int:
        """Number of trained parameters."""
        return self.adapter_size(lora) + self.saved_size(lora) if lora.r else self.parameters - self.frozen

    def trains_head(self, lora: LoraConfig) -> bool:
        return not lora.r or inside(self.head, self.saved(lora))


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether the module of this name is one of those, or a part of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def shape_of(model: ModelConfig) -> ModelShape:
    """Read a model's config and build it on the meta device."""
    folder = local_folder(model.name)
    name = str(folder or (model_folder(model.name) if "/" not in model.name else model.name))
    whole = check_config(name, name=model.name)
    try:
        stored = quantization_kind(getattr(whole, "quantization_config", None), model=model.name)
        whole.quantization_config = None
        config = whole.get_text_config()
        with torch.device("meta"):
            laid_out: Any = auto_class(whole).from_config(whole, trust_remote_code=False)
    except unloadable() as error:
        reason = first_line(error) if folder is not None else hub_reason(error)
        raise ConfigError(f"cannot read the config of {model.name}: {reason}; check the name") from error
    freeze_other_modalities(laid_out)
    frozen = sum(parameter.numel() for parameter in laid_out.parameters() if not parameter.requires_grad)
    head = laid_out.get_output_embeddings()
    linears = tuple(
        LinearShape(name=name, inputs=module.in_features, outputs=module.out_features)
        for name, module in laid_out.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and module.weight.requires_grad
    )
    # A model without attention has a state instead of keys and values; it is taken for one head.
    width, heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", None) or 1)
    names = {name.rpartition(".")[2] for name, _ in laid_out.named_modules()}
    return ModelShape(
        parameters=parameters_of(laid_out),
        linears=linears,
        layers=int(config.num_hidden_layers),
        width=width,
        inner=inner_size(config),
        heads=heads,
        key_heads=int(layer_setting(config, "num_key_value_heads") or heads),
        head_size=int(layer_setting(config, "head_dim") or width // heads),
        vocabulary=int(config.vocab_size),
        inner_kept=inner_kept(config, names),
        tiled=has_our_gates(config, names) and not any(map(reads_block, names)),
        quantization=stored or model.quantization,
        modules={name: parameters_of(module) for name, module in laid_out.named_modules() if name},
        capped=bool(getattr(config, "attn_logit_softcapping", None)),
        path=known_path(whole),
        frozen=frozen,
        notice=text_part_notice(whole),
        head=next((name for name, module in laid_out.named_modules() if module is head), ""),
    )


def layer_setting(config: Any, name: str) -> int | None:
    """Return a setting of attention, the largest where layers differ."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers does not name one value for layers that differ
        value = max(getattr(layer, name) for layer in config.per_layer_config)
    return int(value) if value else None


def has_our_gates(config: Any, names: Collection[str]) -> bool:
    """Whether the layers use our SwiGLU, which keeps fewer activations."""
    return "gate_proj" in names and getattr(config, "hidden_act", None) in ("silu", "swish")


def reads_block(name: str) -> bool:
    """Whether a module of this name may read what a gated block gives, which then is computed as a whole."""
    return name == "shared_expert" or (name.startswith("post_") and name != "post_attention_layernorm")


def inner_kept(config: Any, names: Collection[str]) -> int:
    """A function's input and result; of our gated SiLU its two factors, of other gates all four."""
    other_gates = not has_our_gates(config, names) and not {"gate_proj", "gate_up_proj"}.isdisjoint(names)
    return 4 if other_gates else 2


def parameters_of(module: torch.nn.Module) -> int:
    """Return the number of parameters of a module; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())
