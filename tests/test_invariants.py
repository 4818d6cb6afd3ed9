"""Each promise of a run is broken on purpose, where a real bug would break it, and the run stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.algo.samples import rollout_samples
from groupwise.config.schema import (
    AlgoConfig,
    Config,
    EngineConfig,
    EvaluateConfig,
    OptimConfig,
    RolloutConfig,
)
from groupwise.engine.engine import Engine
from groupwise.errors import InvariantError
from groupwise.invariants import check_finite, check_gap, check_token_exact
from groupwise.learner import micro_batch as part_module
from groupwise.learner.learner import Learner
from groupwise.learner.micro_batch import MicroBatch, pack
from groupwise.model.policy import Policy
from groupwise.records import Completion, Example, Request, Rollout, Sample, Sampling
from groupwise.rollout import collect as collect_module
from groupwise.rollout.collect import collect
from groupwise.tasks import Split, Task
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.collector import Collector
from groupwise.training.evaluator import Evaluator
from groupwise.training.loop import collect_batch
from tests.support.small_models import policy_of, small_model

SAMPLING = Sampling(temperature=1.0, max_tokens=12)
EXAMPLES = [Example({"question": "1 + 1"}), Example({"question": "2 + 3"})]


@pytest.fixture
def policy() -> Policy:
    return policy_of(small_model())


def rollouts(policy: Policy, sampling: Sampling = SAMPLING) -> list[Rollout]:
    """Really generated, two groups of two."""
    groups = collect(
        EXAMPLES,
        ask=lambda example: str(example["question"]),
        codec=policy,
        engine=Engine(policy, EngineConfig()),
        sampling=sampling,
        group_size=2,
        seed_parts=(0,),
    )
    return [rollout for group in groups for rollout in group.rollouts]


def samples(policy: Policy, sampling: Sampling = SAMPLING) -> list[Sample]:
    drawn = rollouts(policy, sampling)
    signs = (1.0, -1.0, 1.0, -1.0)
    return [
        next(rollout_samples(replace(r, advantage=a), group=i // 2))
        for i, (r, a) in enumerate(zip(drawn, signs, strict=True))
    ]


def learner(policy: Policy, sampling: Sampling = SAMPLING) -> Learner:
    optim = OptimConfig(learning_rate=1e-3)
    return Learner(policy, algo=AlgoConfig(), optim=optim, sampling=sampling, max_steps=3)


def update(trained: Learner, batch: Sequence[Sample]) -> dict[str, float]:
    return trained.update(batch, sequences=len(batch), tokens=sum(sample.length for sample in batch))


# Sampler and trainer agree.


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, temperature=0.7, top_p=0.9, top_k=50)])
def test_a_sound_trainer_agrees_with_the_sampler_to_rounding(policy: Policy, sampling: Sampling) -> None:
    report = update(learner(policy, sampling), samples(policy, sampling))
    assert report["policy/gap"] < 1e-5
    assert report["policy/gap_max"] < 1e-4


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}], ids=["temperature", "top_k", "top_p"]
)
def test_a_trainer_with_another_distribution_stops_the_run(policy: Policy, wrong: dict[str, Any]) -> None:
    trained = learner(policy, replace(SAMPLING, **wrong))
    with pytest.raises(InvariantError, match="sampler and trainer log-probs differ by"):
        update(trained, samples(policy))
    assert trained.updates == 0


def test_weights_that_generation_did_not_see_stop_the_run(policy: Policy) -> None:
    batch = samples(policy)
    with torch.no_grad():
        policy.head_weight.mul_(0.8)
    with pytest.raises(InvariantError, match="dtype and weight sync"):
        update(learner(policy), batch)


def test_wrong_positions_in_the_trainer_stop_the_run(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(batch: Sequence[Sample], *, device: torch.device) -> MicroBatch:
        packed = pack(batch, device=device)
        return replace(packed, positions_T=packed.positions_T * 2)

    monkeypatch.setattr(part_module, "pack", shifted)
    with pytest.raises(InvariantError, match="check positions"):
        update(learner(policy), samples(policy))


def test_a_gap_that_is_not_a_number_is_not_within_the_limit() -> None:
    check_gap(0.05, limit=0.05)
    with pytest.raises(InvariantError, match="differ by nan"):
        check_gap(float("nan"), limit=0.05)


# What is trained is what was sampled.


def shift_mask(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "trained": (*fields["trained"][1:], False)}


def train_the_prompt(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "trained": (True,) * len(fields["trained"])}


def forget_the_end(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "trained": (*fields["trained"][:-1], False)}


def encode_again(fields: dict[str, Any]) -> dict[str, Any]:
    """As if the text had been tokenized anew, in which two tokens become one."""
    cut = {
        name: (*fields[name][:-2], fields[name][-1])
        for name in ("tokens", "trained", "logprobs", "entropies")
    }
    return {**fields, **cut}


@pytest.mark.parametrize("bug", [shift_mask, train_the_prompt, forget_the_end, encode_again])
def test_a_rollout_that_trains_other_tokens_than_were_sampled_stops_the_run(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, bug: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    assert len(rollouts(policy)) == 4
    monkeypatch.setattr(collect_module, "Rollout", lambda **fields: Rollout(**bug(fields)))
    with pytest.raises(InvariantError, match="re-encoded, or its mask is shifted"):
        rollouts(policy)


def test_a_reply_that_repeats_the_prompt_cannot_hide_a_shifted_mask() -> None:
    completion = Completion(tokens=(6,), logprobs=(-1.0,), entropies=(1.0,), finish="length")
    shifted = Rollout(
        prompt="",
        text="",
        tokens=(5, 6, 6),
        trained=(False, True, False),
        logprobs=(0.0, -1.0, 0.0),
        entropies=(0.0, 1.0, 0.0),
        prompt_length=2,
        finish="length",
    )
    with pytest.raises(InvariantError, match="a prompt token is marked for training"):
        check_token_exact(shifted, completion, end_tokens=frozenset({2}))


def shift_targets(batch: MicroBatch) -> MicroBatch:
    return replace(batch, targets_N=batch.targets_N.roll(1))


def lose_the_last(batch: MicroBatch) -> MicroBatch:
    return replace(batch, targets_N=batch.targets_N[:-1])


@pytest.mark.parametrize("bug", [shift_targets, lose_the_last])
def test_a_micro_batch_that_trains_other_tokens_than_its_samples_stops_the_run(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, bug: Callable[[MicroBatch], MicroBatch]
) -> None:
    monkeypatch.setattr(part_module, "pack", lambda batch, *, device: bug(pack(batch, device=device)))
    with pytest.raises(InvariantError, match="the training targets of a packed micro-batch differ"):
        update(learner(policy), samples(policy))


# Numbers stay finite.


def test_weights_that_are_not_numbers_stop_the_run_before_they_spread(policy: Policy) -> None:
    batch, trained = samples(policy), learner(policy)
    with torch.no_grad():
        policy.trainable()["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    with pytest.raises(InvariantError, match="the loss is nan"):
        update(trained, batch)
    assert trained.updates == 0


def test_a_gradient_without_bound_stops_the_run_before_the_step(policy: Policy) -> None:
    batch, trained = samples(policy), learner(policy)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    policy.trainable()["model.norm.weight"].register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(InvariantError, match="the gradient norm is"):
        update(trained, batch)
    assert trained.updates == 0
    assert all(torch.equal(before[name], p) for name, p in policy.trainable().items())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_only_finite_numbers_are_finite(value: float) -> None:
    check_finite("the loss", 1e30)
    with pytest.raises(InvariantError, match="the loss is"):
        check_finite("the loss", value)


# Training and held-out examples stay apart, and looking does not touch.

CONFIG = Config(
    rollout=RolloutConfig(prompts=1, group_size=2, max_tokens=4),
    evaluate=EvaluateConfig(samples=2),
).resolve()


def task() -> Task:
    return Task(
        name="sums",
        examples=EXAMPLES,
        prompt=lambda example: str(example["question"]),
        rewards={"short": lambda rollout, example: float(len(rollout.text) < 5)},
    )


def test_an_example_on_both_sides_stops_the_run(policy: Policy) -> None:
    # Another row to the data, the same question to the policy.
    leaked = Example({"question": "1 + 1", "id": 7})
    split = Split(train=(EXAMPLES[0],), held_out=(leaked,), seed=0, size=1)
    collector = Collector(
        CONFIG, task=task(), split=split, codec=policy, engine=Engine(policy, EngineConfig())
    )
    with pytest.raises(InvariantError, match="1 training examples are also held out"):
        collect_batch(collector, 1, cursor=0)


def move_a_weight(policy: Policy) -> None:
    with torch.no_grad():
        policy.head_weight[3, 2] += 1e-6


def draw_noise(policy: Policy) -> None:
    torch.rand(1)


def leave_a_gradient(policy: Policy) -> None:
    policy.head_weight.grad = torch.zeros_like(policy.head_weight)


def nothing(policy: Policy) -> None:
    pass


def evaluate(policy: Policy, folder: Path, deed: Callable[[Policy], None]) -> int:
    """Evaluate with a real engine that does one thing more; return how many examples were answered."""
    torch.manual_seed(0)
    torch.rand(1)  # the generator's first draw fills its whole state anew; those behind it move only counters
    engine = Engine(policy, EngineConfig())

    class Careless:
        ready = engine.ready

        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
            deed(policy)
            return engine.generate(requests, sampling)

    evaluator = Evaluator(
        CONFIG,
        task=task(),
        examples=EXAMPLES,
        codec=policy,
        engine=Careless(),
        folder=RunFolder.create(folder, name="run", task="sums", model="small"),
    )
    return len(evaluator.evaluate(0, learner=learner(policy)).greedy_right)


@pytest.mark.parametrize("deed", [move_a_weight, draw_noise, leave_a_gradient])
def test_an_evaluation_that_changes_the_training_state_stops_the_run(
    policy: Policy, tmp_path: Path, deed: Callable[[Policy], None]
) -> None:
    with pytest.raises(InvariantError, match="evaluation changed the training state"):
        evaluate(policy, tmp_path, deed)


def test_an_evaluation_that_only_looks_passes(policy: Policy, tmp_path: Path) -> None:
    assert evaluate(policy, tmp_path, nothing) == 2
