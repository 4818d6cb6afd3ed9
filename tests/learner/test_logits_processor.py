"""A sampling rule of the user: the sampler and the trainer agree on it to rounding."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

import groupwise as gw
from groupwise.learner.micro_batch import pack, row_logprobs
from groupwise.model.ops.logits import LogitsProcessor
from groupwise.records import Sampling
from tests.support.generation import drawn_samples
from tests.support.small_models import policy_of, small_model

SAMPLING = Sampling(temperature=0.7, top_p=0.95, max_tokens=8)


def rule(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """No token twice in a row, every third id is favoured, and none above 200."""
    logits[tokens[-1]] = float("-inf")
    logits[201:] = float("-inf")
    logits[::3] += 0.01 * len(tokens)
    return 1.5 * logits


def test_the_trained_log_probabilities_account_for_the_rule_of_the_sampler():
    policy = policy_of(small_model("qwen2"))
    policy.logits_processor = LogitsProcessor("rule", rule)
    samples = drawn_samples(policy, SAMPLING)
    for sample in samples:
        own = sample.tokens[sample.prefix - 1 :]
        assert all(first != second for first, second in pairwise(own))
        assert max(own) <= 200
    batch = pack(samples, device=torch.device("cpu"))
    logprobs_N, entropy_N = row_logprobs(policy, batch, SAMPLING, entropy_gradient=False)
    sampled = [value for one in samples for value in one.logprobs[one.prefix :]]
    entropies = [value for one in samples for value in one.entropies[one.prefix :]]
    assert logprobs_N.tolist() == pytest.approx(sampled, abs=2e-5)
    assert entropy_N.tolist() == pytest.approx(entropies, abs=2e-5)


def test_the_gradient_goes_through_the_rule():
    plain = small_model("qwen2")
    policy = policy_of(copy.deepcopy(plain))
    policy.logits_processor = LogitsProcessor("rule", rule)
    samples = drawn_samples(policy, SAMPLING)
    logprobs_N, _ = row_logprobs(
        policy, pack(samples, device=torch.device("cpu")), Sampling(), entropy_gradient=False
    )
    logprobs_N.sum().backward()
    naive = torch.zeros(())
    for sample in samples:
        logits_TV = plain(input_ids=torch.tensor([sample.tokens])).logits[0]
        for place in range(sample.prefix, len(sample.tokens)):
            row_V = rule(list(sample.tokens[:place]), logits_TV[place - 1].clone())
            naive = naive + row_V.log_softmax(-1)[sample.tokens[place]]
    naive.backward()
    head, wanted = policy.head_weight.grad, plain.get_output_embeddings().weight.grad
    torch.testing.assert_close(head, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda tokens, logits: logits[:3], "must return logits of shape (5,); got (3,)"),
        (lambda tokens, logits: 0.0, "must return logits of shape (5,); got float"),
        (
            lambda tokens, logits: logits * float("nan"),
            "returned NaN, or excluded every token, after 2 tokens",
        ),
        (
            lambda tokens, logits: logits - float("inf"),
            "returned NaN, or excluded every token, after 2 tokens",
        ),
        (lambda tokens, logits: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_mistake_in_a_rule_is_one_sentence_that_names_it(wrong, sentence):
    with pytest.raises(gw.ConfigError) as caught:
        LogitsProcessor("mine", wrong)([[1, 2]], torch.zeros(1, 5))
    assert str(caught.value) == f"rollout.logits_processor mine {sentence}"


def test_of_several_rows_the_sentence_names_the_wrong_one():
    def wrong(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits - float("inf") if len(tokens) == 3 else logits

    with pytest.raises(gw.ConfigError, match="excluded every token, after 3 tokens"):
        LogitsProcessor("mine", wrong)([[1], [1, 2, 3], [1, 2]], torch.zeros(3, 5))


def no_digit_seven(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[SEVENS] = float("-inf")
    return logits


SEVENS: list[int] = []


def test_a_run_samples_and_trains_by_the_rule(tmp_path):
    settings: dict[str, Any] = {
        "max_steps": 2, "batch_size": 2, "group_size": 6, "max_tokens": 40, "no_trackio": True,
        "skip_evaluation": True, "model": {"device": "cpu"}, "track": {"report": False},
        "output_dir": tmp_path,
    }  # fmt: skip
    probe = gw.train("countdown", run_name="probe", **{**settings, "max_steps": 1})
    SEVENS[:] = [t for t in range(probe.policy.head_weight.shape[0]) if "7" in probe.policy.decode([t])]
    assert any("7" in text for text in probe.rollouts()["text"])
    result = gw.train("countdown", logits_processor=no_digit_seven, run_name="run", **settings)
    assert not any("7" in text for text in result.rollouts()["text"])
    assert result.metrics["policy/gap"].dropna().max() < 1e-4
    question = "Numbers: 7, 7, 77. Target: 7."
    assert "7" in "".join(probe.generate([question], samples=8, temperature=1.0)[0])
    for opened in (result, gw.RunResult(result.folder)):  # the second imports the rule by its name
        assert "7" not in "".join(opened.generate([question], samples=8, temperature=1.0)[0])
    nameless = gw.train("countdown", logits_processor=lambda *given: no_digit_seven(*given), **settings)
    assert "7" not in "".join(nameless.generate([question], samples=8, temperature=1.0)[0])
    with pytest.raises(gw.ConfigError, match=r"open the run with RunResult\(folder, logits_processor=…\)"):
        gw.RunResult(nameless.folder).generate(question)
    with pytest.raises(gw.ConfigError, match=r"requires groupwise's own engine; set engine\.kind=own"):
        gw.train("countdown", logits_processor=no_digit_seven, engine={"kind": "vllm"}, **settings)
