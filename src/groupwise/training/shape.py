"""The shape of a model, known from its config alone: no weight is loaded, none is even made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from groupwise.config.model import LoraConfig, ModelConfig
from groupwise.errors import ConfigError
from groupwise.model.quantize import quantization_told
from groupwise.model.source import first_line, local_folder, model_folder, unloadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear layer inside the decoder."""

    name: str
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What memory and time depend on."""

    parameters: int
    linears: tuple[Linear, ...]
    """Without the output layer."""
    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    quantization: str | None = None
    """Of the linear layers: on disk already, or as they are loaded."""

    @property
    def linear_size(self) -> int:
        return sum(linear.size for linear in self.linears)

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.width

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_size

    def adapted(self, lora: LoraConfig) -> list[Linear]:
        """The layers that get adapters."""
        if lora.targets == ("all-linear",):
            return list(self.linears)
        ends = tuple(target.rpartition(".")[2] for target in lora.targets)
        return [linear for linear in self.linears if linear.name.rpartition(".")[2] in ends]

    def adapter_size(self, lora: LoraConfig) -> int:
        """Parameters of the adapters."""
        rank = lora.r or 0
        magnitudes = sum(linear.outputs for linear in self.adapted(lora)) if lora.dora else 0
        return sum(rank * (linear.inputs + linear.outputs) for linear in self.adapted(lora)) + magnitudes


def shape_of(model: ModelConfig) -> Shape:
    """Read a model's config and lay it out without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = local_folder(model.name)
    name = str(folder or (model_folder(model.name) if "/" not in model.name else model.name))
    try:
        config: Any = AutoConfig.from_pretrained(name)
        stored = quantization_told(getattr(config, "quantization_config", None), model=model.name)
        config.quantization_config = None
        with torch.device("meta"):
            laid_out: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except unloadable() as error:
        raise ConfigError(f"cannot read the config of {model.name}: {first_line(error)}") from error
    head = laid_out.get_output_embeddings()
    linears = tuple(
        Linear(name=name, inputs=module.in_features, outputs=module.out_features)
        for name, module in laid_out.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    return Shape(
        parameters=sum({id(p): p.numel() for p in laid_out.parameters()}.values()),
        linears=linears,
        layers=int(config.num_hidden_layers),
        width=width,
        inner=int(getattr(config, "intermediate_size", None) or 4 * width),
        heads=heads,
        key_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or width // heads),
        vocabulary=int(config.vocab_size),
        quantization=stored or model.quantization,
    )
