"""`groupwise convert`: a model with pickled weights, which may run code, as one with safetensors."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or a Hugging Face name.")],
    output_path: Annotated[Path, typer.Option(help="Folder of the same model in safetensors.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there.")] = False,
) -> None:
    """Write a model with pickled weights, if you trust them, in safetensors, which all else loads."""
    from groupwise.model.output import check_output, new_folder
    from groupwise.model.source import pickled_folder

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
    numbers = sum(parameter.numel() for parameter in loaded.parameters())
    dtype = str(loaded.dtype).removeprefix("torch.")
    print(f"{numbers / 1e6:,.1f} M parameters in {dtype} written to {output_path} as safetensors")
    print(f"\nnext\n  {shlex.join(['groupwise', 'train', '--model', str(output_path)])}")
