"""What an update costs: with the group's prompt computed once, and against the number of trained tokens.

    python benchmarks/shared_prefix.py            # three minutes on two cores
    python benchmarks/shared_prefix.py --quick    # does it run? The times mean nothing

The model is a random Llama in the shape of SmolLM2-135M (hidden 576, 9 query and 3 key heads), cut to a
few of its 30 layers; the vocabulary is cut by the same factor, so the output layer keeps its share of the
work. An update is `Learner.update`: packing, forward, backward, clipping, AdamW on every weight, float32 on
the CPU.

1. **Shared prompt.** Prompts 8 times longer than answers, groups of 8. "Repeated" gives each answer a group
   of its own, so its prompt is computed with it, as a trainer without prefix sharing does; it still has no
   padding. Both make the same gradient, which is checked by its norm.
2. **Linearity.** 1, 2, 4 and 8 times the trained tokens, by more groups and by longer answers, with a
   least-squares line through the times.

The two ways are timed in turn, so a machine that slows down slows both; a time is the median of its repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import torch
from machine import machine, markdown
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.config.schema import AlgoConfig, OptimConfig
from groupwise.learner.learner import Learner
from groupwise.model.attention.compatibility import check_attention
from groupwise.model.load import keep_freed_memory, use_fused_ops
from groupwise.model.policy import Policy
from groupwise.records import Sample, Sampling

GROUP_SIZE = 8
ANSWER = 64
SHORT_PROMPT = 128
"""Of the linearity measurements, where the prompt is not what is measured."""


class NoTokenizer:
    """Tokens come from a random generator here; nothing is encoded."""

    eos_token_id = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What an update of one batch took."""

    seconds: float
    gradient_norm: float
    trained_tokens: int


def random_policy(layers: int) -> Policy:
    torch.manual_seed(0)
    vocabulary = 49152 * layers // 30
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    check_attention(model, name="a random Llama")
    use_fused_ops(model)
    return Policy(model, NoTokenizer())


def new_learner(policy: Policy) -> Learner:
    # The "sampled" log-probabilities below are made up, so nothing may be inferred from their gap.
    algo = AlgoConfig(correction="none", max_gap=math.inf)
    optim = OptimConfig(learning_rate=1e-9)
    return Learner(policy, algo=algo, optim=optim, sampling=Sampling(max_tokens=4096), max_steps=1000)


def batch(*, groups: int, prompt: int, answer: int, vocabulary: int) -> list[Sample]:
    """Random groups: members of one have the same prompt and advantages that add up to zero."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(count))

    samples: list[Sample] = []
    for group in range(groups):
        asked = tokens(prompt)
        for member in range(GROUP_SIZE):
            advantage = 1.0 if member % 2 else -1.0
            samples.append(
                Sample(
                    tokens=asked + tokens(answer),
                    trained=(False,) * prompt + (True,) * answer,
                    logprobs=(0.0,) * prompt + (-math.log(vocabulary),) * answer,
                    entropies=(0.0,) * (prompt + answer),
                    advantages=(0.0,) * prompt + (advantage,) * answer,
                    prefix=prompt,
                    group=group,
                )
            )
    return samples


def repeated(samples: Sequence[Sample]) -> list[Sample]:
    """The same batch with nothing shared."""
    return [replace(sample, group=number) for number, sample in enumerate(samples)]


def updates(learner: Learner, batches: Sequence[Sequence[Sample]], *, repeats: int) -> list[Timing]:
    """Time an update of each batch, in turn, after one that is not counted."""
    seconds: list[list[float]] = [[] for _ in batches]
    norms = [0.0] * len(batches)
    for turn in range(repeats + 1):
        for number, samples in enumerate(batches):
            trained = sum(sample.length for sample in samples)
            started = time.perf_counter()
            report = learner.update(samples, sequences=len(samples), tokens=trained)
            if turn:
                seconds[number].append(time.perf_counter() - started)
            norms[number] = report["policy/grad_norm"]
    return [
        Timing(
            seconds=median(times),
            gradient_norm=norm,
            trained_tokens=sum(sample.length for sample in samples),
        )
        for times, norm, samples in zip(seconds, norms, batches, strict=True)
    ]


def line_through(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Least squares: (intercept, slope, R²)."""
    x_mean, y_mean = fmean(xs), fmean(ys)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    slope = covariance / sum((x - x_mean) ** 2 for x in xs)
    intercept = y_mean - slope * x_mean
    residual = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return intercept, slope, 1 - residual / sum((y - y_mean) ** 2 for y in ys)


def shared_against_repeated(
    learner: Learner, *, groups: int, answer: int, vocabulary: int, repeats: int
) -> dict[str, float]:
    samples = batch(groups=groups, prompt=8 * answer, answer=answer, vocabulary=vocabulary)
    shared, apart = updates(learner, [samples, repeated(samples)], repeats=repeats)
    print(
        f"\n## Shared prompt: {groups} × {GROUP_SIZE} answers of {answer} to prompts of {8 * answer} tokens\n"
    )
    rows = [
        ["shared", f"{shared.seconds:.2f}", f"{shared.gradient_norm:.6f}"],
        ["repeated", f"{apart.seconds:.2f}", f"{apart.gradient_norm:.6f}"],
        [
            "ratio",
            f"{apart.seconds / shared.seconds:.2f} ×",
            f"{apart.gradient_norm / shared.gradient_norm:.6f}",
        ],
    ]
    print(markdown(("prompt", "seconds an update", "gradient norm"), rows), flush=True)
    if not math.isclose(shared.gradient_norm, apart.gradient_norm, rel_tol=1e-3):
        raise SystemExit("the two ways do not make the same gradient: the times say nothing")
    return {"shared": shared.seconds, "repeated": apart.seconds, "ratio": apart.seconds / shared.seconds}


def linearity(
    learner: Learner, title: str, sized: Callable[[int], list[Sample]], *, repeats: int
) -> dict[str, object]:
    """Time 1, 2, 4 and 8 times the work and show how straight the line through it is."""
    timings = updates(learner, [sized(factor) for factor in (1, 2, 4, 8)], repeats=repeats)
    tokens = [float(timing.trained_tokens) for timing in timings]
    seconds = [timing.seconds for timing in timings]
    intercept, slope, r_squared = line_through(tokens, seconds)
    rows = [
        [
            f"{timing.trained_tokens}",
            f"{timing.seconds:.2f}",
            f"{intercept + slope * timing.trained_tokens:.2f}",
            f"{1e3 * timing.seconds / timing.trained_tokens:.2f}",
        ]
        for timing in timings
    ]
    print(f"\n## Trained tokens: {title}\n")
    print(markdown(("trained tokens", "seconds an update", "on the line", "ms a token"), rows))
    print(f"\n{intercept:.2f} s + {1e3 * slope:.3f} ms a token, R² {r_squared:.5f}", flush=True)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "intercept": intercept,
        "slope": slope,
        "r_squared": r_squared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--groups", type=int, default=2, help="in the comparison of shared and repeated prompts"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    answer, short_prompt = ANSWER, SHORT_PROMPT
    if options.quick:
        options.layers, options.groups, options.repeats = 2, 1, 1
        answer, short_prompt = ANSWER // 4, SHORT_PROMPT // 4
    torch.set_num_threads(options.threads)
    about = machine(threads=options.threads, torch=torch.__version__)
    print(f"{about} · {options.layers} layers", flush=True)
    keep_freed_memory()
    policy = random_policy(options.layers)
    learner = new_learner(policy)
    vocabulary = len(policy.head_weight)

    def more_groups(factor: int) -> list[Sample]:
        return batch(groups=factor, prompt=short_prompt, answer=answer, vocabulary=vocabulary)

    def longer_answers(factor: int) -> list[Sample]:
        return batch(groups=1, prompt=short_prompt, answer=factor * answer, vocabulary=vocabulary)

    result = {
        "machine": about,
        "more groups": linearity(learner, "more groups", more_groups, repeats=options.repeats),
        "longer answers": linearity(learner, "longer answers", longer_answers, repeats=options.repeats),
        "shared prompt": shared_against_repeated(
            learner, groups=options.groups, answer=answer, vocabulary=vocabulary, repeats=options.repeats
        ),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
