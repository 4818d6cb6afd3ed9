"""Run folders made by the real writers, with whatever should be found in them planted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.algo.samples import to_samples
from groupwise.config import dump_config, read_config
from groupwise.model.resolve import TINY_FOLDER
from groupwise.records import Example, Group, Rollout
from groupwise.tracking.rollout_files import write_rollouts, write_updates
from groupwise.tracking.run_files import MetricsFile
from groupwise.tracking.run_folder import EVOLUTION, RunFolder
from groupwise.training.step_metrics import signs

PROMPT = (5, 6, 7)


def rollout(text: str, *, member: int = 0, prompt: str = "2 + 2?", **changes: Any) -> Rollout:
    """Return a rollout with a token for each character and then the end token."""
    answer = (*(ord(character) % 50 + 10 for character in text), 2)
    made = Rollout(
        prompt=[{"role": "user", "content": prompt}],
        text=text,
        tokens=(*PROMPT, *answer),
        trained=(False,) * len(PROMPT) + (True,) * len(answer),
        logprobs=(0.0,) * len(PROMPT) + (-0.5,) * len(answer),
        entropies=(0.0,) * len(PROMPT) + (0.7,) * len(answer),
        prompt_length=len(PROMPT),
        finish="end",
        member=member,
        rewards={"correct": 0.0, "format": 1.0},
        reward=1.0,
    )
    return replace(made, **changes)


def group_of(rollouts: Sequence[Rollout], *, question: str = "2 + 2?") -> Group:
    return Group(example=Example({"question": question}), rollouts=tuple(rollouts))


def good_groups(step: int) -> list[Group]:
    """Return two groups of three, whose best answer is right."""
    groups = []
    for index in range(2):
        question = f"{step} + {index}?"
        members = [
            rollout(
                f"answer {step + index + member}",
                member=member,
                prompt=question,
                rewards={"correct": float(member == 0), "format": 1.0},
                reward=1.0 + (member == 0),
                advantage=(1.2, -0.6, -0.6)[member],
            )
            for member in range(3)
        ]
        groups.append(group_of(members, question=question))
    return groups


def healthy(step: int) -> dict[str, float]:
    """Return what a step of a run that learns looks like."""
    share = min(1.0, step / 40)
    return {
        "reward/mean": 1.2 + 0.6 * share,
        "reward/correct/mean": 0.2 + 0.6 * share,
        "reward/format/mean": 1.0,
        "advantage/zero_variance": 0.1,
        "rollout/length": 50.0 + 30 * share,
        "rollout/truncated": 0.02,
        "rollout/failed": 0.0,
        "policy/entropy": 0.5 - 0.3 * share,
        "policy/gap": 1e-6,
        "time/rollout": 2.0,
        "time/reward": 0.1,
        "time/update": 1.5,
        "time/step": 3.6,
        "speed/tokens_per_second": 4000.0,
    }


def make_run(
    folder: Path,
    *,
    steps: int = 6,
    groups: Callable[[int], Sequence[Group]] = good_groups,
    metrics: Callable[[int], dict[str, float]] = healthy,
    accuracy: Callable[[int], float] = lambda step: min(0.9, 0.2 + step / 50),
    evaluate_every: int = 3,
    overrides: Sequence[str] = (),
) -> RunFolder:
    """Write a whole run: settings, metrics, rollouts, updates, evaluations, tokenizer, the end."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    settings = [f"run.max_steps={steps}", f"run.name={folder.name}", *overrides]
    run.config.write_text(dump_config(read_config(overrides=settings).resolve()))
    run.tokenizer.write_text((TINY_FOLDER / "tokenizer.json").read_text())
    file = MetricsFile(run.metrics)
    for step in range(steps + 1):
        if step % evaluate_every == 0 or step == steps:
            write_measured(run, step, accuracy(step), last=step == steps)
        if step == 0:
            continue
        made = groups(step)
        write_rollouts(run.rollouts_at(step), step, made)
        samples = to_samples(made, mask_truncated=False, keep_zero=False)
        write_updates(run.updates_at(step), {(s.group, s.member): [-0.4] * s.length for s in samples})
        file.append(step, {**metrics(step), **signs(made)})
    run.stats.write_text(json.dumps({"steps": steps, "seconds": 12.5}))
    return run


def make_search(folder: Path) -> RunFolder:
    """Write a search of two members, the first of which diverged."""

    def groups(step: int) -> list[Group]:
        return [
            replace(group, example=Example({**group.example, "population_member": name}))
            for name in range(2)
            for group in good_groups(step)
        ]

    def metrics(step: int) -> dict[str, float]:
        own = {
            f"member/{slot}/{name}": 0.5 + slot for slot in range(2) for name in ("reward/mean", "accuracy")
        }
        return {**healthy(step), **own}

    run = make_run(folder, steps=2, groups=groups, metrics=metrics, overrides=["run.kind=evolve", "lora.r=4"])
    member = {"parent": None, "born": 0, "measured": 2, "fitness": None, "trouble": None}
    values = [{"optim.learning_rate": 1e-4}, {"optim.learning_rate": 2e-4}]
    first = {**member, "name": 0, "place": 0, "values": values[0]}
    second = {
        **member,
        "name": 1,
        "place": 1,
        "values": values[1],
        "parent": 0,
        "fitness": [0.625, 0.5, 0.75],
    }
    first["trouble"] = "diverged: the weights contain NaN or inf"
    event = {"step": 2, "name": 1, "what": "changed", "detail": "lr 0.0001 → 0.0002"}
    content = {"steps": 2, "best": second, "members": [first, second], "snapshots": [], "events": [event]}
    (folder / EVOLUTION).write_text(json.dumps(content))
    return run


def write_measured(run: RunFolder, step: int, accuracy: float, *, last: bool) -> None:
    """Write an evaluation of 20 examples of which this share is answered right."""
    right = [int(index < round(20 * accuracy)) for index in range(20)]
    name = "before" if step == 0 else "after" if last else f"step-{step:06d}"
    scores = {
        f"eval/{score}{end}": accuracy + shift
        for score in ("greedy", "avg@4", "pass@4")
        for end, shift in (("", 0.0), ("_low", -0.1), ("_high", 0.1))
    }
    record = {
        "step": step,
        **scores,
        "eval/failed": 0.0,
        "eval/length": 40.0,
        "samples": 4,
        "examples": [f"example {index}" for index in range(20)],
        "greedy_right": right,
        "sampled_right": [4 * one for one in right],
    }
    run.evaluations.mkdir(exist_ok=True)
    (run.evaluations / f"{name}.json").write_text(json.dumps(record))
