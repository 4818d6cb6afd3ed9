"""Rollouts that a grammar constrains: the trainer accounts for the masks, and a run learns under them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import groupwise as gw
from groupwise.learner.micro_batch import pack, row_logprobs
from groupwise.model.grammar import GrammarCompiler, json_grammar
from groupwise.model.ops.logits import masked_logits
from groupwise.records import Sample, Sampling
from tests.support.generation import drawn_samples
from tests.support.small_models import policy_of, small_model

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "why": {"enum": ["yes", "no"]}},
    "required": ["n", "why"],
    "additionalProperties": False,
}


def drawn(policy: Any, sampling: Sampling) -> list[Sample]:
    """Return samples whose first token is not trained: a mask depends on it all the same."""

    def without_first(sample: Sample) -> Sample:
        trained = list(sample.trained)
        trained[sample.prefix] = False
        return replace(sample, trained=tuple(trained))

    return [without_first(sample) for sample in drawn_samples(policy, sampling)]


def constrained(model: Any) -> Any:
    policy = policy_of(model)
    policy.grammar = GrammarCompiler(policy, policy.end_tokens).compile(json_grammar(SCHEMA))
    return policy


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=40), Sampling(temperature=0.7, top_p=0.9, max_tokens=40), Sampling(max_tokens=9)],
    ids=["plain", "truncated", "cut off"],
)
def test_the_trained_log_probabilities_account_for_the_masks(sampling):
    policy = constrained(small_model("qwen2"))
    samples = drawn(policy, sampling)
    batch = pack(samples, device=torch.device("cpu"))
    for entropy_gradient in (False, True):
        logprobs_N, entropy_N = row_logprobs(policy, batch, sampling, entropy_gradient=entropy_gradient)
        sampled = [value for one in samples for value in one.logprobs[one.prefix + 1 :]]
        entropies = [value for one in samples for value in one.entropies[one.prefix + 1 :]]
        assert logprobs_N.tolist() == pytest.approx(sampled, abs=2e-5)
        assert entropy_N.tolist() == pytest.approx(entropies, abs=2e-5)
    assert min(sampled) < -0.1  # some tokens were a choice
    assert max(sampled) > -1e-6  # some were forced


@pytest.mark.parametrize("frozen_head", [False, True])
def test_the_gradient_is_that_of_the_masked_distribution(frozen_head):
    plain = small_model("qwen2")
    policy = constrained(copy.deepcopy(plain))
    if frozen_head:
        policy.head_weight.requires_grad_(False)
        plain.get_output_embeddings().weight.requires_grad_(False)
    sampling = Sampling(max_tokens=40)
    samples = drawn(policy, sampling)
    batch = pack(samples, device=torch.device("cpu"))
    logprobs_N, entropy_N = row_logprobs(policy, batch, sampling, entropy_gradient=not frozen_head)
    (logprobs_N.sum() + (0.0 if frozen_head else entropy_N.sum())).backward()
    naive = torch.zeros(())
    for sample in samples:
        own = sample.tokens[sample.prefix :]
        logits_TV = plain(input_ids=torch.tensor([sample.tokens])).logits[0, sample.prefix - 1 : -1]
        masks_TW = torch.from_numpy(policy.grammar.masks([own]))
        logprobs_TV = masked_logits(logits_TV, masks_TW).log_softmax(-1)[1:]
        naive = naive + logprobs_TV.gather(1, torch.tensor(own)[1:, None]).sum()
        if not frozen_head:
            finite_TV = logprobs_TV.masked_fill(logprobs_TV.isinf(), 0.0)
            naive = naive - (finite_TV.exp() * finite_TV * ~logprobs_TV.isinf()).sum()
    naive.backward()
    name = "model.layers.0.mlp.up_proj.weight"
    got, wanted = dict(policy.model.named_parameters())[name].grad, dict(plain.named_parameters())[name].grad
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def refused(rollout: gw.Rollout, example: gw.Example) -> float:
    """Says nothing about the format. An answer that was cut off is not right."""
    return float(rollout.text.endswith('"no"}'))


SETTINGS: dict[str, Any] = {
    "batch_size": 4, "group_size": 16, "max_tokens": 40, "no_trackio": True, "skip_evaluation": True,
    "model": {"device": "cpu"}, "track": {"report": False}, "temperature": 1.0,
}  # fmt: skip


def test_a_json_task_without_format_rewards_trains(tmp_path):
    rows = [{"prompt": f"Choose a number ({n})."} for n in range(40)]
    task = gw.Task(name="numbers", examples=rows, rewards={"refused": refused})
    result = gw.train(
        task,
        max_steps=4,
        output_dir=tmp_path,
        rollout={"json_schema": json.dumps(SCHEMA), "refill": 0},
        learning_rate=2e-3,
        **SETTINGS,
    )
    rollouts = result.rollouts()
    assert len(rollouts) == 4 * 64
    for text, finish in zip(rollouts["text"], rollouts["finish"], strict=True):
        if finish == "end":
            value = json.loads(text)
            assert list(value) == ["n", "why"]
            assert value["n"] in range(10)
        else:
            assert finish == "length"
    metrics = result.metrics
    assert metrics["policy/gap"].dropna().max() < 1e-4
    reward = metrics["reward/mean"].dropna().tolist()
    assert reward[-1] > reward[0] + 0.3
    assert json.loads(result.generate("Choose a number."))["n"] in range(10)


@pytest.mark.parametrize(
    ("rollout", "sentence"),
    [
        ({"json_schema": "{}", "grammar": "start: x"}, "exclude each other; set one of them"),
        ({"json_schema": "nowhere.json"}, "must be a file, or a text that begins with {; got 'nowhere.json'"),
        ({"json_schema": "{not json"}, "rollout.json_schema is not a JSON schema: "),
        (
            {"json_schema": '{"not": {}}'},
            "rollout.json_schema: the schema or grammar is not supported: Unimple",
        ),
        ({"grammar": "start: missing"}, "rollout.grammar: the schema or grammar is not supported: "),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, rollout, sentence):
    with pytest.raises(gw.ConfigError) as caught:
        gw.train("countdown", max_steps=1, output_dir=tmp_path, rollout=rollout, **SETTINGS)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_turns_and_servers_are_refused(tmp_path):
    settings = {**SETTINGS, "output_dir": tmp_path, "rollout": {"json_schema": "{}"}}
    with pytest.raises(gw.ConfigError, match="requires a task of one turn"):
        gw.train("search_qa", max_steps=1, **settings)
    with pytest.raises(gw.ConfigError, match="requires groupwise's own engine"):
        gw.train("countdown", max_steps=1, engine={"kind": "vllm"}, **settings)
