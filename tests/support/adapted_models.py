"""The built-in model under adapters of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.learner.micro_batch import pack
from groupwise.learner.sft_learner import worked_sample
from groupwise.model.load import load_policy
from groupwise.model.ops.logprobs import token_logprobs
from groupwise.model.policy import Policy
from groupwise.records import Sampling

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "saved": {"modules_to_save": ("norm",)},
    "dropout": {"dropout": 0.3, "targets": ("q_proj", "v_proj")},
}


def adapted(folder: Path | None = None, *, quantization: str | None = None, **settings: Any) -> Policy:
    """The built-in model under adapters that matter."""
    model = ModelConfig(device="cpu", dtype="float32", quantization=quantization)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = load_policy(model, LoraConfig(r=4, **settings), trained=folder)
    if folder is None:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for parameter in policy.trainable().values():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def logprobs(policy: Policy, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """Of an answer's tokens, by the passes that train."""
    policy.model.eval()
    batch = pack([worked_sample(prompt, answer, group=0)], device=policy.device)
    hidden_TM = policy.hidden(batch.tokens_T, batch.positions_T, batch.layout)
    rows_NM = hidden_TM.index_select(0, batch.predictor_N)
    return token_logprobs(
        rows_NM,
        policy.head_weight,
        policy.head_bias,
        batch.targets_N,
        Sampling(),
        entropy_gradient=False,
    )[0].detach()
