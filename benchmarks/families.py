"""Which path every decoder family of transformers takes: fast, general or refused.

    python benchmarks/families.py             # all families, a few minutes on a CPU
    python benchmarks/families.py llama mamba # some of them

A tiny random model of each family is saved, loaded as a run loads it, and trained for two steps, once whole
and once with LoRA: generate, update, generate. The gap between the log-probabilities of sampler and trainer
must stay below 1e-3 nats. The result is written to src/groupwise/model/families.json and to the tables
in docs/models.md.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from groupwise.config.schema import AlgoConfig, EngineConfig, LoraConfig, ModelConfig, OptimConfig
from groupwise.engine.engine import Engine
from groupwise.errors import ConfigError
from groupwise.learner.learner import Learner
from groupwise.model.load import keep_quiet, load_policy
from groupwise.model.policy import Policy
from groupwise.model.resolve import FAMILIES, refusal
from groupwise.records import Completion, Request, Sample, Sampling
from tests.support.small_models import tiny_tokenizer
from tests.support.tiny_families import tiny_model

DOCS = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: benchmarks/families.py -->\n", "<!-- end of families -->"
VISION = ("gemma3", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")
VISION_TOO = ("qwen2_vl", "mistral3", "llava", "internvl", "idefics3", "smolvlm", "paligemma", "lfm2_vl")
SKIPPED = {
    "gemma3n": "needs the package timm; its text part, gemma3n_text, is measured",
}
"""Not built here, and why."""
LOGITS = "a model whose logits are not those of its output layer, or depend on later tokens"
DRAFTING = ("gemma4_assistant", "gemma4_unified_assistant")
TRAINS = ", and groupwise trains decoder-only models"
REFUSED_WHEN_LOADED = {
    LOGITS: ("bert-generation", "cpmant", "modernbert-decoder", "xlnet"),
    "a model that drafts tokens from the states of another one": DRAFTING,
}
"""Families whose config does not show that they cannot be trained."""
MOST_USED = {
    "Llama 1 to 3.3, SmolLM2, Yi, Falcon 3": "llama",
    "Llama 4": "llama4",
    "Qwen 1.5, 2, 2.5, QwQ": "qwen2",
    "Qwen2-MoE": "qwen2_moe",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5": "qwen3_5",
    "Mistral 7B, Nemo": "mistral",
    "Ministral 3": "ministral3",
    "Mixtral": "mixtral",
    "Gemma": "gemma",
    "Gemma 2": "gemma2",
    "Gemma 3 (text)": "gemma3_text",
    "Gemma 4": "gemma4",
    "Phi-1, 1.5, 2": "phi",
    "Phi-3, 3.5, 4": "phi3",
    "gpt-oss": "gpt_oss",
    "DeepSeek V2": "deepseek_v2",
    "DeepSeek V3, R1": "deepseek_v3",
    "DeepSeek V3.2": "deepseek_v32",
    "GLM-4": "glm4",
    "GLM-4.5": "glm4_moe",
    "MiniMax M2": "minimax_m2",
    "Kimi Linear": "kimi_linear",
    "OLMo 2": "olmo2",
    "OLMo 3": "olmo3",
    "OLMoE": "olmoe",
    "SmolLM3": "smollm3",
    "Granite 3": "granite",
    "Granite 4": "granitemoehybrid",
    "Falcon": "falcon",
    "Falcon-H1": "falcon_h1",
    "Command R": "cohere",
    "Command A": "cohere2",
    "LFM2": "lfm2",
    "Nemotron-H": "nemotron_h",
    "EXAONE 4": "exaone4",
    "ERNIE 4.5": "ernie4_5",
    "Hunyuan": "hunyuan_v1_dense",
    "Seed-OSS": "seed_oss",
    "Apertus": "apertus",
    "StableLM": "stablelm",
    "StarCoder 2": "starcoder2",
    "Jamba": "jamba",
    "Mamba 2": "mamba2",
    "GPT-2": "gpt2",
    "GPT-NeoX, Pythia": "gpt_neox",
    "OPT": "opt",
    "BLOOM": "bloom",
}
"""Published models of text, and their model type."""
LIMIT = 1e-3


def main() -> None:
    keep_quiet()
    warnings.simplefilter("ignore")
    asked = sys.argv[1:]
    causal = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    verdicts = {family: verdict(family) for family in asked or [*causal, *VISION_TOO, *VISION[5:]]}
    counts = {path: sum(v[0] == path for v in verdicts.values()) for path in ("fast", "general", "refused")}
    print(counts)
    known = json.loads(FAMILIES.read_text(encoding="utf-8"))
    known |= {family: path for family, (path, _) in verdicts.items()}
    known = {family: path for family, path in sorted(known.items()) if path in ("fast", "general")}
    FAMILIES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCS.write_text(
        before + BEGIN + path_tables(known) + refused_table() + END + rest.split(END)[1], encoding="utf-8"
    )


def verdict(family: str) -> tuple[str, str]:
    """Return (path, detail) of a family and print them."""
    path, detail = "skipped", SKIPPED.get(family, "")
    if not detail:
        try:
            path, detail = tried(family)
        except ConfigError as error:
            path, detail = "refused", str(error)
        except Exception as error:  # a config class that cannot be made small, or a fault
            path, detail = "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
    print(f"{family:24} {path:8} {detail}", flush=True)
    return path, detail


def tried(family: str) -> tuple[str, str]:
    """Train a family's tiny model, whole and with adapters."""
    if family in CONFIG_MAPPING and (reason := refusal(CONFIG_MAPPING[family]())):
        return "refused", reason
    assert family in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(family).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        gaps = []
        for rank in (0, 4):
            torch.manual_seed(0)
            settings = ModelConfig(name=folder, device="cpu", dtype="float32")
            policy = load_policy(settings, LoraConfig(r=rank, alpha=8))
            gaps.append(trained(policy))
    assert max(gaps) < LIMIT, f"sampler and trainer differ by {max(gaps):.1e}"
    return "fast" if policy.general is None else "general", "" if policy.general is None else str(
        policy.general
    )


def trained(policy: Policy) -> float:
    """Make two steps and return the largest gap between sampler and trainer."""
    sampling = Sampling(max_tokens=14)
    learner = Learner(
        policy, algo=AlgoConfig(), optim=OptimConfig(learning_rate=1e-3), sampling=sampling, max_steps=2
    )
    gaps = []
    for step in range(2):
        requests = [
            Request(prompt=tuple(range(20, 31)), seeds=(step, 7, 8)),
            Request(prompt=(40, 50), seeds=(9,)),
        ]
        groups = Engine(policy, EngineConfig()).generate(requests, sampling)
        samples = [
            sample(request.prompt, completion, group=group, advantage=(-1.0) ** member)
            for group, (request, completions) in enumerate(zip(requests, groups, strict=True))
            for member, completion in enumerate(completions)
        ]
        tokens = sum(each.length for each in samples)
        metrics = learner.update(samples, sequences=len(samples), tokens=tokens)
        assert metrics["policy/grad_norm"] > 0
        gaps.append(metrics["policy/gap"])
    return max(gaps)


def sample(prompt: tuple[int, ...], completion: Completion, *, group: int, advantage: float) -> Sample:
    zeros, count = (0.0,) * len(prompt), len(completion.tokens)
    settings: dict[str, Any] = {"prefix": len(prompt), "group": group}
    return Sample(
        tokens=prompt + completion.tokens,
        trained=(False,) * len(prompt) + (True,) * count,
        logprobs=zeros + completion.logprobs,
        entropies=zeros + completion.entropies,
        advantages=zeros + (advantage,) * count,
        **settings,
    )


def path_tables(known: dict[str, str]) -> str:
    """Return the tables of the families that can be trained, for docs/models.md."""
    used = [f"| {models} | `{family}` | {known[family]} |\n" for models, family in MOST_USED.items()]
    rows = ["\n| models | `model_type` | path |\n|---|---|---|\n", *used, "\nAll families that were tried:\n"]
    rows.append("\n| path | families (transformers' `model_type`) |\n|---|---|\n")
    for path in ("fast", "general"):
        own = [family for family, of in known.items() if of == path]
        rows.append(f"| {path} ({len(own)}) | {quoted(own)} |\n")
    return "".join(rows)


def refused_table() -> str:
    """Return the table of the others."""
    rows = [f"| {reason} | {quoted(own)} |\n" for reason, own in refused().items()]
    return "\n#### Refused families\n\n| why | families |\n|---|---|\n" + "".join(rows) + "\n"


def quoted(families: Iterable[str]) -> str:
    return ", ".join(f"`{family}`" for family in families)


def refused() -> dict[str, list[str]]:
    """Return the families that transformers calls language models and groupwise refuses, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for family in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}):
        if family not in DRAFTING and (reason := refusal(CONFIG_MAPPING[family]())):
            by_reason.setdefault(reason.removesuffix(TRAINS), []).append(family)
    by_reason["a model whose vision part needs the package timm"] = ["gemma3n", "fast_vlm", "perception_lm"]
    return by_reason | {reason: list(own) for reason, own in REFUSED_WHEN_LOADED.items()}


if __name__ == "__main__":
    main()
