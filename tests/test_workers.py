"""Threads that work alone: the same results as one thread, in the same order, every time."""

from __future__ import annotations

import copy
import threading
import time
from itertools import chain
from typing import Any

import peft
import pytest
import torch

from groupwise.config.sections import AlgoConfig, EngineConfig, OptimConfig
from groupwise.engine.engine import Engine
from groupwise.engine.side_by_side import SideBySide, engine_for
from groupwise.learner.learner import Learner
from groupwise.model.policy import Policy
from groupwise.model.workers import Workers
from groupwise.records import Completion, Request, Sample, Sampling
from small_models import policy_of, small_model


def requests(count: int) -> list[Request]:
    return [Request(prompt=tuple(range(5, 8 + r)), seeds=(10 * r, 10 * r + 1)) for r in range(count)]


def tokens(answers: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in group] for group in answers]


def samples(count: int) -> list[Sample]:
    """Two to a group, with replies of different lengths and advantages of both signs."""
    return [
        Sample(
            tokens=(5, 6, *range(7, 9 + i)),
            trained=(False, False) + (True,) * (2 + i),
            logprobs=(0.0, 0.0) + (-5.0,) * (2 + i),
            entropies=(0.0,) * (4 + i),
            advantages=(0.0, 0.0) + ((-1.0) ** i,) * (2 + i),
            prefix=2,
            group=i // 2,
        )
        for i in range(count)
    ]


def weights_after(workers: Workers, batch: list[Sample], **optim: Any) -> dict[str, torch.Tensor]:
    policy = policy_of(small_model())
    learner = Learner(
        policy,
        algo=AlgoConfig(max_gap=100.0),
        # With so large an eps a step is the gradient and little else: rounding stays rounding.
        optim=OptimConfig(learning_rate=1e-1, eps=1.0, **optim),
        sampling=Sampling(max_tokens=16),
        max_steps=5,
    )
    learner.workers = workers
    learner.update(batch, sequences=len(batch), tokens=sum(sample.length for sample in batch))
    return policy.trainable()


def test_results_come_in_the_order_of_the_items_whoever_is_done_first() -> None:
    def work(seconds: float) -> tuple[float, str]:
        time.sleep(seconds)
        return seconds, threading.current_thread().name

    done = list(Workers(3).map(work, [0.05, 0.02, 0.0]))
    assert [seconds for seconds, _ in done] == [0.05, 0.02, 0.0]
    assert len({name for _, name in done}) > 1


def test_a_worker_uses_one_of_torchs_threads_and_the_caller_keeps_its_own() -> None:
    torch.set_num_threads(2)
    try:
        assert list(Workers(2).map(lambda _: torch.get_num_threads(), [0, 1, 2])) == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        list(Workers(2).map(lambda x: 1 // x, [1, 0]))


@pytest.mark.parametrize("optim", [{}, {"minibatches": 2}, {"epochs": 2}, {"micro_batch_tokens": 12}])
def test_an_update_by_several_workers_gives_the_weights_of_an_update_by_one(optim: dict[str, int]) -> None:
    batch = samples(8)
    alone, together = weights_after(Workers(1), batch, **optim), weights_after(Workers(3), batch, **optim)
    before = policy_of(small_model()).trainable()
    assert any(not torch.equal(alone[name], before[name]) for name in alone)
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_an_update_by_several_workers_gives_the_same_bits_every_time() -> None:
    batch = samples(8)
    first = weights_after(Workers(3), batch, micro_batch_tokens=12)
    for _ in range(3):
        again = weights_after(Workers(3), batch, micro_batch_tokens=12)
        assert all(torch.equal(again[name], weight) for name, weight in first.items())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_engines_side_by_side_write_what_one_engine_writes(small_policy: Policy, count: int) -> None:
    asked, sampling = requests(count), Sampling(max_tokens=12)
    alone = Engine(small_policy, EngineConfig()).generate(asked, sampling)
    together = SideBySide(small_policy, EngineConfig(), Workers(3)).generate(asked, sampling)
    assert tokens(together) == tokens(alone)
    for ours, theirs in zip(chain(*together), chain(*alone), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.finish == theirs.finish


def test_adapters_are_folded_once_for_all_engines_and_the_weights_come_back_bit_for_bit(
    small_policy: Policy,
) -> None:
    adapted = peft.get_peft_model(
        copy.deepcopy(small_policy.model),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    policy = Policy(adapted, small_policy.tokenizer)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    asked, sampling = requests(4), Sampling(max_tokens=12)
    together = SideBySide(policy, EngineConfig(), Workers(2)).generate(asked, sampling)
    assert all(torch.equal(before[name], p) for name, p in adapted.named_parameters())
    assert tokens(together) == tokens(Engine(policy, EngineConfig()).generate(asked, sampling))


def test_a_small_policy_on_a_cpu_gets_a_worker_for_each_thread_unless_it_has_dropout() -> None:
    torch.set_num_threads(3)
    try:
        policy = policy_of(small_model())
        assert Workers.suited_to(policy).count == 3
        assert isinstance(engine_for(policy, EngineConfig()), SideBySide)
        assert isinstance(engine_for(policy, EngineConfig(kv_tokens=512)), Engine)
        policy.model.register_module("dropout", torch.nn.Dropout(0.1))
        assert Workers.suited_to(policy).count == 1
    finally:
        torch.set_num_threads(1)
