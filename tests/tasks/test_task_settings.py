"""Settings that change a task: reward weights, the threshold of accuracy, test sets; and the task tldr."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import groupwise as gw
from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, Rollout
from groupwise.tasks import load_task, with_data
from groupwise.tasks.task import correct_rule


def small_task(**more) -> gw.Task:
    return gw.Task(
        name="small",
        examples=[{"n": n} for n in range(10)],
        prompt=lambda example: f"n = {example['n']}",
        rewards={"close": lambda rollout, example: 0.5, "short": lambda rollout, example: 1.0},
        **more,
    )


def rollout(text: str, **rewards: float) -> Rollout:
    return Rollout(
        prompt="?",
        tokens=(1, 2),
        prompt_length=1,
        trained=(False, True),
        logprobs=(0.0, 0.0),
        entropies=(0.0, 0.0),
        text=text,
        finish="stop",
        rewards=rewards,
    )


def test_weights_of_a_built_in_task_are_settings():
    task = load_task(TaskConfig(name="search_qa", weights={"mrr": 0, "format": 1}))
    assert dict(task.weights) == {"mrr": 0, "format": 1}


def test_a_weight_for_a_reward_that_the_task_lacks_is_refused_with_the_closest():
    with pytest.raises(ConfigError, match="search_qa has no reward 'mr'; did you mean 'mrr'"):
        load_task(TaskConfig(name="search_qa", weights={"mr": 0}))


def test_the_task_says_what_counts_as_correct():
    half = rollout("x", close=0.5)
    assert not small_task().is_right(half)
    assert small_task(correct_at=0.5).is_right(half)
    assert correct_rule(small_task(correct_at=0.5)) == "the reward close is at least 0.5"


def test_a_setting_overrides_what_counts_as_correct():
    assert with_data(small_task(), TaskConfig(correct_at=0.4)).correct_at == 0.4


def test_an_answer_without_the_reward_is_never_correct():
    assert not small_task(correct_at=-1).is_right(rollout("x"))


def test_rows_of_a_test_set_are_not_trained_on(tmp_path):
    path = tmp_path / "hard.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in (3, 4)))
    task = with_data(small_task(), TaskConfig(test_sets={"hard": str(path)}))
    assert [row["n"] for row in task.test_sets["hard"]] == [3, 4]
    split = task.split(TaskConfig(held_out=0), 0)
    assert {row["n"] for row in split.train} == {0, 1, 2, 5, 6, 7, 8, 9}


def test_the_repr_of_a_task_is_one_short_line():
    assert repr(small_task()) == "<Task small: 10 examples, rewards close, short>"
    assert repr(load_task(TaskConfig(name="search_qa"))).endswith("tools search>")


def test_tldr_pays_for_likeness_and_charges_for_words():
    task = load_task(TaskConfig(name="tldr"))
    example = Example({"text": "…", "answer": "The cat sat."})
    thirty = "I think.\n</think>\nThe cat sat." + " on" * 27
    rewards = {name: reward(rollout(thirty), example) for name, reward in task.rewards.items()}
    assert rewards["length"] == -1.5  # 30 words / 20
    assert rewards["similarity"] == pytest.approx(2 * 3 / (30 + 3))  # F1: 3 shared, of 30 and 3
    assert task.rewards["length"](rollout("The cat sat."), example) == -100
    assert dict(task.weights) == {"similarity": 4, "length": 1}


def test_tldr_gives_its_own_answers_the_best_similarity():
    task = load_task(TaskConfig(name="tldr"))
    split = task.split(TaskConfig(held_out=4), 0)
    for example in (*split.held_out, split.at(0)):
        made = replace(rollout(""), text=task.gold(example))
        assert task.rewards["similarity"](made, example) == 1.0
    trained = {split.at(position)["answer"] for position in range(40)}
    assert trained.isdisjoint(example["answer"] for example in split.held_out)


def test_tldr_reads_prompt_and_completion_columns(tmp_path):
    path = tmp_path / "posts.jsonl"
    path.write_text(json.dumps({"prompt": "A long post.", "completion": "Short."}) + "\n")
    task = load_task(TaskConfig(name="tldr", data=str(path)))
    assert (task.examples[0]["text"], task.examples[0]["answer"]) == ("A long post.", "Short.")


def test_an_unknown_embedding_says_what_to_install():
    with pytest.raises(ConfigError, match="pip install"):
        load_task(TaskConfig(name="tldr", options={"embedding": "minilm-of-nobody"}))
