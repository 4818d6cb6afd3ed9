"""LoRA adapters through PEFT: add or load them, validate their settings, and compute merged weights.

Axes: O outputs, I inputs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.config.schema import ADAPTER, LoraConfig
from groupwise.errors import ConfigError
from groupwise.model.adapters.quantization import plain_weight
from groupwise.model.device import raise_device_error
from groupwise.model.general_forward import text_decoder
from groupwise.model.resolve import adapter_settings, first_line, unloadable


def with_adapter(model: Any, lora: LoraConfig, trained: Path | None) -> Any:
    """Return the model with new adapters, or with those in the folder `trained`."""
    import peft
    from transformers.pytorch_utils import Conv1D

    assert lora.r, "adapters need a rank"
    if trained is not None:
        return load_adapter(model, trained, trainable=True)
    check_lora_targets(model, lora)
    if lora.init is not None:
        return load_adapter(model, Path(lora.init), trainable=True)
    everything = lora.targets == ("all-linear",)
    targets: str | list[str] = "all-linear" if everything else list(lora.targets)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=(unadaptable(model) or None) if everything else None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"lora.targets {list(lora.targets)}: {first_line(error)}") from error


MAMBA = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}
"""Families whose kernels read the weights of some linear layers themselves; PEFT refuses to adapt those."""


def unadaptable(model: Any) -> list[str]:
    """Return the linear layers that `all-linear` leaves out.

    They are layers with another forward pass (routers that return tuples, grouped projections), Mamba's
    output projections, layers that share one weight, and everything outside of a multimodal model's language
    part.
    """
    shared = layers_that_share_a_weight(model)
    text = {id(module) for module in text_decoder(model).modules()}
    mamba = model.config.model_type in MAMBA

    def left_out(name: str, linear: torch.nn.Linear) -> bool:
        own = type(linear).__module__.startswith("transformers.models.") and not is_linear(linear)
        reads = mamba and name.rpartition(".")[2] == "out_proj"
        return own or reads or name in shared or id(linear) not in text

    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and left_out(name, module)
    ]


def layers_that_share_a_weight(model: Any) -> set[str]:
    """Return linear layers whose weight is also another one's, as in Zamba.

    Each would have an adapter of its own, and two adapters cannot be merged into one weight.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            names[id(module.weight)].append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}


@torch.no_grad()
def is_linear(module: torch.nn.Linear) -> bool:
    """Whether a subclass of Linear computes no more than its weight and bias."""
    x_2I = torch.ones(2, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    try:
        y_2O = module(x_2I)
    except (RuntimeError, TypeError, ValueError) as error:
        raise_device_error(error)
        return False
    expected_2O = torch.nn.functional.linear(x_2I, module.weight, module.bias)
    return isinstance(y_2O, Tensor) and torch.allclose(y_2O, expected_2O, rtol=1e-2, atol=1e-3)


def load_adapter(model: Any, folder: Path, *, trainable: bool = False) -> Any:
    """Return the model with the adapter in a folder; raise ConfigError if it cannot be loaded."""
    import peft

    # Check first: PEFT looks for missing files on the network.
    check_patterns(adapter_settings(folder), [name for name, _ in model.named_modules()], folder=folder)
    try:
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
    except unloadable() as error:
        raise ConfigError(
            f"the adapter in {folder} is damaged or does not fit the model: {first_line(error)}; use the "
            "adapter's own base model"
        ) from error


PLAIN = re.compile(r"[\w.-]*")
"""A plain module name, which cannot cause slow matching."""
PATTERN_SECONDS = 10.0
MATCHING = "import json, re, sys\nfor p, names in json.load(sys.stdin):\n    [re.match(p, n) for n in names]"


def check_patterns(settings: Mapping[str, Any], names: Sequence[str], *, folder: Path) -> None:
    """Raise ConfigError if an adapter's module patterns are invalid or take too long on this model.

    PEFT matches them with `re`, which cannot be interrupted, so they are first tried in a subprocess.
    """
    whole = [settings.get(name) for name in ("target_modules", "exclude_modules")]
    parts: list[Any] = []
    for name in ("rank_pattern", "alpha_pattern", "layers_pattern", "modules_to_save"):
        value = settings.get(name) or ()
        parts += [value] if isinstance(value, str) else list(value)
    patterns = [rf"(?:{pattern})\Z" for pattern in whole if is_pattern(pattern)]
    patterns += [rf"(.*\.)?({part})($|\..*)" for part in parts if is_pattern(part)]
    if not patterns:
        return
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", MATCHING],
            input=json.dumps([(pattern, names) for pattern in patterns]),
            timeout=PATTERN_SECONDS,
            check=True,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{folder / ADAPTER}: matching a module pattern takes longer than {PATTERN_SECONDS:g} s; "
            "list the modules by name"
        ) from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1:] or ["matching failed"]
        raise ConfigError(f"{folder / ADAPTER}: a module pattern is invalid: {reason[0]}") from error


def is_pattern(value: Any) -> bool:
    return isinstance(value, str) and PLAIN.fullmatch(value) is None


def check_lora_targets(model: Any, lora: LoraConfig) -> None:
    """Raise ConfigError for adapters on embeddings or the output layer, and for invalid modules_to_save.

    Most models tie embeddings and output layer; training a copy of one of them would untie them.
    """
    last = {name: name.rpartition(".")[2] for name, _ in model.named_modules()}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    end_names = {last[name] for name, module in model.named_modules() if module in ends}
    if end_names & {target.rpartition(".")[2] for target in lora.targets}:
        raise ConfigError(
            "lora.targets may not include the embeddings or the output layer; use lora.targets=all-linear"
        )
    shared = {last[name] for name in layers_that_share_a_weight(model)}
    if both := sorted(shared & {target.rpartition(".")[2] for target in lora.targets}):
        raise ConfigError(
            f"lora.targets: {', '.join(both)} of this model share weights between layers, so adapters "
            "cannot be merged into them; use lora.targets=all-linear, which leaves them out"
        )
    for name in lora.modules_to_save:
        if name not in last.values() and name not in last:
            raise ConfigError(f"lora.modules_to_save: the model has no module named {name}")
    saved = {name.rpartition(".")[2] for name in lora.modules_to_save}
    if saved & end_names and getattr(model.config, "tie_word_embeddings", False):
        raise ConfigError(
            "lora.modules_to_save: this model ties its embeddings and output layer, so they cannot be "
            "trained beside adapters; train all weights with lora.r=0"
        )


def is_adapted(layer: Any) -> bool:
    return hasattr(layer, "get_delta_weight")


def base_of(layer: Any) -> Any:
    """Return the linear layer under the adapters, or the layer itself without adapters."""
    return layer.get_base_layer() if is_adapted(layer) else layer


@torch.no_grad()
def effective_weight(layer: Any) -> Tensor:
    """Return the weight_OI of a layer with its adapters merged, computed in float32.

    DoRA rescales each row of W + BA to its learned norm.
    """
    weight_OI = plain_weight(base_of(layer))
    if not is_adapted(layer) or layer.disable_adapters:
        return weight_OI
    whole_OI = weight_OI.float()
    for name in layer.active_adapters:
        whole_OI = whole_OI + layer.get_delta_weight(name).float()
    for name in layer.active_adapters:
        if name in layer.lora_magnitude_vector:
            # GPT-2 stores transposed weights.
            inputs = 0 if layer.fan_in_fan_out else 1
            now = torch.linalg.vector_norm(whole_OI, dim=inputs, keepdim=True)
            whole_OI = whole_OI * (layer.lora_magnitude_vector[name].weight.float().view_as(now) / now)
    return whole_OI
