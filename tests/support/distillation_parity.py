"""Gradients of teachers and of supervised tokens, ours and the naive ones, on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from groupwise.algo.samples import predicting_results
from groupwise.learner.teacher import ModelTeacher, SelfTeacher
from groupwise.records import Sample
from tests.support.naive_update import Gradients, measure
from tests.support.small_models import policy_of
from tests.support.update_parity import (
    SAMPLING,
    demonstration,
    gradient_of,
    naive_gradient_with,
    policy_and_plain,
    settings,
    shaken,
    some_samples,
)

Device = str | torch.device
Both = tuple[Gradients, Gradients]
"""Our gradients and the naive ones."""


def on_host(gradients: Gradients) -> Gradients:
    return {name: gradient.cpu() for name, gradient in gradients.items()}


def distillation_from_a_model(*, lora: bool, device: Device = "cpu") -> Both:
    policy, plain, _ = policy_and_plain(lora=lora, device=device)
    samples = some_samples(plain)
    other = shaken(policy_and_plain(lora=False)[1].float(), seed=7)
    algo = settings("dapo", teacher="other", distill=0.3)
    with torch.no_grad():
        target = [values.clone() for values in measure(other.double(), samples, SAMPLING).logprobs]
    frozen = policy_of(other.float().to(device))
    teacher = ModelTeacher(frozen, SAMPLING, student=policy, name="other")
    tokens = sum(sample.length for sample in samples)

    def distance(now: Any) -> torch.Tensor:
        # The gradient of KL(policy || teacher) by tokens of the policy: (log p - log t) * grad log p.
        pairs = zip(now.logprobs, target, strict=True)
        return 0.3 * sum(((own - other).detach() * own).sum() for own, other in pairs) / tokens

    wanted = naive_gradient_with(plain, samples, algo, distance)
    return on_host(gradient_of(policy, samples, algo, teacher=teacher)), wanted


def with_hint(one: Sample, hint: tuple[int, ...]) -> Sample:
    """The sample after its hint instead of after its prompt."""
    rest = len(one.tokens) - one.prefix
    zeros = (0.0,) * (len(hint) + rest)
    return replace(
        one,
        tokens=(*hint, *one.tokens[one.prefix :]),
        trained=(False,) * len(hint) + one.trained[one.prefix :],
        logprobs=zeros,
        entropies=zeros,
        advantages=zeros,
        prefix=len(hint),
    )


def self_distillation(*, device: Device = "cpu") -> Both:
    """Half of the answers have a hint."""
    policy, plain, _ = policy_and_plain(lora=False, device=device)
    hint = (5, 9, 14, 20)
    samples = [
        replace(one, hint=hint if number % 2 else ()) for number, one in enumerate(some_samples(plain))
    ]
    algo = settings("dapo", teacher="self", distill=0.5)
    with torch.no_grad():
        shown = [with_hint(one, hint) for one in samples if one.hint]
        target = iter(measure(plain, shown, SAMPLING).logprobs)
    tokens = sum(sample.length for sample in samples)

    def distance(now: Any) -> torch.Tensor:
        hinted = [own for own, one in zip(now.logprobs, samples, strict=True) if one.hint]
        return 0.5 * sum(((own - next(target)).detach() * own).sum() for own in hinted) / tokens

    wanted = naive_gradient_with(plain, samples, algo, distance)
    return on_host(
        gradient_of(policy, samples, algo, teacher=SelfTeacher(policy, SAMPLING, is_right=bool))
    ), wanted


def supervised_tokens(budget: int, *, device: Device = "cpu") -> Both:
    """Tool results inside answers (ECHO) and a demonstration beside them, in passes of `budget` tokens."""
    policy, plain, _ = policy_and_plain(lora=False, device=device)
    samples = predicting_results(some_samples(plain), weight=0.2)
    first = samples[0]
    samples += [demonstration(0, first.tokens[: first.prefix], (40, 41, 42), 0.1 / 3)]
    algo = settings("dapo")

    def cross_entropy(now: Any) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for one in samples:
            logprobs = plain(input_ids=torch.tensor([one.tokens])).logits[0].log_softmax(-1)
            for place, weight in enumerate(one.supervised):
                if weight:
                    total = total - weight * logprobs[place - 1, one.tokens[place]]
        return total

    wanted = naive_gradient_with(plain, samples, algo, cross_entropy)
    return on_host(gradient_of(policy, samples, algo, micro_batch_tokens=budget)), wanted
