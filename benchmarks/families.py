"""Which path every decoder family of transformers takes: fast, general or refused.

    python benchmarks/families.py             # all families, a few minutes on a CPU
    python benchmarks/families.py llama mamba # some of them

A tiny random model of each family is saved, loaded as a run loads it, and trained for two steps, once whole
and once with LoRA: generate, update, generate. The gap between the log-probabilities of sampler and trainer
must stay below 1e-3 nats. The result is written to src/groupwise/model/families.json and to the table in
docs/models.md.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
import tempfile
import warnings
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
    "blt": "reads bytes, not tokens",
    "phi4_multimodal": "needs its audio and vision parts",
    "fuyu": "needs its vision part",
    "moshi": "speaks; it is no text model",
    "gemma3n": "needs the package timm; its text part, gemma3n_text, is measured",
}
"""Not built here, and why."""
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
    DOCS.write_text(before + BEGIN + table(known) + END + rest.split(END)[1], encoding="utf-8")


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


def table(known: dict[str, str]) -> str:
    """Return the table of docs/models.md."""
    rows = ["\n| path | families (transformers' `model_type`) |\n|---|---|\n"]
    for path in ("fast", "general"):
        own = [f"`{family}`" for family, of in known.items() if of == path]
        rows.append(f"| {path} ({len(own)}) | {', '.join(own)} |\n")
    return "".join(rows) + "\n"


if __name__ == "__main__":
    main()
