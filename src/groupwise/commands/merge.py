"""`groupwise merge`: adapters added into their model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from groupwise.config import read_config
from groupwise.config.checks import one_of
from groupwise.errors import ConfigError
from groupwise.tracking.run_folder import RunFolder, is_agent, is_run

SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", re.IGNORECASE)


def merge(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run or a checkpoint, in place of --lora-model.")
    ] = None,
    output_path: Annotated[Path, typer.Option(help="Folder of the merged model.")] = Path("merged"),
    base_model: Annotated[
        str | None, typer.Option(help="The model under the adapters; by default, the one they name.")
    ] = None,
    lora_model: Annotated[Path | None, typer.Option(help="Folder of the adapters.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, to merge in and to write.")] = "float32",
    shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "4GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there.")] = False,
) -> None:
    """Add adapters into their model: a plain Hugging Face folder, compared with what was merged."""
    one_of("--dtype", dtype, ("float32", "bfloat16"))
    if not SIZE.fullmatch(shard_size):
        raise ConfigError(f"--shard-size must be a size such as 500MB or 4GB; got {shard_size!r}")
    adapter, base, quantization = named_adapter(run, lora_model, base_model)
    from groupwise.model.merge import merge as merge_adapter
    from groupwise.model.output import check_output
    from groupwise.model.source import adapter_base, adapter_settings

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
    print(f"{done.layers} layers merged into {done.folder} ({', '.join(done.files)})")
    print(f"largest difference of a logit on {done.tokens} tokens of real prompts, in {done.precision}:")
    print(f"  merged model, read back from disk, against model + adapters   {done.difference:.2e}")
    print(f"  model without adapters against model + adapters               {done.effect:.2e}")
    if done.rounded is not None:
        difference, noise = done.rounded
        print("in float32:")
        print(f"  merged model against model + adapters                         {difference:.2e}")
        print(f"  rounding alone: model + adapters against itself in float64    {noise:.2e}")
    print(f"\nnext\n  {shlex.join(['groupwise', 'chat', str(done.folder)])}")


def named_adapter(
    run: Path | None, lora_model: Path | None, base_model: str | None
) -> tuple[Path, str | None, str | None]:
    """Return the folder of the adapters, the model under them and how that was quantized while it loaded.

    Model and quantization are None where neither the user nor a run or an agent names them.
    """
    if (run is None) == (lora_model is None):
        raise ConfigError("name the adapters once: a run, or --lora-model FOLDER")
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
