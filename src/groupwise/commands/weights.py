"""`groupwise merge`, `quantize` and `convert`: write model weights in another form."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from groupwise.config import read_config
from groupwise.config.coerce import one_of, write_yaml
from groupwise.config.schema import LORA_PRESETS, QUANTIZATIONS
from groupwise.errors import ConfigError
from groupwise.tracking.run_folder import RunFolder, is_agent, is_run

SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", re.IGNORECASE)


def merge(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Run or checkpoint, instead of --lora-model.")
    ] = None,
    output_path: Annotated[Path, typer.Option(help="Folder of the merged model.")] = Path("merged"),
    base_model: Annotated[
        str | None, typer.Option(help="Base model; by default, the one named in the adapter's config.")
    ] = None,
    lora_model: Annotated[Path | None, typer.Option(help="Folder of the LoRA adapter.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Data type of the merge and the output: float32 or bfloat16.")
    ] = "float32",
    shard_size: Annotated[str, typer.Option(help="Maximum size of a weight file.")] = "4GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing model.")] = False,
) -> None:
    """Merge a LoRA adapter into its base model, save a Hugging Face folder, and verify its logits."""
    one_of("--dtype", dtype, ("float32", "bfloat16"))
    if not SIZE.fullmatch(shard_size):
        raise ConfigError(f"--shard-size must be a size such as 500MB or 4GB; got {shard_size!r}")
    adapter, base, quantization = named_adapter(run, lora_model, base_model)
    from groupwise.evaluate.contamination import write_lineage
    from groupwise.model.adapters.merge_adapters import merge as merge_adapter
    from groupwise.model.resolve import adapter_base, adapter_settings, check_output

    adapter_settings(adapter)
    base = base or adapter_base(adapter)
    check_output(output_path, overwrite=overwrite)
    done = merge_adapter(
        adapter,
        output_path,
        base=base,
        quantization=quantization,
        dtype=dtype,
        shard_size=shard_size,
        overwrite=overwrite,
    )
    write_lineage(done.folder, str(adapter), base)
    print(f"{done.layers} layers merged into {done.folder} ({', '.join(done.files)})")
    print(f"maximum logit difference on {done.tokens} tokens of real prompts, in {done.precision}:")
    print(f"  merged model, reloaded from disk, vs. base + adapter          {done.difference:.2e}")
    print(f"  base model vs. base + adapter                                 {done.effect:.2e}")
    if done.rounded is not None:
        difference, noise = done.rounded
        print("in float32:")
        print(f"  merged model vs. base + adapter                               {difference:.2e}")
        print(f"  rounding error: base + adapter vs. itself in float64          {noise:.2e}")
    print(f"\nnext\n  {shlex.join(['groupwise', 'chat', str(done.folder)])}")


def named_adapter(
    run: Path | None, lora_model: Path | None, base_model: str | None
) -> tuple[Path, str | None, str | None]:
    """Return the adapter's folder, its base model, and the quantization that the base was loaded with.

    Model and quantization are None if neither the user nor the settings of a run or an agent name them.
    """
    if (run is None) == (lora_model is None):
        raise ConfigError("give either a run or --lora-model FOLDER")
    folder = run or lora_model
    assert folder is not None
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    from groupwise.evaluate.target import Target, is_checkpoint, of_checkpoint, of_run

    if is_run(folder):
        target = of_run(str(folder), RunFolder(folder))
    elif is_checkpoint(folder):
        target = of_checkpoint(str(folder), folder)
    else:
        settings = RunFolder(folder).config if is_agent(folder) else None
        target = Target(name=str(folder), trained=folder, agent=settings)
    assert target.trained is not None
    if target.settings is None:
        return folder, base_model, None
    trained = read_config(target.settings).model
    return target.trained, base_model or trained.name, trained.quantization


def quantize(
    output_path: Annotated[Path, typer.Option(help="Folder of the quantized model.")],
    model: Annotated[
        str, typer.Option(help="Model: smollm2, a Hugging Face model ID, or a folder.")
    ] = "smollm2",
    kind: Annotated[
        str, typer.Option(help="Quantization: nf4 (4 bits, double quantization) or int8.")
    ] = "nf4",
    dtype: Annotated[
        str | None,
        typer.Option(help="Data type of all other weights; by default bfloat16 on a GPU, float32 on a CPU."),
    ] = None,
    lora_preset: Annotated[
        str, typer.Option(help="LoRA preset for the training settings saved with the model.")
    ] = "agent",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing model.")] = False,
) -> None:
    """Quantize a model with bitsandbytes, and save it with settings for QLoRA training."""
    one_of("--kind", kind, QUANTIZATIONS)
    one_of("--lora-preset", lora_preset, tuple(LORA_PRESETS))
    if dtype is not None:
        one_of("--dtype", dtype, ("float32", "bfloat16"))
    from groupwise.evaluate.contamination import write_lineage
    from groupwise.model.adapters.quantization import (
        TRAIN_SETTINGS,
        check_installed,
        quantization_of,
        save_quantized,
    )
    from groupwise.model.resolve import check_output, local_folder, model_folder

    check_installed()
    check_output(output_path, overwrite=overwrite)
    local_folder(model)
    import torch

    from groupwise.model.load import causal_model, keep_quiet, load_tokenizer

    keep_quiet()
    source = model_folder(model)
    stored = quantization_of(source)
    if stored is not None:
        raise ConfigError(f"{model} is already quantized ({stored}); use the original model")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    settings = f"model: {write_yaml({'name': str(output_path.resolve())})}\nlora: {{preset: {lora_preset}}}\n"
    loaded = causal_model(source, chosen, device, quantization=kind)
    done = save_quantized(loaded, load_tokenizer(source), output_path, source=source, extra=settings)
    write_lineage(done.folder, model)
    print(
        f"{done.layers} layers in {kind} written to {done.folder}: "
        f"weight files shrank from {done.bytes_before / 1e9:.2f} GB to {done.bytes_after / 1e9:.2f} GB"
    )
    train = ["groupwise", "train", "--config", str(done.folder / TRAIN_SETTINGS), "--task", "countdown"]
    print(f"\nnext\n  {shlex.join(train)}")


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hugging Face model ID.")],
    output_path: Annotated[Path, typer.Option(help="Folder of the converted model.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing model.")] = False,
) -> None:
    """Convert pickled weights to safetensors. Pickle files can run code: use it only on models you trust."""
    from groupwise.evaluate.contamination import write_lineage
    from groupwise.model.resolve import check_output, new_folder, pickled_folder

    check_output(output_path, overwrite=overwrite)
    source = pickled_folder(model)
    import torch

    from groupwise.model.load import causal_model, keep_quiet, load_tokenizer

    keep_quiet()
    tokenizer = load_tokenizer(source)
    loaded = causal_model(source, None, torch.device("cpu"), pickled=True)
    with new_folder(output_path) as unfinished:
        loaded.save_pretrained(unfinished, max_shard_size="4GB")
        tokenizer.save_pretrained(unfinished)
    write_lineage(output_path, model)
    count = sum(parameter.numel() for parameter in loaded.parameters())
    dtype = str(loaded.dtype).removeprefix("torch.")
    print(f"{count / 1e6:,.1f} M parameters in {dtype} written to {output_path} as safetensors")
    print(f"\nnext\n  {shlex.join(['groupwise', 'train', '--model', str(output_path)])}")
