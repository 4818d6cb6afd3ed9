"""The update on the device against the naive one in double precision on a CPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.config.schema import AlgoConfig, OptimConfig
from groupwise.errors import ConfigError
from groupwise.learner.learner import Learner
from groupwise.learner.micro_batch import pack, row_logprobs
from groupwise.model.device import deterministic_kernels
from groupwise.model.load import use_fused_ops
from groupwise.model.ops.checkpointing import recompute_layers
from groupwise.model.policy import Policy
from groupwise.records import Sample, Sampling
from tests.support.cuda_checks import DEVICE
from tests.support.small_models import policy_of, small_model
from tests.support.update_parity import (
    OPTIM,
    assert_same_gradients,
    naive_gradients,
    our_gradients,
    policy_and_plain,
    settings,
    some_samples,
)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_gradients_are_those_of_the_naive_update(loss, lora, checkpointing):
    policy, plain, reference = policy_and_plain(lora=lora, checkpointing=checkpointing, device=DEVICE)
    samples = some_samples(plain)
    algo = settings(loss, beta=0.04)
    expected = naive_gradients(plain, reference, samples, algo, OPTIM)
    ours = our_gradients(policy, samples, algo, OPTIM)
    for got, wanted in zip(ours, expected, strict=True):
        assert_same_gradients({name: g.cpu() for name, g in got.items()}, wanted, within=1e-4)


def big_policy(dtype: torch.dtype = torch.bfloat16) -> Policy:
    model = small_model("qwen2").to(DEVICE, dtype)
    policy = policy_of(model)
    use_fused_ops(model)
    return policy


def many_samples(count: int, length: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(count):
        reply = tuple(torch.randint(3, 270, (length,), generator=generator).tolist())
        prompt = (7, 8, 9, 10 + number // 8)
        marks = (False,) * 4 + (True,) * length
        samples.append(
            Sample(
                tokens=prompt + reply,
                trained=marks,
                logprobs=(0.0,) * 4 + (-5.0,) * length,
                entropies=(0.0,) * len(marks),
                advantages=tuple((1.0 if number % 2 else -1.0) * mark for mark in marks),
                prefix=4,
                group=number // 8,
            )
        )
    return samples


def learner_of(policy: Policy, tokens: int) -> Learner:
    return Learner(
        policy,
        algo=AlgoConfig(max_gap=100.0),
        optim=OptimConfig(learning_rate=1e-3, micro_batch_tokens=tokens),
        sampling=Sampling(max_tokens=256),
        max_steps=10,
    )


def weights_after(policy: Policy, tokens: int, samples: list[Sample]) -> list[torch.Tensor]:
    learner = learner_of(policy, tokens)
    learner.update(samples, sequences=len(samples), tokens=sum(s.length for s in samples))
    return [p.detach().clone() for p in policy.trainable().values()]


def test_deterministic_updates_give_the_same_bits_every_time():
    samples = many_samples(64, 150)
    with deterministic_kernels(DEVICE, on=True):
        first = weights_after(big_policy(), 4096, samples)
        for _ in range(5):
            for one, other in zip(first, weights_after(big_policy(), 4096, samples), strict=True):
                assert torch.equal(one, other)


def gradients_with(tokens: int, samples: list[Sample]) -> Any:
    return gradients_and_passes(tokens, samples)[0]


def gradients_and_passes(tokens: int, samples: list[Sample]) -> tuple[Any, int]:
    """Return the gradients of an update, and the tokens a pass at its end."""
    policy = big_policy(torch.float32)
    learner = learner_of(policy, tokens)
    seen: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in policy.trainable().values()]))
    )
    learner.update(samples, sequences=len(samples), tokens=sum(s.length for s in samples))
    return seen[0].double(), learner.micro_batch_tokens


def test_the_gradient_does_not_depend_on_the_size_of_a_pass():
    samples = many_samples(32, 60)
    whole = gradients_with(100_000, samples)
    for tokens in (64, 500, 1300):
        assert float((gradients_with(tokens, samples) - whole).norm() / whole.norm()) < 1e-5


def test_a_pass_that_runs_out_of_memory_is_halved_and_gives_the_same_gradient(caplog):
    samples = many_samples(64, 250)
    gc.collect()  # models of earlier tests in reference cycles would count as memory in use
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    whole, passes = gradients_and_passes(100_000, samples)
    needed = torch.cuda.max_memory_allocated() - before
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    # What earlier tests left reserved may hold some of the activations, so a first limit may be too high.
    for share in (0.8, 0.6, 0.4):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + share * needed) / total)
        try:
            halved, smaller = gradients_and_passes(100_000, samples)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if smaller < passes:
            break
    assert smaller <= passes // 2
    assert "retrying with micro-batches" in caplog.text
    assert float((halved - whole).norm() / whole.norm()) < 1e-5


def test_a_single_completion_that_does_not_fit_is_one_sentence():
    samples = many_samples(1, 900)
    policy = big_policy(torch.float32)
    learner = learner_of(policy, 100_000)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        with pytest.raises(ConfigError, match="gradient_checkpointing"):
            learner.update(samples, sequences=1, tokens=900)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_answers_of_more_than_8000_tokens_have_the_gradient_of_plain_passes():
    """In bfloat16, with a shared prompt, against plain transformers in float32."""
    length = 8300 if DEVICE.type == "cuda" else 300
    samples = [replace(one, group=0) for one in many_samples(2, length)]
    policy, plain = big_policy(), small_model("qwen2").to(torch.bfloat16).float().to(DEVICE)
    logprobs_N, _ = row_logprobs(policy, pack(samples, device=DEVICE), Sampling(), entropy_gradient=False)
    weights_N = torch.linspace(-1.0, 1.0, len(logprobs_N), device=DEVICE)
    (weights_N * logprobs_N).sum().backward()
    rows = []
    for sample in samples:
        tokens = torch.tensor(sample.tokens, device=DEVICE)
        logits = plain(tokens[None], use_cache=False).logits[0, sample.prefix - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(1, tokens[sample.prefix :, None])[:, 0])
    expected_N = torch.cat(rows)
    assert float((logprobs_N - expected_N).detach().abs().mean()) < 0.05
    (weights_N * expected_N).sum().backward()
    for (name, ours), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        similar = torch.nn.functional.cosine_similarity(
            ours.grad.float().flatten(), theirs.grad.flatten(), dim=0
        )
        assert float(similar) > 0.99, name


def test_checkpointed_layers_give_the_same_gradient_in_bfloat16():
    samples = many_samples(16, 100)
    results = []
    for checkpointing in (False, True):
        policy = big_policy()
        if checkpointing:
            recompute_layers(policy)
        results.append(torch.cat([w.flatten().double() for w in weights_after(policy, 4096, samples)]))
    start = torch.cat([p.detach().flatten().double() for p in big_policy().trainable().values()])
    moved = [result - start for result in results]
    assert float(torch.nn.functional.cosine_similarity(*moved, dim=0)) > 0.99
