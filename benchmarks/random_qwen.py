"""Random models in the shapes of Qwen2.5 and SmolLM2: speed and memory do not depend on the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SHAPES = {
    "quick": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "heads": (4, 2)},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "heads": (9, 3)},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "heads": (14, 2)},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "heads": (12, 2)},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "heads": (16, 2)},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "heads": (28, 4)},
}
VOCABULARIES = {"quick": 512, "135m": 49152}
"""Of shapes that are not Qwen's, which has 151,936 tokens."""


def shape_config(shape: str, *, architecture: str = "qwen2") -> Any:
    settings = dict(SHAPES[shape])
    heads, key_heads = settings.pop("heads")  # type: ignore[misc]
    return transformers.AutoConfig.for_model(
        architecture,
        vocab_size=VOCABULARIES.get(shape, 151936),
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=shape != "7b",
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )


def random_model(shape: str, *, device: torch.device, architecture: str = "qwen2") -> Any:
    """The same weights for the same shape and device: bfloat16 on a GPU, float32 on a CPU."""
    torch.manual_seed(0)
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = shape_config(shape, architecture=architecture)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_folder(shape: str, *, device: torch.device) -> Path:
    """The model on disk, with a tokenizer of which every token is a word of its own.

    As a Llama of Qwen's shape: Qwen's tokenizer class would make something else of the words.
    """
    folder = cache() / f"random-qwen2.5-{shape}-{device.type}"
    if not (folder / "tokenizer_config.json").is_file():
        model = random_model(shape, device=device, architecture="llama")
        model.save_pretrained(folder)
        save_words(folder, model.config.vocab_size)
    return folder


def quantized_folder(shape: str, *, device: torch.device) -> Path:
    """The same in nf4, made matrix by matrix: never more in memory than the small model and one matrix."""
    import bitsandbytes

    from groupwise.model.adapters.quantization import settings_for

    folder = cache() / f"random-qwen2.5-{shape}-nf4-{device.type}"
    if (folder / "tokenizer_config.json").is_file():
        return folder
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    config = shape_config(shape, architecture="llama")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module is not head:
            weight = 0.02 * torch.randn(module.out_features, module.in_features, device=device, dtype=dtype)
            packed = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
            packed.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, packed.to(device))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            parent, _, last = name.rpartition(".")
            norm = parameter.dim() == 1
            whole = torch.ones(parameter.shape) if norm else 0.02 * torch.randn(parameter.shape)
            setattr(
                model.get_submodule(parent),
                last,
                torch.nn.Parameter(whole.to(device, dtype), requires_grad=False),
            )
    model.tie_weights()
    model.config.quantization_config = settings_for("nf4", dtype)
    model.save_pretrained(folder)
    save_words(folder, config.vocab_size)
    return folder


def save_words(folder: Path, count: int) -> None:
    """A tokenizer of so many words."""
    words = {f"w{number}": number for number in range(count)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = f"w{count - 1}"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end
    ).save_pretrained(folder)


def cache() -> Path:
    return Path.home() / ".cache" / "groupwise"
