"""`groupwise doctor`: what is installed, and whether a run will fit."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.config import Config, read_config
from groupwise.config.coerce import between, one_of

if TYPE_CHECKING:
    from groupwise.training.resources.run_estimate import DeviceSpec, MemoryEstimate

REQUIRED = ("torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "pyarrow", "rich", "typer")
OPTIONAL = {
    "datasets": "Hugging Face datasets by name",
    "bitsandbytes": "quantized weights and AdamW in eight bits",
    "trackio": "tracking",
    "wandb": "tracking",
    "tensorboard": "tracking",
    "math_verify": "the answers of hard mathematics",
    "gguf": "the model smollm2, once",
    "triton": "fast generation on a GPU",
}


def doctor(
    words: Annotated[list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings.")] = None,
    config: Annotated[Path | None, typer.Option(help="Look ahead at a run with these settings.")] = None,
    model: Annotated[str | None, typer.Option(help="Look ahead at a run with this model.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt to reckon with.")] = 256,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Of an answer, on average; by default, most.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Prove that this model's template is append-only.")
    ] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Reckon with this much memory.")] = None,
    on: Annotated[str | None, typer.Option(help="Reckon for cpu or cuda; by default, what is here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Say what is installed; with a model or settings, whether a run will fit and how long a step takes."""
    between("--prompt-tokens", prompt_tokens, 1)
    between("--answer-tokens", answer_tokens, 1)
    between("--memory-gb", memory_gb, 0.0, 1e6)
    one_of("--on", on or "cpu", ("cpu", "cuda"))
    if template is not None:
        return template_report(template)
    found = environment()
    if not as_json:
        for line in environment_lines(found):
            print(line)
    if config is None and model is None and not words:
        if as_json:
            print(json.dumps({"environment": found}))
        return 1 if found["missing"] else 0
    flags = {} if model is None else {"model": model}
    settings = read_config(config, overrides=words or [], flags=flags).resolve()
    ahead = look_ahead(
        settings, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, memory_gb=memory_gb, on=on
    )
    if as_json:
        print(json.dumps({"environment": found, "preflight": ahead}))
    else:
        print("\n".join(preflight_lines(ahead)))
    return 0 if ahead["fits"] else 1


def template_report(model: str) -> int:
    """Say whether conversations with this model can grow token by token."""
    from groupwise.model.resolve import model_folder
    from groupwise.model.tokenizer import template_verdict

    fine, sentence = template_verdict(model_folder(model))
    print(f"{model}: {sentence}")
    return 0 if fine else 1


def environment() -> dict[str, Any]:
    """Versions, what is missing and the device."""
    versions = {name: version_of(name) for name in (*REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if versions[name] is None]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "missing": missing,
        "device": None if "torch" in missing else device_words(),
    }


def version_of(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    try:
        return metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"


def device_words() -> str:
    import torch

    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        return f"{count} × {about.name}, {about.total_memory / 1e9:.0f} GB each"
    from groupwise.model.device import total_memory

    memory = total_memory(torch.device("cpu"))
    return f"CPU, {torch.get_num_threads()} threads, {memory / 1e9:.0f} GB"


def environment_lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"Python {found['python']} on {found['system']}; {found['device'] or 'no torch'}"
    for name, version in found["versions"].items():
        if version is not None:
            yield f"  {name:<14}{version}"
        elif name in REQUIRED:
            yield f"  {name:<14}missing: pip install {name}"
        else:
            yield f"  {name:<14}not installed: {OPTIONAL[name]}"


def look_ahead(
    config: Config, *, prompt_tokens: int, answer_tokens: int | None, memory_gb: float | None, on: str | None
) -> dict[str, Any]:
    """Predict memory by part and the time of a step."""
    import torch

    from groupwise.training.resources.model_shape import shape_of
    from groupwise.training.resources.run_estimate import (
        BYTES,
        advice,
        choose_recomputing,
        measure_machine,
        pace,
        preflight,
    )

    if config.lora.r:
        import peft  # noqa: F401  (its code is part of what a run takes on a CPU)

    kind = on or (config.model.device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    shape = shape_of(config.model)
    place = place_of(kind, memory_gb)
    config, recomputing = choose_recomputing(
        config, shape, place, free=place.total, prompt_tokens=prompt_tokens
    )
    found: MemoryEstimate = preflight(config, shape, place, prompt_tokens=prompt_tokens)
    here = kind == ("cuda" if torch.cuda.is_available() else "cpu")
    seconds = None
    if here:
        dtype = (
            torch.float32 if BYTES.get(config.model.dtype or "", 0) == 4 or kind == "cpu" else torch.bfloat16
        )
        machine = measure_machine(torch.device(kind), dtype)
        answer = answer_tokens or config.rollout.max_tokens
        predicted = pace(config, shape, machine, prompt_tokens=prompt_tokens, answer_tokens=answer)
        seconds = {"rollout": predicted.rollout, "update": predicted.update, "step": predicted.step}
    return {
        "model": config.model.name,
        "parameters": shape.parameters,
        "trained": shape.trained_size(config.lora),
        "parts_gb": {part.name: part.bytes / 1e9 for part in found.parts},
        "generating_gb": found.generating / 1e9,
        "updating_gb": found.updating / 1e9,
        "peak_gb": found.peak / 1e9,
        "memory_gb": place.total / 1e9,
        "assumed": memory_gb is None and kind == "cuda" and not torch.cuda.is_available(),
        "fits": found.fits,
        "recomputing": recomputing,
        "advice": list(advice(config, shape, found)),
        "seconds": seconds,
    }


def place_of(kind: str, memory_gb: float | None) -> DeviceSpec:
    """The device with its memory, and what the program itself takes of it."""
    import torch

    from groupwise.training.resources.run_estimate import CUDA_CONTEXT, DeviceSpec

    if kind == "cpu" or torch.cuda.is_available():
        place = DeviceSpec.of(torch.device(kind))
    else:
        place = DeviceSpec(kind=kind, total=24_000_000_000, program=CUDA_CONTEXT)
    return place if memory_gb is None else replace(place, total=int(memory_gb * 1e9))


def preflight_lines(ahead: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"{ahead['model']}: {ahead['parameters']:,} parameters, {ahead['trained']:,} of them trained"
    for name, size in ahead["parts_gb"].items():
        yield f"  {name:<20}{size:8.2f} GB"
    yield f"  {'while generating':<20}{ahead['generating_gb']:8.2f} GB"
    yield f"  {'while updating':<20}{ahead['updating_gb']:8.2f} GB"
    verdict = "fits" if ahead["fits"] else "does not fit"
    yield f"peak {ahead['peak_gb']:.2f} GB {verdict} into {ahead['memory_gb']:.1f} GB"
    if ahead["assumed"]:
        yield "there is no GPU here: one of that size is assumed, --memory-gb says otherwise"
    yield ahead["recomputing"]
    for line in ahead["advice"]:
        yield f"  try {line}"
    if ahead["seconds"] is not None:
        seconds = ahead["seconds"]
        yield (
            f"a step takes about {seconds['step']:.1f} s: {seconds['rollout']:.1f} generating, "
            f"{seconds['update']:.1f} updating"
        )
