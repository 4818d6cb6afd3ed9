"""Frozen weights in few bits under adapters (QLoRA), by bitsandbytes: nf4, twice quantized, or int8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from groupwise.errors import ConfigError
from groupwise.model.output import new_folder
from groupwise.model.source import first_line

TRAIN_SETTINGS = "train.yaml"
"""A file beside quantized weights with the settings of adapters for them."""


def settings_for(kind: str, dtype: torch.dtype | None) -> Any:
    """What transformers needs to know to quantize a model while it loads; products are in `dtype`."""
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
        raise ConfigError("quantized weights take a package: pip install bitsandbytes")


def quantization_of(folder: Path) -> str | None:
    """How the weights in a model's folder are quantized, as its files say; None: not at all."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        return quantization_told(settings, model=str(folder))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'} is damaged: {first_line(error)}") from error


def quantization_told(settings: Mapping[str, Any] | None, *, model: str) -> str | None:
    """How weights with these settings are quantized."""
    if not settings:
        return None
    if settings.get("load_in_4bit"):
        return "nf4"
    if settings.get("load_in_8bit"):
        return "int8"
    raise ConfigError(
        f"{model} is quantized by {settings.get('quant_method', 'an unknown method')}: only weights that "
        "bitsandbytes quantized can be trained on; take the model they were made of"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """What quantizing did."""

    folder: Path
    layers: int
    bytes_before: int
    bytes_after: int
    """Of the weight files."""


def save_quantized(model: Any, tokenizer: Any, output: Path, *, source: Path, extra: str) -> Quantized:
    """Write a model that was loaded quantized, its tokenizer, and the settings `extra` to train it with."""
    layers = sum(type(module).__name__ in ("Linear4bit", "Linear8bitLt") for module in model.modules())
    with new_folder(output) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / TRAIN_SETTINGS).write_text(extra, encoding="utf-8")
    return Quantized(
        folder=output, layers=layers, bytes_before=weight_bytes(source), bytes_after=weight_bytes(output)
    )


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
