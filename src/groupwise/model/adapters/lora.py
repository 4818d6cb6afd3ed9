"""Adapters on a model (PEFT): putting them there, and the plain weight that a layer with them amounts to.

Axes: O outputs, I inputs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.config.schema import LoraConfig
from groupwise.errors import ConfigError
from groupwise.model.adapters.quantization import plain_weight
from groupwise.model.resolve import ADAPTER, adapter_settings, first_line, unloadable


def with_adapter(model: Any, lora: LoraConfig, trained: Path | None) -> Any:
    """Return the model with fresh adapters, or with those in the folder `trained`."""
    import peft
    from transformers.pytorch_utils import Conv1D

    assert lora.r, "without a rank there are no adapters"
    if trained is not None:
        return load_adapter(model, trained, trainable=True)
    refuse_ends(model, lora)
    targets: str | list[str] = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
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


def load_adapter(model: Any, folder: Path, *, trainable: bool = False) -> Any:
    """Return the model with the adapters in a folder, or raise."""
    import peft

    # PEFT looks on the network for what it does not find in the folder.
    check_patterns(adapter_settings(folder), [name for name, _ in model.named_modules()], folder=folder)
    try:
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
    except unloadable() as error:
        raise ConfigError(
            f"the adapter in {folder} is damaged or does not fit the model: {first_line(error)}"
        ) from error


PLAIN = re.compile(r"[\w.-]*")
"""A module's name, which any pattern search gets through at once."""
PATTERN_SECONDS = 10.0
MATCHING = "import json, re, sys\nfor p, names in json.load(sys.stdin):\n    [re.match(p, n) for n in names]"


def check_patterns(settings: Mapping[str, Any], names: Sequence[str], *, folder: Path) -> None:
    """Refuse an adapter whose patterns of module names take for ever on this model, or are none.

    PEFT matches them with `re`, which nothing can stop: they are first tried in a process that can be.
    """
    whole = [settings.get(name) for name in ("target_modules", "exclude_modules")]
    parts: list[Any] = []
    for name in ("rank_pattern", "alpha_pattern", "layers_pattern", "modules_to_save"):
        found = settings.get(name) or ()
        parts += [found] if isinstance(found, str) else list(found)
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
            f"{folder / ADAPTER}: a pattern of module names takes longer than {PATTERN_SECONDS:g} s to "
            "match; list the modules by name"
        ) from error
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().splitlines()[-1:] or ["it failed"]
        raise ConfigError(f"{folder / ADAPTER}: a pattern of module names is not valid: {why[0]}") from error


def is_pattern(found: Any) -> bool:
    return isinstance(found, str) and PLAIN.fullmatch(found) is None


def refuse_ends(model: Any, lora: LoraConfig) -> None:
    """Refuse adapters on the embeddings or the output layer, modules that are not there, and one end of two.

    The two ends of most models are one matrix, of which half a copy would be trained.
    """
    last = {name: name.rpartition(".")[2] for name, _ in model.named_modules()}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    end_names = {last[name] for name, module in model.named_modules() if module in ends}
    if end_names & {target.rpartition(".")[2] for target in lora.targets}:
        raise ConfigError(
            "lora.targets must leave the embeddings and the output layer alone; all-linear does"
        )
    for name in lora.modules_to_save:
        if name not in last.values() and name not in last:
            raise ConfigError(f"lora.modules_to_save: the model has no module called {name}")
    saved = {name.rpartition(".")[2] for name in lora.modules_to_save}
    if saved & end_names and getattr(model.config, "tie_word_embeddings", False):
        raise ConfigError(
            "lora.modules_to_save: this model's embeddings and output layer are one matrix, which cannot be "
            "trained beside adapters; train every weight with lora.r=0"
        )


def is_adapted(layer: Any) -> bool:
    return hasattr(layer, "get_delta_weight")


def base_of(layer: Any) -> Any:
    """The linear layer under the adapters, if there are any."""
    return layer.get_base_layer() if is_adapted(layer) else layer


@torch.no_grad()
def effective_weight(layer: Any) -> Tensor:
    """The weight_OI that computes what a layer computes with its adapters, added up in float32.

    DoRA gives each row of W + BA the length that it learned for it.
    """
    weight_OI = plain_weight(base_of(layer))
    if not is_adapted(layer) or layer.disable_adapters:
        return weight_OI
    whole_OI = weight_OI.float()
    for name in layer.active_adapters:
        whole_OI = whole_OI + layer.get_delta_weight(name).float()
    for name in layer.active_adapters:
        if name in layer.lora_magnitude_vector:
            # GPT-2 keeps its weights the other way round.
            inputs = 0 if layer.fan_in_fan_out else 1
            now = torch.linalg.vector_norm(whole_OI, dim=inputs, keepdim=True)
            whole_OI = whole_OI * (layer.lora_magnitude_vector[name].weight.float().view_as(now) / now)
    return whole_OI
