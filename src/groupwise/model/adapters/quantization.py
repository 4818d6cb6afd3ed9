"""Quantized linear layers (bitsandbytes), dequantized for each matmul; and writing quantized models.

This gives the same results on every device and in every mode. bitsandbytes' own kernels do not: its CPU
kernels round differently from its training passes, and its int8 matmuls also quantize the input. Between
passes only the quantized weight is in memory.

Axes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from groupwise.errors import ConfigError
from groupwise.files import sign_weights
from groupwise.model.device import product, repeatable_linear
from groupwise.model.resolve import first_line, new_folder, quantization_kind


def is_quantized(linear: Any) -> bool:
    return type(getattr(linear, "weight", None)).__name__ in ("Params4bit", "Int8Params")


def is_quantized_model(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) and is_quantized(module) for module in model.modules())


def plain_weight(linear: Any) -> Tensor:
    """Return the weight_OI of a linear layer, dequantized if necessary."""
    if not is_quantized(linear):
        weight: Tensor = linear.weight
        return weight
    from peft.utils.integrations import dequantize_module_weight

    whole: Tensor = dequantize_module_weight(linear)
    return whole


def dequantize_in_forward(model: nn.Module) -> None:
    """Replace the forward pass of every quantized layer by one that dequantizes its weight per matmul."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_quantized(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(linear: Any, x: Tensor) -> Tensor:
    y_NO: Tensor = _DequantizedLinear.apply(x.flatten(0, -2), linear, linear.bias)  # type: ignore[no-untyped-call]
    return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


class _DequantizedLinear(torch.autograd.Function):
    """x Wᵀ + bias with frozen W and bias; dequantizes W again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, linear: Any, bias_O: Tensor | None) -> Tensor:
        ctx.linear = linear
        bias_O = None if bias_O is None else bias_O.to(x_NI.dtype)
        return repeatable_linear(x_NI, plain_weight(linear).to(x_NI.dtype), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_NO = grads[0]
        return product(dy_NO, plain_weight(ctx.linear).to(dy_NO.dtype)), None, None


TRAIN_SETTINGS = "train.yaml"
"""File beside quantized weights with the settings for training adapters on them."""


def settings_for(kind: str, dtype: torch.dtype | None) -> Any:
    """Return the transformers config that quantizes a model while loading; matmuls are in `dtype`."""
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def check_installed() -> None:
    if find_spec("bitsandbytes") is None:
        raise ConfigError("quantized weights require bitsandbytes: pip install bitsandbytes")


def quantization_of(folder: Path) -> str | None:
    """Return how the weights in a model folder are quantized; None if they are not."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        return quantization_kind(settings, model=str(folder))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'} is damaged: {first_line(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Result of quantizing a model."""

    folder: Path
    layers: int
    bytes_before: int
    """Size of the weight files."""
    bytes_after: int


def save_quantized(model: Any, tokenizer: Any, output: Path, *, source: Path, extra: str) -> Quantized:
    """Write a quantized model, its tokenizer, and the training settings `extra`."""
    layers = sum(type(module).__name__ in ("Linear4bit", "Linear8bitLt") for module in model.modules())
    with new_folder(output) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        sign_weights(unfinished)
        (unfinished / TRAIN_SETTINGS).write_text(extra, encoding="utf-8")
    return Quantized(
        folder=output, layers=layers, bytes_before=weight_bytes(source), bytes_after=weight_bytes(output)
    )


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
