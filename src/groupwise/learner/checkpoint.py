"""Atomic checkpoints with checksums, and optimizer state as named tensors.

    checkpoints/step-000010/
      …               files of the caller: the model or adapter, in Hugging Face layout
      training/       optimizer state; in a folder, because loaders take every *.safetensors for weights
      state.json      step, data cursor, and other small state
      checksums.json  size and SHA-256 of every other file; written last

A checkpoint is written under a hidden name and renamed once every byte is on disk. Before it replaces an
older checkpoint of the same step, the old one is renamed to `.step-000010.replaced`. The old one stays valid
until the new one has its final name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import CheckpointError
from groupwise.files import let_read, sync, write_atomically
from groupwise.tracking.run_folder import step_name, step_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

STATE = "state.json"
CHECKSUMS = "checksums.json"
TRAINING = "training"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_SETTINGS = "optimizer.json"


def write_checkpoint(
    folder: Path, *, step: int, write: Callable[[Path], None], state: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of one step; `write` fills the folder it receives.

    Earlier complete checkpoints stay complete even if this call fails or the process is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    temporary = hidden(folder, step, f"tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        write(temporary)
        write_atomically(temporary / STATE, json.dumps({"step": step, **state}, indent=1))
        let_read(temporary)
        seal(temporary)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error.strerror or error
        raise CheckpointError(
            f"cannot write {step_name(step)} in {folder}: {reason}; earlier checkpoints are unchanged"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return install(temporary, folder / step_name(step))


def seal(checkpoint: Path) -> None:
    """Flush every file to disk and record its size and checksum."""
    checksums = {}
    for path in sorted(checkpoint.rglob("*")):
        sync(path)
        if path.is_file():
            checksums[path.relative_to(checkpoint).as_posix()] = {
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }
    write_atomically(checkpoint / CHECKSUMS, json.dumps(checksums, indent=1))


def install(temporary: Path, final: Path) -> Path:
    """Rename a finished checkpoint; a complete one is on disk at every moment."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; skip incomplete ones with a warning."""
    for path in newest_first(folder).values():
        fault = incompleteness(path)
        if fault is None:
            return path
        logger.warning("skipping incomplete checkpoint %s: %s", path, fault)
    return None


def verify(checkpoint: Path) -> dict[str, Any]:
    """Verify the checksums of a checkpoint and return its state."""
    fault = damage(checkpoint)
    if fault is not None:
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {fault}; {advice(checkpoint)}")
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def prune(folder: Path, *, keep_last: int, best: int | None) -> None:
    """Delete all but the newest checkpoints and the best one."""
    remove_leftovers(folder)
    for step, path in list(newest_first(folder).items())[keep_last:]:
        if step != best:
            # Rename first: a crash during deletion then leaves a temporary folder, not a broken checkpoint.
            deleted = hidden(folder, step, f"tmp-{os.getpid()}")
            path.rename(deleted)
            shutil.rmtree(deleted)


def newest_first(folder: Path) -> dict[int, Path]:
    """Return all checkpoints by step, complete or not; include a replaced one while it has no successor."""
    paths: dict[int, Path] = {}
    for path in (*folder.glob(".step-*.replaced"), *folder.glob("step-*")):
        step = step_of(path.name.removeprefix("."))
        if step is not None and path.name in (step_name(step), f".{step_name(step)}.replaced"):
            paths[step] = path
    return dict(sorted(paths.items(), reverse=True))


def incompleteness(checkpoint: Path) -> str | None:
    """Return what is missing by a quick check of names and sizes, or None."""
    if not (checkpoint / CHECKSUMS).is_file():  # not a folder, nor a pipe, which would block
        return f"{CHECKSUMS} is missing"
    try:
        checksums = json.loads((checkpoint / CHECKSUMS).read_text(encoding="utf-8"))
        expected = {name: entry["bytes"] for name, entry in checksums.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{CHECKSUMS} cannot be read"
    if STATE not in expected:
        return f"{CHECKSUMS} does not list {STATE}"
    for name, size in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong by a full check of all checksums, or None."""
    fault = incompleteness(checkpoint)
    if fault is not None:
        return fault
    checksums = json.loads((checkpoint / CHECKSUMS).read_text(encoding="utf-8"))
    for name, entry in checksums.items():
        if sha256(checkpoint / name) != entry.get("sha256"):
            return f"{name} does not match its checksum"
    return None


def advice(damaged: Path) -> str:
    """Return what to do about a damaged checkpoint."""
    older = (path for path in newest_first(damaged.parent).values() if path.name < damaged.name)
    intact = next((path.name for path in older if damage(path) is None), None)
    if intact is None:
        return "no older checkpoint is intact; start a new run under another name"
    return f"{intact} is intact; move {damaged.name} away and resume again"


def remove_leftovers(folder: Path) -> None:
    """Delete temporary folders of killed processes, but never the only copy of a checkpoint."""
    for path in folder.glob(".step-*.tmp-*"):
        shutil.rmtree(path)
    for path in folder.glob(".step-*.replaced"):
        if (folder / path.name.removeprefix(".").removesuffix(".replaced")).exists():
            shutil.rmtree(path)


def hidden(folder: Path, step: int, suffix: str) -> Path:
    return folder / f".{step_name(step)}.{suffix}"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def optimizer_tensors(
    optimizer: Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimizer's state into named tensors for safetensors and settings for JSON.

    Example: one parameter "weight" under AdamW gives the tensors "weight.step", "weight.exp_avg" and
    "weight.exp_avg_sq", and {"groups": [{"params": ["weight"], "lr": 0.001, …}]}.
    """
    names = parameter_names(optimizer, parameters)
    saved = optimizer.state_dict()
    tensors = {
        f"{names[index]}.{key}": value
        for index, state in saved["state"].items()
        for key, value in flattened(state)
    }
    groups = [
        {**group, "params": [names[index] for index in group["params"]]} for group in saved["param_groups"]
    ]
    return tensors, {"groups": groups}


def write_optimizer(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Write what `optimizer_tensors` returned into a checkpoint's folder."""
    from safetensors.torch import save_file

    (folder / TRAINING).mkdir(exist_ok=True)
    save_file(dict(tensors), folder / TRAINING / OPTIMIZER)
    (folder / TRAINING / OPTIMIZER_SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    for name in (OPTIMIZER, OPTIMIZER_SETTINGS):  # where earlier versions put them
        (folder / name).unlink(missing_ok=True)


def read_optimizer(folder: Path, *, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_optimizer` wrote; older checkpoints have it beside the model."""
    from safetensors.torch import load_file

    if (folder / TRAINING / OPTIMIZER).is_file():
        folder = folder / TRAINING
    settings: dict[str, Any] = json.loads((folder / OPTIMIZER_SETTINGS).read_text(encoding="utf-8"))
    return load_file(folder / OPTIMIZER, device=device), settings


def load_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    *,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> None:
    """Restore exactly the state that `optimizer_tensors` returned."""
    names = parameter_names(optimizer, parameters)
    saved_names = [name for group in settings["groups"] for name in group["params"]]
    if saved_names != names:
        raise CheckpointError(
            "the checkpoint's optimizer state is for other parameters than this model trains; resume with "
            "the run's own model and lora settings"
        )
    index_of = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        unflatten(state.setdefault(index_of[name], {}), key, tensor)
    groups = [
        {**group, "params": [index_of[name] for name in group["params"]]} for group in settings["groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def flattened(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter's state as tensors; 8-bit AdamW nests some in a dict and counts steps in an int."""
    import torch

    for key, value in state.items():
        if isinstance(value, dict):
            # Clone: parameters share the quantization table, and safetensors rejects shared tensors.
            yield from ((f"{key}/{inner}", tensor.clone()) for inner, tensor in flattened(value))
        elif isinstance(value, torch.Tensor):
            yield key, value.detach().contiguous()
        elif value is not None:
            yield key, torch.tensor(value)


def unflatten(state: dict[str, Any], key: str, tensor: Tensor) -> None:
    """Undo `flattened` for one entry."""
    outer, slash, inner = key.partition("/")
    if slash:
        unflatten(state.setdefault(outer, {}), inner, tensor)
    else:
        is_integer = tensor.dim() == 0 and not tensor.is_floating_point()
        state[key] = int(tensor) if is_integer else tensor


def parameter_names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the optimizer's parameters, in the optimizer's order."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    return [name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
