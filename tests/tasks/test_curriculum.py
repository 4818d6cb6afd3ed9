"""The curriculum: what it learns of each kind of example, what it chooses, what it counts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, Group, Rollout
from groupwise.tasks import Task
from groupwise.tasks.builtin.boxed_math import math
from groupwise.tasks.builtin.countdown import countdown
from groupwise.tasks.builtin.gsm8k import gsm8k
from groupwise.training import train
from groupwise.training.prompt_selection import check_kinds, choose, kind_of, success, updated
from tests.support.small_runs import LUCK, deterministic_metrics, small_config, task_file

TASK = Task(
    name="q",
    examples=[{"kind": "a"}],
    prompt=lambda row: "?",
    rewards={"right": lambda rollout, example: 0.0},
    difficulty=lambda example: example.get("kind"),
)


def group(kind: str, *rewards: float | None) -> Group:
    rollouts = tuple(
        Rollout(prompt="?", text="", tokens=(1, 2), trained=(False, True), logprobs=(0.0, 0.0),
                entropies=(0.0, 0.0), prompt_length=1, finish="end", rewards={"right": reward or 0.0},
                error="failed" if reward is None else None)
        for reward in rewards
    )  # fmt: skip
    return Group(example=Example({"kind": kind}), rollouts=rollouts)


def test_rates_count_right_answers_and_fade():
    rates = updated({}, [group("a", 1, 0, 0, 0), group("b", 1, 1, None)], task=TASK)
    assert rates == {"a": (4, 1), "b": (2, 2)}
    rates = updated(rates, [group("a", 1, 1, 1, 1)], task=TASK)
    assert rates["a"] == (pytest.approx(0.9 * 4 + 4), pytest.approx(0.9 * 1 + 4))
    assert success(rates, "b") == (2 + 1) / (2 + 2)
    assert success(rates, "never seen") == 0.5


def test_kinds_of_medium_success_are_chosen_far_more_often():
    rates = {"easy": (98.0, 98.0), "medium": (98.0, 49.0), "hard": (98.0, 0.0)}
    candidates = [Example({"kind": kind}) for kind in ("easy", "medium", "hard") for _ in range(4)]
    chosen: Counter[str] = Counter()
    for step in range(50):
        picked = choose(candidates, 4, task=TASK, rates=rates, seed_parts=(0, step))
        assert len(picked) == 4
        chosen.update(example["kind"] for example in picked)
    assert chosen["medium"] > 150
    assert min(chosen["easy"], chosen["hard"]) > 0  # still asked now and then


def test_the_choice_depends_on_the_seed_alone_and_keeps_the_order():
    candidates = [Example({"kind": "a", "n": n}) for n in range(12)]

    def picked(seed: int) -> list[int]:
        return [e["n"] for e in choose(candidates, 5, task=TASK, rates={}, seed_parts=(seed, 1))]

    assert picked(0) == picked(0) == sorted(picked(0))
    assert picked(0) != picked(1)


def test_built_in_tasks_say_how_hard_an_example_is():
    assert kind_of(countdown(), Example({"nums": [1, 2, 3], "target": 6})) == "3 numbers"
    puzzle = {"numbers": [1, 2, 8], "target": 24, "solution": "(1 + 2) * 8"}
    assert kind_of(countdown(), Example(puzzle)) == "3 numbers *+"
    problem = {"question": "?", "answer": "8", "solution": "1 + 3 = 4\n4 * 2 = 8\n#### 8"}
    assert kind_of(gsm8k(), Example(problem)) == "2 steps"
    assert kind_of(math(), Example({"level": 3, "subject": "algebra"})) == "3 algebra"
    row = Example({"question": "?", "answer": "8"})
    assert kind_of(gsm8k(), row) == kind_of(math(), row) == row.fingerprint
    for task in (countdown(), gsm8k(), math()):
        split = task.split(TaskConfig(), seed=0)
        check_kinds(task, split)
        assert len({kind_of(task, split.at(position)) for position in range(200)}) < 20


def test_endless_examples_need_kinds():
    task = replace(countdown(), difficulty=None)
    with pytest.raises(ConfigError, match="does not say how they are alike"):
        check_kinds(task, task.split(TaskConfig(), seed=0))


ON = ("rollout.curriculum=3", "run.max_steps=4")
KINDS = LUCK.replace("perfect=1.0,", "perfect=1.0, difficulty=lambda example: str(example['n'] % 3),")


def test_a_run_counts_what_it_passed_over_and_remembers_each_kind(tmp_path):
    task_file(tmp_path, KINDS)
    run = train(small_config(tmp_path, *ON))
    state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
    assert set(state["rates"]) <= {"0", "1", "2"}
    assert state["cursor"] % 3 == 0
    rows = deterministic_metrics(run)
    assert sum(row["curriculum/passed_over"] for row in rows) == state["cursor"] * 2 / 3
    assert rows[-1]["curriculum/kinds"] == len(state["rates"])
