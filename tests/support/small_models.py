"""Random models small enough to compare number by number with plain transformers."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from groupwise.model.attention.compatibility import check_attention
from groupwise.model.policy import Policy
from groupwise.model.resolve import TINY_FOLDER

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VOCABULARY = 272
"""One id more than the tokenizer has, as in most real models."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
"""In the words that most families have for them."""


@cache
def tiny_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_FOLDER)


def with_more_tokens() -> Any:
    """A tokenizer that was given `<more>`, for which these models have no row."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens([f"<spare{number}>" for number in range(VOCABULARY - len(tokenizer))])
    tokenizer.add_tokens(["<more>"])
    return tokenizer


def small_model(kind: str = "llama", *, key_heads: int = 2, **settings: Any) -> Any:
    """Return a model with transformers' own attention, the same on every call."""
    config = CONFIGS[kind](
        **SIZES,
        num_key_value_heads=key_heads,
        head_dim=8,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer().eos_token_id,
        pad_token_id=tiny_tokenizer().pad_token_id,
        initializer_range=0.2,  # far from uniform, so that likely and unlikely tokens both occur
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def policy_of(model: Any) -> Policy:
    """Return a policy around the model, whose attention becomes ours."""
    general = check_attention(model, name="small")
    return Policy(model, tiny_tokenizer(), general=general)


class Scripted(Policy):
    """Writes the given tokens after a prompt of one token, whatever that is."""

    def __init__(self, policy: Policy, script: list[int]) -> None:
        super().__init__(policy.model, policy.tokenizer)
        self.attention = policy.attention
        self.script_P = torch.tensor(script)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Any) -> Tensor:
        return positions_T

    def logits(self, hidden_NM: Tensor) -> Tensor:
        return 50.0 * torch.nn.functional.one_hot(self.script_P[hidden_NM], VOCABULARY)
