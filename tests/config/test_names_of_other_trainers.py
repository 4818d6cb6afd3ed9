"""Names that users bring from other trainers, and defaults that depend on the model."""

from __future__ import annotations

import json
import traceback

import pytest

import groupwise as gw
from groupwise.cli import main
from groupwise.config import config_from_keywords, read_config
from groupwise.config.loading import FLAGS, FOREIGN_NAMES, TYPES
from groupwise.errors import ConfigError


def test_every_foreign_name_points_to_a_setting_that_exists():
    assert set(FOREIGN_NAMES.values()) <= TYPES.keys()
    assert FOREIGN_NAMES.keys().isdisjoint(FLAGS)


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [("num_generations", "group_size"), ("lr", "learning_rate"), ("epochs", "num_epochs")],
)
def test_a_keyword_of_another_trainer_is_answered_with_ours(keyword, hint):
    with pytest.raises(ConfigError, match=f"unknown setting {keyword}; did you mean {hint}\\?"):
        config_from_keywords(**{keyword: 4})


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--lr", "--learning-rate"),
        ("--epochs", "--num-epochs"),
        ("--num_generations", "--group-size"),
        ("--eval-steps", "evaluate.every=VALUE"),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_ours(option, hint, capsys):
    assert main(["train", option, "3"]) == 2
    assert f"use {hint}" in capsys.readouterr().err


def test_a_misspelt_keyword_is_not_followed_by_our_own_code():
    with pytest.raises(ConfigError) as caught:
        gw.train("countdown", max_stepz=3)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[1:] == ["train", "prepare", "config_from_keywords"]


def test_steps_and_epochs_cannot_both_be_given():
    with pytest.raises(ConfigError, match="max_steps and num_epochs are mutually exclusive"):
        config_from_keywords(max_steps=3, num_epochs=1)


def test_the_built_in_model_keeps_its_small_defaults():
    config = read_config()
    assert (config.rollout.max_tokens, config.run.max_steps) == (112, 36)


@pytest.mark.parametrize(("task", "tokens"), [("math", 1024), ("gsm8k", 512), ("mine.py", 512)])
def test_other_models_get_room_to_think_and_steps_to_learn(task, tokens):
    config = read_config(overrides=["model.name=owner/model", f"task.name={task}"])
    assert (config.rollout.max_tokens, config.run.max_steps) == (tokens, 100)


def test_what_the_user_sets_is_not_replaced_by_a_default():
    config = read_config(flags={"model": "owner/model", "max_tokens": 77, "max_steps": 5})
    assert (config.rollout.max_tokens, config.run.max_steps) == (77, 5)


def test_a_completion_takes_at_most_half_of_a_short_context(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 300}))
    assert read_config(flags={"model": str(tmp_path)}).rollout.max_tokens == 150


def test_one_weight_is_set_from_the_shell():
    config = read_config(overrides=["task.weights.mrr=0", "task.weights.similarity=1.5"])
    assert config.task.weights == {"mrr": 0, "similarity": 1.5}


@pytest.mark.parametrize("value", ["{mrr: high}", "{mrr: .nan}"])
def test_a_weight_must_be_a_number(value):
    with pytest.raises(ConfigError, match=r"task\.weights"):
        read_config(overrides=[f"task.weights={value}"])


@pytest.mark.parametrize("command", ["train", "evolve"])
def test_train_and_evolve_have_the_same_flags(command, capsys):
    main([command, "--help"])
    shown = capsys.readouterr().out
    for flag in ("--group-size", "--batch-size", "--track", "--project-name", "--learning-rate", "--beta"):
        assert flag in shown
