"""`groupwise doctor`: check the installation, and estimate the memory and step time of a run."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.commands.options import Overrides
from groupwise.config import Config, read_config
from groupwise.config.coerce import between, one_of
from groupwise.config.schema import BUILT_IN
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.training.resources.run_estimate import DeviceSpec, MemoryEstimate, Plan

REQUIRED = ("torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "pyarrow", "rich", "typer")
OPTIONAL = {
    "datasets": "loads Hugging Face datasets",
    "bitsandbytes": "quantized weights and 8-bit AdamW",
    "trackio": "experiment tracking",
    "wandb": "experiment tracking",
    "tensorboard": "experiment tracking",
    "mlflow": "experiment tracking",
    "math_verify": "verifies answers to hard math problems",
    "gguf": "converts the model smollm2 on first use",
    "triton": "fast generation on a GPU",
}


def doctor(
    arguments: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the settings of the run.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of the run.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt length to assume, in tokens.")] = 256,
    answer_tokens: Annotated[
        int | None,
        typer.Option(help="Average completion length to assume, in tokens; by default, the maximum."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Check that earlier turns stay unchanged when this model's chat template adds one.",
        ),
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(help="Memory to assume, in GB; by default, that of the device.")
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Device to assume, cpu or cuda; by default, the one available.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Check the installation; given a model or settings, estimate the memory and step time of a run."""
    between("--prompt-tokens", prompt_tokens, 1)
    between("--answer-tokens", answer_tokens, 1)
    between("--memory-gb", memory_gb, 0.0, 1e6)
    one_of("--on", on or "cpu", ("cpu", "cuda"))
    if template is not None:
        return template_report(template)
    installed = environment()
    if not as_json:
        for line in environment_lines(installed):
            print(line)
    if config is None and model is None and not arguments:
        if as_json:
            print(json.dumps({"environment": installed}))
        return 1 if installed["missing"] else 0
    flags = {} if model is None else {"model": model}
    given = read_config(config, overrides=arguments or [], flags=flags)
    words = [*(["--config", str(config)] if config else []), *(["--model", model] if model else [])]
    ahead = look_ahead(
        given,
        command=["groupwise", "train", *words, *(arguments or [])],
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        memory_gb=memory_gb,
        on=on,
    )
    if as_json:
        print(json.dumps({"environment": installed, "preflight": ahead}))
    else:
        print("\n".join(preflight_lines(ahead)))
    return 0 if ahead["fits"] else 1


def template_report(model: str) -> int:
    """Print whether the chat template is append-only, as multi-turn rollouts require."""
    from transformers import AutoTokenizer

    from groupwise.model.resolve import first_line, model_folder, unloadable

    folder = model_folder(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except unloadable() as error:
        raise ConfigError(f"cannot load the tokenizer in {folder}: {first_line(error)}") from error
    fine, sentence = template_verdict(tokenizer)
    print(f"{model}: {sentence}")
    return 0 if fine else 1


def template_verdict(tokenizer: Any) -> tuple[bool, str]:
    """Return whether a chat template supports conversations with tools turn by turn, and why."""
    from groupwise.model.tokenizer import (
        calls_difference,
        first_difference,
        tool_format_of,
        unread_calls,
        writes_calls,
    )
    from groupwise.rollout.tool_calls import read_calls

    if tokenizer.chat_template is None:
        return False, "the model has no chat template; tools and conversations are not supported"
    style, own = tool_format_of(tokenizer), writes_calls(tokenizer)
    if reason := unread_calls(tokenizer, read_calls):
        return False, reason
    try:
        difference = first_difference(tokenizer) if style == "hermes" else None
        if own and difference is None:
            difference = calls_difference(tokenizer, read_calls)
    except ConfigError as error:
        return False, str(error)
    if difference is not None:
        return False, (
            f"turn-by-turn and full rendering differ {difference}; training keeps the sampled tokens, but a "
            "server that renders the full conversation gives the model different tokens"
        )
    shown = f"the template's own format, {style}" if own else "Hermes format, as user turns"
    return True, f"turn-by-turn and full rendering give the same tokens; tools are rendered in {shown}"


def environment() -> dict[str, Any]:
    """Return installed versions, missing packages and the device."""
    versions = {name: version_of(name) for name in (*REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if versions[name] is None]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "missing": missing,
        "device": None if "torch" in missing else describe_device(),
    }


def version_of(name: str) -> str | None:
    from importlib import metadata  # not for --help

    if find_spec(name) is None:
        return None
    try:
        return metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"


def describe_device() -> str:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        return f"{count} × {properties.name}, {properties.total_memory / 1e9:.0f} GB each"
    from groupwise.model.device import total_memory

    memory = total_memory(torch.device("cpu"))
    return f"CPU, {torch.get_num_threads()} threads, {memory / 1e9:.0f} GB"


def environment_lines(installed: dict[str, Any]) -> Iterator[str]:
    yield f"Python {installed['python']} on {installed['system']}; {installed['device'] or 'no torch'}"
    for name, version in installed["versions"].items():
        if version is not None:
            yield f"  {name:<14}{version}"
        elif name in REQUIRED:
            yield f"  {name:<14}missing: pip install {name}"
        else:
            yield f"  {name:<14}not installed: {OPTIONAL[name]}"


def look_ahead(
    given: Config,
    *,
    command: Sequence[str],
    prompt_tokens: int,
    answer_tokens: int | None,
    memory_gb: float | None,
    on: str | None,
) -> dict[str, Any]:
    """Estimate the memory of each part of a run and the time of a step, and choose settings that fit."""
    import torch

    from groupwise.model.device import supports_fp8
    from groupwise.training.resources.model_shape import shape_of
    from groupwise.training.resources.run_estimate import (
        BYTES,
        choose_recomputing,
        measure_machine,
        pace,
        plan,
        preflight,
    )

    config = given.resolve()
    if config.lora.r:
        import peft  # noqa: F401  (counts towards the memory of a run on a CPU)

    kind = on or (config.model.device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    here = kind == ("cuda" if torch.cuda.is_available() else "cpu")
    if here or kind != "cuda":
        supported = supports_fp8(torch.device(kind))
        config.engine.check_fp8(supported=supported, bfloat16=config.model.dtype != "float32")
    shape = shape_of(config.model)
    device = device_spec(kind, memory_gb)
    better = plan(config, shape, device, prompt_tokens=prompt_tokens)
    config, _ = choose_recomputing(config, shape, device, free=device.total, prompt_tokens=prompt_tokens)
    estimate: MemoryEstimate = preflight(config, shape, device, prompt_tokens=prompt_tokens)
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
        "path": shape.path,
        "notice": shape.notice,
        "parts_gb": {part.name: part.bytes / 1e9 for part in estimate.parts},
        "generating_gb": estimate.generating / 1e9,
        "updating_gb": estimate.updating / 1e9,
        "peak_gb": estimate.peak / 1e9,
        "memory_gb": device.total / 1e9,
        "assumed": memory_gb is None and not is_here(kind),
        "fits": estimate.fits,
        "recomputing": better.recomputing,
        "chosen": list(chosen(given, better)),
        "changes": [
            {"setting": one.setting, "value": one.value, "effect": one.effect, "without_gb": peak / 1e9}
            for one, peak in better.remedies.items()
        ],
        "can_fit": better.estimate.fits,
        "command": launch(command, better, kind),
        "seconds": seconds,
    }


def chosen(given: Config, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield each setting that is not `given`, with the value that a run chooses and the reason."""
    from groupwise.training.resources.run_estimate import BYTES, full_size, pass_budget

    changed = {remedy.setting for remedy in plan.remedies}
    rates = {remedy.setting: remedy.value for remedy in plan.remedies if remedy.setting == "lora.r"}
    lora = replace(given.lora, **{key.removeprefix("lora."): value for key, value in rates.items()})
    config, shape, device = replace(given, lora=lora).resolve(), plan.shape, plan.estimate.place
    dtype, why = "float32", "not a GPU"
    if device.kind == "cuda":
        dtype, why = "bfloat16", "on a GPU: half the memory, several times the speed"
    size = BYTES[config.model.dtype or dtype]
    everything = f"{full_size(shape, size) / 1e9:.1f} GB for weights, gradients and optimizer"
    rows: list[tuple[str, Any, str]] = [("model.dtype", dtype, why)]
    if config.lora.r:
        why = f"trains {shape.trained_size(config.lora):,} parameters; all of them would take {everything}"
    else:
        why = f"a model this small is trained whole: {everything}"
    rows.append(("lora.r", config.lora.r, why))
    if config.model.name in BUILT_IN:
        why = "for the built-in models"
    elif config.lora.r:
        why = "with adapters; rates from 5e-5 to 2e-4 learned where we measured"
    else:
        why = "for training every weight"
    rows.append(("optim.learning_rate", config.optim.learning_rate, why))
    tokens = pass_budget(plan.config, shape, size, device)
    why = "larger passes are hardly faster" if device.kind == "cpu" else "tokens a pass, by the memory"
    rows.append(("optim.micro_batch_tokens", tokens, why))
    rows.append(("optim.minibatches", config.optim.minibatches, "optimizer steps per training step"))
    for setting, value, why in rows:
        section, _, key = setting.partition(".")
        if getattr(getattr(given, section), key) is None and setting not in changed:
            yield {"setting": setting, "value": value, "why": why}


def launch(command: Sequence[str], plan: Plan, kind: str) -> str:
    """Return the shell command of the planned run, on every GPU of this machine."""
    import torch

    changed = {remedy.setting: remedy.value for remedy in plan.remedies}
    words = [word for word in command if word.partition("=")[0] not in changed]
    words += [f"{setting}={str(value).lower()}" for setting, value in changed.items()]
    if kind == "cuda" and torch.cuda.device_count() > 1:
        words = ["torchrun", "--nproc-per-node", str(torch.cuda.device_count()), "-m", *words]
    return shlex.join(words)


def is_here(kind: str) -> bool:
    """Whether this machine has a device of this kind."""
    import torch

    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cpu" or torch.cuda.is_available()


def device_spec(kind: str, memory_gb: float | None) -> DeviceSpec:
    """Return the device with its memory, and how much of it the process itself uses."""
    import torch

    from groupwise.training.resources.run_estimate import CUDA_CONTEXT, DeviceSpec

    if is_here(kind):
        device = DeviceSpec.of(torch.device(kind))
    else:
        device = DeviceSpec(kind=kind, total=24_000_000_000, program=CUDA_CONTEXT)
    return device if memory_gb is None else replace(device, total=int(memory_gb * 1e9))


def preflight_lines(ahead: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"{ahead['model']}: {ahead['parameters']:,} parameters, {ahead['trained']:,} of them trained"
    if ahead["notice"] is not None:
        yield ahead["notice"]
    if ahead["path"] == "general":
        yield "slower general path, without shared prompts: the estimates below are for the fast path"
    for name, size in ahead["parts_gb"].items():
        yield f"  {name:<20}{size:8.2f} GB"
    yield f"  {'while generating':<20}{ahead['generating_gb']:8.2f} GB"
    yield f"  {'while updating':<20}{ahead['updating_gb']:8.2f} GB"
    verdict = "fits" if ahead["fits"] else "does not fit"
    yield f"peak {ahead['peak_gb']:.2f} GB {verdict} into {ahead['memory_gb']:.1f} GB"
    if ahead["assumed"]:
        yield "no such GPU available: this memory size is assumed; set --memory-gb to change it"
    if ahead["changes"]:
        yield "it fits with:" if ahead["can_fit"] else "these settings reduce the peak, but not enough:"
    for one in ahead["changes"]:
        setting = f"{one['setting']}={str(one['value']).lower()}"
        yield f"  {setting:<34}{one['effect']} ({one['without_gb']:.1f} GB without)"
    yield "chosen because they are not set:"
    for one in ahead["chosen"]:
        yield f"  {one['setting'] + '=' + str(one['value']):<34}{one['why']}"
    yield f"  {ahead['recomputing']}"
    if ahead["can_fit"]:
        yield f"run: {ahead['command']}"
    else:
        yield (
            "choose a smaller model, lower rollout.max_tokens, or divide it among several GPUs "
            "(run.parallel=fsdp, engine.kind=vllm)"
        )
    if ahead["seconds"] is not None:
        seconds = ahead["seconds"]
        yield (
            f"estimated time per step: {seconds['step']:.1f} s ({seconds['rollout']:.1f} s generation, "
            f"{seconds['update']:.1f} s update)"
        )
