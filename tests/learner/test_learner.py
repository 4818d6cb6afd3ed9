"""The learner around the gradient: schedule, clipping, splitting, and what it reports."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from groupwise.config.schema import AlgoConfig, OptimConfig
from groupwise.errors import ConfigError
from groupwise.learner.learner import Learner, learning_rate, split_groups
from groupwise.learner.micro_batch import (
    default_micro_batch_tokens,
    pack,
    pass_tokens,
    row_logprobs,
)
from groupwise.model.ops.checkpointing import recompute_layers
from groupwise.model.policy import Policy
from groupwise.records import Sample, Sampling
from tests.support.small_models import policy_of, small_model, tiny_tokenizer


def sample(*reply: int, group: int = 0, advantage: float = 1.0) -> Sample:
    size = len(reply)
    return Sample(
        tokens=(5, 6, *reply),
        trained=(False, False) + (True,) * size,
        logprobs=(0.0, 0.0) + (-5.0,) * size,
        entropies=(0.0,) * (size + 2),
        advantages=(0.0, 0.0) + (advantage,) * size,
        prefix=2,
        group=group,
    )


def learner(policy: Policy | None = None, *, algo: Any = None, **optim: Any) -> Learner:
    return Learner(
        policy or policy_of(small_model()),
        algo=algo or AlgoConfig(max_gap=100.0),
        optim=OptimConfig(**{"learning_rate": 1e-3, **optim}),
        sampling=Sampling(max_tokens=8),
        max_steps=5,
    )


@pytest.mark.parametrize(
    ("kind", "update", "expected"),
    [
        ("constant", 0, 0.25),  # warm-up of 4: the first step already learns
        ("constant", 3, 1.0),
        ("constant", 9, 1.0),
        ("linear", 1, 0.5),
        ("linear", 4, 1.0),  # the first step after warm-up is at the peak
        ("linear", 8, 0.5),  # 4 of the 8 steps behind warm-up are done
        ("linear", 11, 0.125),  # the last of 12 steps still learns
        ("linear", 12, 0.0),
        ("linear", 100, 0.0),  # a run that goes on beyond its plan
        ("cosine", 4, 1.0),
        ("cosine", 6, 0.8535534),  # (1 + cos(pi / 4)) / 2
        ("cosine", 8, 0.5),
        ("cosine", 12, 0.0),
    ],
)
def test_the_learning_rate_of_a_step(kind: str, update: int, expected: float) -> None:
    rate = learning_rate(update, peak=1.0, kind=kind, warmup=4, total=12)
    assert rate == pytest.approx(expected, abs=1e-7)


def test_a_warm_up_as_long_as_the_run_has_no_step_behind_it() -> None:
    rates = [learning_rate(u, peak=1.0, kind="cosine", warmup=2, total=2) for u in range(3)]
    assert rates == [0.5, 1.0, 1.0]


def test_the_schedule_counts_optimizer_steps_not_training_steps() -> None:
    trained = learner(schedule="linear", epochs=2, minibatches=2)
    assert trained.total_updates == 5 * 4
    used: list[float] = []
    trained.optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    samples = [sample(7, 8, group=0), sample(9, 2, group=1, advantage=-1.0)]
    report = trained.update(samples, sequences=2, tokens=4)
    assert used == pytest.approx([1e-3 * (1 - u / 20) for u in range(4)])
    assert trained.updates == report["policy/updates"] == 4
    assert report["optim/learning_rate"] == used[-1]


def test_fewer_groups_than_minibatches_make_fewer_optimizer_steps() -> None:
    trained = learner(minibatches=4)
    report = trained.update([sample(7, 8), sample(9)], sequences=2, tokens=3)
    assert report["policy/updates"] == trained.updates == 1


def test_a_batch_without_samples_changes_nothing() -> None:
    trained = learner()
    before = [p.clone() for p in trained.policy.model.parameters()]
    assert trained.update([], sequences=4, tokens=40) == {"policy/updates": 0.0}
    assert trained.updates == 0
    assert all(map(torch.equal, before, trained.policy.model.parameters()))


def test_the_report_is_worked_out_by_hand() -> None:
    trained = learner(algo=AlgoConfig(max_gap=100.0, loss="dapo", correction="none"), max_grad_norm=0.0)
    report = trained.update([sample(7, 8), sample(9, advantage=-2.0)], sequences=4, tokens=10)
    # On-policy each ratio is 1; three tokens of the batch's ten have advantages 1, 1 and -2.
    assert report["policy/loss"] == pytest.approx(-(1 + 1 - 2) / 10, abs=1e-7)
    assert report["policy/ratio"] == pytest.approx(1.0)
    assert report["policy/clip_high"] == report["policy/kl_old"] == 0.0
    assert 0 < report["policy/entropy"] < 5.61  # log 272
    assert report["policy/gap"] > 0
    assert report["policy/grad_norm"] > 0


@pytest.mark.parametrize("limit", [0.0, 1e-3])
def test_clipping_bounds_the_norm_that_the_optimizer_sees(limit: float) -> None:
    trained = learner(max_grad_norm=limit)
    seen: list[float] = []

    def remember(*_: Any) -> None:
        grads = [p.grad.norm() for p in trained.policy.model.parameters()]
        seen.append(float(torch.stack(grads).norm()))

    trained.optimizer.register_step_pre_hook(remember)
    report = trained.update([sample(7, 8), sample(9, 2, advantage=-1.0)], sequences=2, tokens=4)
    assert report["policy/grad_norm"] > 1e-3
    assert seen == pytest.approx([limit or report["policy/grad_norm"]], rel=1e-3)


def test_no_gradient_is_left_behind() -> None:
    trained = learner()
    trained.update([sample(7, 8), sample(9, advantage=-1.0)], sequences=2, tokens=3)
    assert all(p.grad is None for p in trained.policy.model.parameters())


def test_a_reward_raises_the_log_prob_of_its_answer() -> None:
    trained = learner()
    good, bad = sample(7, 8, 2), sample(9, 10, 2, advantage=-1.0)

    def logprob(of: Sample) -> float:
        """By the model's own attention."""
        plain = copy.deepcopy(trained.policy.model).eval()
        plain.set_attn_implementation("sdpa")
        with torch.no_grad():
            rows = plain(torch.tensor([of.tokens])).logits[0].log_softmax(-1)
        return sum(float(rows[t - 1, of.tokens[t]]) for t in range(2, len(of.tokens)))

    before = logprob(good), logprob(bad)
    for _ in range(3):
        trained.update([good, bad], sequences=2, tokens=6)
    assert logprob(good) > before[0]
    assert logprob(bad) < before[1]


def test_groups_are_dealt_whole_and_in_order() -> None:
    samples = [sample(7, group=g) for g in (3, 1, 3, 2, 1, 0)]
    split = split_groups(samples, 2)
    assert [[s.group for s in part] for part in split] == [[3, 3, 1, 1], [2, 0]]
    assert split_groups(samples, 1) == [[s for g in (3, 1, 2, 0) for s in samples if s.group == g]]


def test_dropout_is_kept_out_of_what_the_policy_was() -> None:
    model = small_model()
    policy_of(model)
    config = peft.LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    policy = Policy(adapted, tiny_tokenizer())
    assert policy.noisy
    trained = learner(policy)
    samples = [sample(7, 8), sample(9, 10, advantage=-1.0)]
    policy.model.eval()
    row = pack(samples, device=policy.device)
    exact = row_logprobs(policy, row, trained.sampling, entropy_gradient=False)[0].tolist()
    samples = [replace(s, logprobs=(0.0, 0.0, *exact[2 * i : 2 * i + 2])) for i, s in enumerate(samples)]
    report = trained.update(samples, sequences=2, tokens=4)
    assert report["policy/gap"] < 1e-5  # the sampler's and the trainer's policy, both without dropout
    assert report["policy/kl_old"] > 1e-3  # the pass that learns has it


def test_a_pass_is_as_large_as_the_activations_of_the_model_allow() -> None:
    # Two layers, each ten vectors of 32 and four of 48, four bytes a number.
    policy = policy_of(small_model())
    assert policy.activation_bytes == 2 * (10 * 32 + 4 * 48) * 4
    assert default_micro_batch_tokens(policy) == 4096
    policy.model.config.intermediate_size = 1 << 18  # 4 × 2¹⁸ × 4 bytes in each of two layers, about 8 MB
    assert default_micro_batch_tokens(policy) == 1024
    policy.model.config.intermediate_size = 1 << 16
    assert default_micro_batch_tokens(policy) == (4 << 30) // (2 * (10 * 32 + 4 * (1 << 16)) * 4)


def test_with_gradient_checkpointing_only_one_layer_keeps_everything() -> None:
    policy = policy_of(small_model())
    recompute_layers(policy)
    assert policy.activation_bytes == (10 * 32 + 4 * 48 + 2 * 32) * 4


def test_memory_that_runs_out_halves_the_passes_and_leaves_the_gradient_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [sample(*range(7, 11 + n), group=n // 3, advantage=1.0 - n % 3) for n in range(6)]
    policies = [policy_of(small_model()) for _ in range(2)]
    # A large eps makes AdamW's step proportional to the gradient, rather than to its sign.
    whole, cramped = (learner(policy, epochs=2, eps=1.0) for policy in policies)
    computed: list[int] = []  # tokens of every forward pass
    passes: list[int] = []  # of those with a gradient
    hidden, gradient = policies[1].hidden, policies[1].backward

    def forward(tokens_T: Tensor, *args: Any, **settings: Any) -> Tensor:
        computed.append(len(tokens_T))
        return hidden(tokens_T, *args, **settings)

    def backward(loss: Tensor) -> None:
        passes.append(computed[-1])
        gradient(loss)  # the gradient is there already when memory runs out
        if passes[-1] > 16:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(policies[1], "hidden", forward)
    monkeypatch.setattr(policies[1], "backward", backward)
    reports = [one.update(samples, sequences=6, tokens=39) for one in (whole, cramped)]
    assert max(passes[-4:]) <= 16 < passes[0]
    assert "(same gradient)" in caplog.text
    assert reports[0]["policy/grad_norm"] == pytest.approx(reports[1]["policy/grad_norm"], rel=1e-5)
    for one, other in zip(*(policy.trainable().values() for policy in policies), strict=True):
        torch.testing.assert_close(one, other)


def test_one_answer_too_long_for_the_memory_is_the_users_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(self: Policy, loss: Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Policy, "backward", backward)
    with pytest.raises(ConfigError, match="a single completion does not fit in memory"):
        learner().update([sample(7, 8), sample(9, 2)], sequences=2, tokens=4)


def test_a_pass_takes_a_quarter_of_a_gpu_but_not_more_tokens_than_pay() -> None:
    gib = 1 << 30
    assert pass_tokens(gpu_memory=24 * gib, token_bytes=1 << 20, recomputes=False) == 6144
    assert pass_tokens(gpu_memory=24 * gib, token_bytes=1 << 15, recomputes=False) == 49152
    assert pass_tokens(gpu_memory=24 * gib, token_bytes=1 << 15, recomputes=True) == 8192
    assert pass_tokens(gpu_memory=24 * gib, token_bytes=1 << 24, recomputes=False) == 1024
    assert pass_tokens(gpu_memory=None, token_bytes=1 << 21, recomputes=False) == 2048
    assert pass_tokens(gpu_memory=None, token_bytes=1 << 12, recomputes=False) == 4096


@pytest.mark.parametrize(
    ("part", "settings", "sentence"),
    [
        ("hidden", {"epochs": 2}, "while computing old, .* lower optim.micro_batch_tokens"),
        ("step", {}, "while making an optimizer step; set optim.kind=adamw8bit"),
    ],
)
def test_memory_that_runs_out_elsewhere_is_a_sentence(
    part: str, settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(**settings)

    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(one.policy if part == "hidden" else one.optimizer, part, fail)
    with pytest.raises(ConfigError, match=sentence):
        one.update([sample(7, 8, advantage=1.0), sample(9, 2)], sequences=2, tokens=4)
