"""Who is off: the sampler's and the trainer's log-probabilities of the same tokens, against float32.

    python benchmarks/sampler_gap.py --model smollm2                               # a minute on a GPU
    python benchmarks/sampler_gap.py --model tiny --prompts 4 --group-size 4 --max-tokens 32

A few steps of Countdown with a reward that is luck, so that every answer is trained on, at a learning rate of
nothing. The last step's answers are then read by transformers: in the model's own precision, and in float32
with the same (rounded) weights. Rounding makes all of them differ a little, and none of them much more than
another; if one does, something other than rounding is at work. KL is estimated on the drawn tokens (k3).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine, markdown
from numpy.typing import NDArray

import groupwise as gw
from groupwise.config import Config, read_config
from groupwise.learner.learner import Learner
from groupwise.model.resolve import model_folder
from groupwise.records import Sample
from groupwise.tasks.builtin.countdown import countdown_prompt
from groupwise.training import train

COMPARED = 128
"""Answers that transformers reads, one at a time."""


def luck(rollout: gw.Rollout, example: gw.Example) -> float:
    return float(zlib.crc32(repr(rollout.tokens).encode()) % 2)


def lucky_countdown() -> gw.Task:
    puzzles = [{"numbers": [3 + n % 50, 5 + n % 7, 2 + n % 11], "target": 10 + n % 90} for n in range(256)]
    return gw.Task(name="luck", examples=puzzles, prompt=countdown_prompt, rewards={"luck": luck})


def settings(options: argparse.Namespace, folder: str) -> Config:
    return read_config(
        overrides=[
            f"model.name={options.model}",
            f"rollout.prompts={options.prompts}",
            f"rollout.group_size={options.group_size}",
            f"rollout.max_tokens={options.max_tokens}",
            "rollout.refill=0",
            "optim.learning_rate=1e-12",
            "optim.minibatches=1",
            "algo.max_gap=10",
            "evaluate.skip=true",
            f"run.max_steps={options.steps}",
            f"run.output_dir={folder}",
            "run.name=gap",
            "track.trackers=[]",
            "track.report=false",
        ]
    )


def trained_samples(config: Config) -> tuple[list[Sample], Mapping[tuple[int, int], Sequence[float]]]:
    """Train, and keep the last step's samples with what the trainer made of them."""
    kept: list[tuple[list[Sample], dict[tuple[int, int], list[float]]]] = []
    update = Learner.update

    def noted(self: Learner, samples: Sequence[Sample], **counts: int) -> dict[str, float]:
        report = update(self, samples, **counts)
        kept[:] = [(list(samples), dict(self.seen))]
        return report

    Learner.update = noted  # type: ignore[method-assign]
    try:
        run = train(config, task=lucky_countdown())
    finally:
        Learner.update = update  # type: ignore[method-assign]
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        print({name: round(found[name], 6) for name in ("policy/gap", "policy/gap_max", "policy/gap_kl")})
    return kept[-1]


@torch.no_grad()
def read_by_transformers(
    model: str, samples: Sequence[Sample], *, dtype: torch.dtype, weights: torch.dtype, temperature: float
) -> NDArray[np.float64]:
    """The log-probabilities of what was drawn, of one answer at a time."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_folder(model), dtype=weights)
    loaded = loaded.to(device).to(dtype).eval()
    found = []
    for sample in samples:
        tokens_1T = torch.tensor([sample.tokens], device=device)
        hidden_TM = loaded.model(tokens_1T).last_hidden_state[0, :-1].float()
        logits_TV = hidden_TM @ loaded.lm_head.weight.float().T / temperature
        own_T1 = logits_TV.log_softmax(-1).gather(1, tokens_1T[0, 1:, None])
        found.append(own_T1[:, 0].cpu().double().numpy()[np.array(sample.trained[1:])])
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="a name or a folder")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    about = machine(threads=torch.get_num_threads(), torch=torch.__version__)
    about = f"{torch.cuda.get_device_name()} · {about}" if torch.cuda.is_available() else about
    with tempfile.TemporaryDirectory() as folder:
        config = settings(options, folder)
        samples, seen = trained_samples(config)
    samples = samples[:COMPARED]
    own = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    heat = config.resolve().rollout.temperature
    read = {"weights": own, "temperature": heat}
    by: dict[str, NDArray[np.float64]] = {
        "sampler": np.concatenate([np.array(s.logprobs)[np.array(s.trained)] for s in samples]),
        "trainer": np.concatenate([np.array(seen[s.group, s.member]) for s in samples]),
        f"transformers, {own}": read_by_transformers(options.model, samples, dtype=own, **read),
        "transformers, float32": read_by_transformers(options.model, samples, dtype=torch.float32, **read),
    }
    rows, found = [], {}
    for one, other in combinations(by, 2):
        difference = by[other] - by[one]
        size = np.abs(difference)
        kl = float((np.exp(difference) - 1 - difference).mean())
        found[f"{one} | {other}"] = {"mean": float(size.mean()), "most": float(size.max()), "kl": kl}
        p99 = float(np.quantile(size, 0.99))
        rows.append([one, other, f"{size.mean():.2e}", f"{p99:.2e}", f"{size.max():.2e}", f"{kl:.2e}"])
    print(f"\n{about}\n{options.model}, {len(by['sampler'])} tokens of {len(samples)} answers\n")
    print(markdown(["one", "other", "mean abs Δ", "99 %", "largest", "KL"], rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "pairs": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
