"""Prompts that leave no room for an answer are left out before training, and counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from groupwise.config import Config, read_config
from groupwise.errors import ConfigError
from groupwise.records import Example
from groupwise.tasks import Task
from groupwise.tracking.rollout_files import read_rollouts
from groupwise.training import train
from groupwise.training.prompt_selection import PromptLimit
from tests.support.small_runs import LUCK, run_command, small_config, task_file

LONG = LUCK.replace("range(24)", "range(40)").replace(
    "f\"{example['n']} + 1\"", "f\"{example['n']} + 1\" + ' ' * (5000 if example['n'] in (7, 13) else 0)"
)


def task_of(*lengths: int) -> Task:
    return Task(
        name="t",
        examples=[{"length": length} for length in lengths],
        prompt=lambda example: "~" * example["length"],
        rewards={"r": lambda rollout, example: 0.0},
    )


def settings(*overrides: str) -> Config:
    return read_config(overrides=["task.held_out=0", "rollout.max_tokens=24", *overrides])


def kept(limit: PromptLimit, task: Task) -> tuple[list[int], int]:
    split, left_out = limit.leave_out(task.split(settings().task, 0))
    assert split.size == len(split.train)  # type: ignore[arg-type]
    return [example["length"] for example in split.train], left_out  # type: ignore[union-attr]


def test_a_long_prompt_among_many_is_left_out_and_the_run_goes_to_its_end(tmp_path):
    task_file(tmp_path, LONG)
    words = [
        "train",
        str(tmp_path / "luck.py"),
        f"run.output_dir={tmp_path}",
        "run.name=run",
        "task.held_out=2",
    ]
    small = (
        *("run.max_steps=5", "track.trackers=[]", "model.device=cpu", "evaluate.samples=1"),
        *("rollout.prompts=8", "rollout.group_size=2", "rollout.max_tokens=4", "rollout.refill=0"),
    )
    ended = run_command(*words, *small)
    assert ended.code == 0, ended.err
    assert "2 examples are left out: their prompts have more than 1020 tokens" in ended.out + ended.err
    paths = sorted((tmp_path / "run" / "rollouts").glob("*.parquet"))
    asked = [row["prompt"] for path in paths for row in read_rollouts(path)]
    assert len(set(asked)) == 36  # of 40, two are held out and two too long
    assert all(len(prompt) < 100 for prompt in asked)


def test_the_limit_is_what_context_and_answer_leave_or_what_the_settings_say(small_policy):
    # The template adds some tokens, each character is one; the model's context is 1,024.
    around = len(small_policy.encode("~" * 10)) - 10
    most = 1024 - 24 - around
    task = task_of(10, most, most + 1)
    assert kept(PromptLimit(settings(), task=task, policy=small_policy), task) == ([10, most], 1)
    shorter = settings(f"task.max_prompt_tokens={around + 10}")
    assert kept(PromptLimit(shorter, task=task, policy=small_policy), task) == ([10], 2)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            (),
            "every prompt has more than 1000 tokens, the most that the model's context of 1024 and "
            "rollout.max_tokens=24 leave: lower rollout.max_tokens, shorten the prompts or use a model with "
            "a longer context",
        ),
        (
            ("task.max_prompt_tokens=9",),
            "every prompt has more than 9 tokens, the most that task.max_prompt_tokens allows: raise it",
        ),
    ],
)
def test_where_every_prompt_is_too_long_the_sentence_names_a_remedy(small_policy, overrides, sentence):
    task = task_of(2000, 3000)
    limit = PromptLimit(settings(*overrides), task=task, policy=small_policy)
    with pytest.raises(ConfigError) as refused:
        limit.leave_out(task.split(settings().task, 0))
    assert str(refused.value) == sentence


class Growing:
    """A stream whose every fifth prompt is too long."""

    def train(self, index: int, *, seed: int) -> Example:
        return Example({"length": 2000 if index % 5 == 4 else 1 + index % 7})

    def held_out(self, count: int) -> Sequence[Example]:
        return [Example({"length": 2000}), Example({"length": 8})]


def test_a_stream_gives_another_example_for_a_long_prompt(small_policy):
    task = Task(
        name="t",
        examples=Growing(),
        prompt=lambda example: "~" * example["length"],
        rewards={"r": lambda rollout, example: 0.0},
    )
    given = task.split(read_config(overrides=["task.held_out=2"]).task, 0)
    split, left_out = PromptLimit(settings(), task=task, policy=small_policy).leave_out(given)
    assert (left_out, [example["length"] for example in split.held_out]) == (1, [8])
    for index in range(30):
        if index % 5 == 4:
            assert split.at(index)["length"] < 8
        else:
            assert split.at(index) == given.at(index)


def test_a_run_without_long_prompts_keeps_its_order(small_policy, tmp_path):
    task = task_of(*range(1, 30))
    given = task.split(settings().task, 3)
    split, left_out = PromptLimit(settings(), task=task, policy=small_policy).leave_out(given)
    assert (left_out, split) == (0, given)


def test_a_run_whose_prompts_are_all_too_long_leaves_no_folder(tmp_path):
    task_file(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.max_prompt_tokens allows: raise it"):
        train(small_config(tmp_path, "task.max_prompt_tokens=2"))
    assert not (tmp_path / "run").exists()
