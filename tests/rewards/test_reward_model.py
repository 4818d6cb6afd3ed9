"""Reward models by name: batches score as answers do one by one; in a run, by a setting, and refused."""

from __future__ import annotations

import json

import pytest
import torch

import groupwise as gw
from groupwise.commands.eval import evaluate_command
from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError, RolloutError
from groupwise.model.load import load_reward_models
from groupwise.model.resolve import model_folder
from groupwise.records import Example, Group
from groupwise.rewards.runner import RewardContext, score_group
from groupwise.rewards.score_ahead import score_ahead
from groupwise.tasks import load_task
from tests.support.scripted_rollouts import answered
from tests.support.small_runs import SMALL, deterministic_metrics, run_command

CPU = torch.device("cpu")


def save_classifier(folder, *, labels: int = 1, chat: bool = False) -> str:
    """Save a random sequence-classification model with the tokenizer of the built-in model."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(str(model_folder("tiny")))
    if not chat:
        tokenizer.chat_template = None
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> str:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


def test_a_batch_scores_as_its_answers_do_one_by_one(classifier):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    reward = gw.rewards.reward_model(classifier, batch_tokens=100)
    with pytest.raises(RolloutError, match="is not loaded: use it in train, eval or evolve"):
        reward(answered("a"), Example({"n": 1}))
    load_reward_models({"model": reward}, CPU)
    texts = ["yes", "a much longer answer, which is padded less", "", "no " * 30, "12"]
    groups = [
        Group(example=Example({"n": n}), rollouts=tuple(map(answered, part)))
        for n, part in enumerate((texts[:3], texts[3:]))
    ]
    together = [score for scores in reward.score_batch(groups, concurrency=1) for score in scores]
    alone = [reward(answered(text), Example({"n": 1})) for text in texts]
    assert together == pytest.approx(alone, abs=1e-6)
    assert len(set(together)) == 5
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    ids = tokenizer("?\nyes", return_tensors="pt")["input_ids"]
    assert alone[0] == pytest.approx(model(input_ids=ids).logits[0, 0].item(), abs=1e-6)


def test_the_last_token_counts_even_if_it_is_the_padding_token(classifier):
    reward = gw.rewards.reward_model(classifier)
    load_reward_models({"model": reward}, CPU)
    scorer = reward.scorer
    scorer.tokenizer.pad_token = scorer.tokenizer.decode([65])
    rows = [[70, 65], [70, 71, 72, 65, 65]]
    assert scorer.padding(rows) not in {65, 70, 71, 72}
    scorer.tokens = lambda prompt, completion: completion
    together = scorer([("", rows[0]), ("", rows[1])])
    assert together == pytest.approx([scorer([("", row)])[0] for row in rows], abs=1e-6)


def test_conversations_use_the_chat_template_and_the_end_of_long_ones_counts(tmp_path):
    name = save_classifier(tmp_path / "chat", chat=True)
    reward = gw.rewards.reward_model(name, max_tokens=12)
    load_reward_models({"model": reward}, CPU)
    chat = [{"role": "user", "content": "What?"}]
    assert reward.scorer.tokenizer.chat_template
    short = reward.scorer.tokens(chat, [{"role": "assistant", "content": "x"}])
    long = reward.scorer.tokens(chat, [{"role": "assistant", "content": "abc " * 50}])
    assert len(long) == 12
    assert long[-1] == short[-1]
    assert reward(answered("x", chat), Example({"n": 1})) == pytest.approx(
        reward.scorer([(chat, [{"role": "assistant", "content": "x"}])])[0]
    )


def test_a_step_scores_all_groups_in_one_call(classifier, monkeypatch):
    reward = gw.rewards.reward_model(classifier)
    load_reward_models({"model": reward}, CPU)
    calls: list[int] = []
    scorer = reward.scorer
    monkeypatch.setattr(reward, "scorer", lambda rows: calls.append(len(rows)) or scorer(rows))
    groups = [Group(example=Example({"n": n}), rollouts=(answered("a"), answered("b"))) for n in range(3)]
    context = RewardContext()
    score_ahead(groups, rewards={"model": reward}, seconds=5, concurrency=4, context=context)
    assert calls == [6]
    assert len(context.ready) == 6
    (one, two) = score_group(groups[0], rewards={"model": reward}, weights={}, seconds=5).rollouts
    ahead = [context.ready["model", id(r)] for r in groups[0].rollouts]
    # Batches of other sizes round otherwise.
    assert [one.reward, two.reward] == pytest.approx(ahead, rel=1e-5)


def test_a_run_and_its_evaluation_use_the_model_that_a_setting_names(classifier, tmp_path):
    place = (f"run.output_dir={tmp_path}", "run.name=run", "task.held_out=2", "run.max_steps=1")
    named = (f"task.reward_model={classifier}", "task.weights={reward_model: 0.5}")
    ended = run_command("train", "countdown", *SMALL, *place, *named)
    assert ended.code == 0, ended.err
    assert "reward/reward_model/mean" in deterministic_metrics(tmp_path / "run")[0]
    report = evaluate_command(str(tmp_path / "run"))[0]
    assert report["failed"] == 0
    assert report["rewards"]["reward_model"]["mean"] != 0
    assert json.loads((tmp_path / "run/eval/after.json").read_text())["rewards"]["reward_model"]


def test_the_accuracy_stays_that_of_the_task(classifier):
    task = load_task(TaskConfig(name="countdown", reward_model=classifier))
    assert (task.accuracy_reward, list(task.rewards)) == ("equation", ["format", "equation", "reward_model"])


def test_a_model_that_cannot_score_is_refused(tmp_path):
    name = save_classifier(tmp_path / "three", labels=3)
    with pytest.raises(ConfigError, match="has 3 outputs; use one with 1"):
        load_reward_models({"model": gw.rewards.reward_model(name)}, CPU)
    with pytest.raises(ConfigError):
        load_reward_models({"model": gw.rewards.reward_model(str(tmp_path / "none"))}, CPU)
