"""Random models in the shapes of Qwen2.5: speed does not depend on what the weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SHAPES = {
    "quick": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "heads": (4, 2)},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "heads": (14, 2)},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "heads": (12, 2)},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "heads": (28, 4)},
}


def shape_config(shape: str, *, architecture: str = "qwen2") -> Any:
    settings = dict(SHAPES[shape])
    heads, key_heads = settings.pop("heads")  # type: ignore[misc]
    return transformers.AutoConfig.for_model(
        architecture,
        vocab_size=512 if shape == "quick" else 151936,
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
    folder = Path.home() / ".cache" / "groupwise" / f"random-qwen2.5-{shape}-{device.type}"
    if not (folder / "tokenizer_config.json").is_file():
        model = random_model(shape, device=device, architecture="llama")
        model.save_pretrained(folder)
        words = {f"w{number}": number for number in range(model.config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        end = f"w{model.config.vocab_size - 1}"
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=end, pad_token=end
        ).save_pretrained(folder)
    return folder
