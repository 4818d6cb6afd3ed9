"""`groupwise quantize`: a model with its weights in few bits, to train adapters on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from groupwise.config.checks import one_of
from groupwise.config.model import LORA_PRESETS, QUANTIZATIONS
from groupwise.config.text import write_yaml
from groupwise.errors import ConfigError


def quantize(
    output_path: Annotated[Path, typer.Option(help="Folder of the quantized model.")],
    model: Annotated[str, typer.Option(help="smollm2, a Hugging Face name, or a folder.")] = "smollm2",
    kind: Annotated[str, typer.Option(help="nf4 (4 bits, double quantization) or int8.")] = "nf4",
    dtype: Annotated[str | None, typer.Option(help="Of all other weights; bfloat16 on a GPU.")] = None,
    lora_preset: Annotated[
        str, typer.Option(help="Adapters that the settings beside it will name.")
    ] = "agent",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there.")] = False,
) -> None:
    """Quantize a model with bitsandbytes and write it with settings for adapters on it (QLoRA)."""
    one_of("--kind", kind, QUANTIZATIONS)
    one_of("--lora-preset", lora_preset, tuple(LORA_PRESETS))
    if dtype is not None:
        one_of("--dtype", dtype, ("float32", "bfloat16"))
    from groupwise.model.output import check_output
    from groupwise.model.quantize import TRAIN_SETTINGS, check_installed, quantization_of, save_quantized
    from groupwise.model.source import local_folder, model_folder

    check_installed()
    check_output(output_path, overwrite=overwrite)
    local_folder(model)
    import torch

    from groupwise.model.load import causal_model, keep_quiet, load_tokenizer

    keep_quiet()
    source = model_folder(model)
    stored = quantization_of(source)
    if stored is not None:
        raise ConfigError(f"{model} is quantized already ({stored}): name the model that it was made of")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    settings = f"model: {write_yaml({'name': str(output_path.resolve())})}\nlora: {{preset: {lora_preset}}}\n"
    loaded = causal_model(source, chosen, device, quantization=kind)
    done = save_quantized(loaded, load_tokenizer(source), output_path, source=source, extra=settings)
    print(
        f"{done.layers} layers in {kind} written to {done.folder}: "
        f"{done.bytes_before / 1e9:.2f} GB of weight files before, {done.bytes_after / 1e9:.2f} GB after"
    )
    train = ["groupwise", "train", "--config", str(done.folder / TRAIN_SETTINGS), "--task", "countdown"]
    print(f"\nnext\n  {shlex.join(train)}")
