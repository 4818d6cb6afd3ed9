"""The packed update and the naive one, on the same samples: what tests of their parity share."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import peft
import torch

from groupwise.config.schema import AlgoConfig, OptimConfig
from groupwise.learner.learner import Learner, split_groups
from groupwise.learner.teacher import Teacher
from groupwise.model.ops.checkpointing import recompute_layers
from groupwise.model.policy import Policy
from groupwise.records import Sample, Sampling
from tests.support.naive_update import Gradients, gradients, measure, naive_loss
from tests.support.small_models import policy_of, small_model, tiny_tokenizer

SAMPLING = Sampling(temperature=0.8, max_tokens=20)
OPTIM = OptimConfig(learning_rate=0.02, max_grad_norm=0.0, eps=1e-3, micro_batch_tokens=60)


def shaken(model: Any, seed: int) -> Any:
    """Move every trainable weight a little, so that no two policies are equal and no adapter is 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def policy_and_plain(
    *, lora: bool, checkpointing: bool = False, device: str | torch.device = "cpu"
) -> tuple[Policy, Any, Any]:
    """Return a policy on a device, its plain double in double precision, and the plain reference policy."""
    plain = small_model("qwen2")
    reference = copy.deepcopy(plain)
    if lora:
        adapter = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            plain = peft.get_peft_model(plain, adapter)
    shaken(plain, seed=1)
    ours = copy.deepcopy(plain).to(device)
    policy_of(ours.get_base_model() if lora else ours)  # switches the attention
    frozen = None
    if not lora:
        frozen = copy.deepcopy(reference).requires_grad_(False).to(device)
        policy_of(frozen)
    policy = Policy(ours, tiny_tokenizer(), reference=frozen)
    if checkpointing:
        recompute_layers(policy)
    return policy, plain.double(), reference.double()


def some_samples(plain: Any, *, groups: int = 3, seed: int = 0) -> list[Sample]:
    """Ragged groups: one-token answers, untrained segments in answers, a sampler that is a little off."""
    draw = random.Random(seed)
    samples: list[Sample] = []
    for group in range(groups):
        prompt = tuple(draw.randrange(3, 270) for _ in range(draw.randint(1, 12)))
        for member, length in enumerate([1, draw.randint(2, 9), draw.randint(6, 18)]):
            reply = tuple(draw.randrange(3, 270) for _ in range(length))
            tool = range(2, 5) if member == 2 else ()  # as if a tool had answered inside the reply
            trained = (False,) * len(prompt) + tuple(i not in tool for i in range(length))
            advantage = draw.gauss(0, 1)
            samples.append(
                Sample(
                    tokens=prompt + reply,
                    trained=trained,
                    logprobs=(0.0,) * len(trained),
                    entropies=(0.0,) * len(trained),
                    advantages=tuple(advantage * t * (draw.random() < 0.9) for t in trained),
                    prefix=len(prompt),
                    group=group,
                )
            )
    with torch.no_grad():
        measured = measure(plain, samples, SAMPLING).logprobs
    return [
        with_logprobs(sample, [float(x) + draw.gauss(0, 0.2) for x in values])
        for sample, values in zip(samples, measured, strict=True)
    ]


def with_logprobs(sample: Sample, values: list[float]) -> Sample:
    left = iter(values)
    return replace(sample, logprobs=tuple(next(left) if t else 0.0 for t in sample.trained))


def our_gradients(
    policy: Policy,
    samples: Sequence[Sample],
    algo: AlgoConfig,
    optim: OptimConfig,
    *,
    rollouts: int | None = None,
) -> list[Gradients]:
    """Return the gradients of each optimizer step of one update; `rollouts` may have several samples."""
    learner = Learner(policy, algo=algo, optim=optim, sampling=SAMPLING, max_steps=1)
    seen: list[Gradients] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(policy.model)))
    count = len(samples) if rollouts is None else rollouts
    learner.update(samples, sequences=count, tokens=sum(sample.length for sample in samples))
    return seen


def naive_gradients(
    plain: Any, reference: Any, samples: Sequence[Sample], algo: AlgoConfig, optim: OptimConfig
) -> list[Gradients]:
    """The same by a plain loop: log-probs before any update, then one optimizer step a mini-batch."""
    minibatches = split_groups(samples, optim.minibatches or 1)
    with torch.no_grad():
        old = [measure(plain, minibatch, SAMPLING).logprobs for minibatch in minibatches]
        anchor = [measure(reference, minibatch, SAMPLING).logprobs for minibatch in minibatches]
    optimizer = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    seen: list[Gradients] = []
    for _ in range(optim.epochs):
        for number, minibatch in enumerate(minibatches):
            loss = naive_loss(
                measure(plain, minibatch, SAMPLING),
                old=old[number],
                reference=anchor[number] if algo.beta else None,
                samples=minibatch,
                algo=algo,
                step_samples=samples,
                minibatches=len(minibatches),
                max_tokens=SAMPLING.max_tokens,
            )
            loss.backward()
            seen.append(gradients(plain))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def gradient_of(policy: Policy, samples: Sequence[Sample], algo: AlgoConfig, **changes: Any) -> Gradients:
    """The gradient of one optimizer step on samples, demonstrations among them."""
    teacher: Teacher | None = changes.pop("teacher", None)
    optim = replace(OPTIM, **changes)
    learner = Learner(policy, algo=algo, optim=optim, sampling=SAMPLING, max_steps=1, teacher=teacher)
    seen: list[Gradients] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(policy.model)))
    trained = [sample for sample in samples if sample.length]
    learner.update(samples, sequences=len(trained), tokens=sum(sample.length for sample in trained))
    return seen[0]


def naive_gradient_with(plain: Any, samples: Sequence[Sample], algo: AlgoConfig, extra: Any) -> Gradients:
    """The naive policy loss plus `extra`, a function of what the model measures."""
    trained = [sample for sample in samples if sample.length]
    now = measure(plain, trained, SAMPLING)
    loss = naive_loss(
        now,
        old=[values.detach() for values in now.logprobs],
        reference=None,
        samples=trained,
        algo=algo,
        step_samples=trained,
        minibatches=1,
        max_tokens=SAMPLING.max_tokens,
    )
    (loss + extra(now)).backward()
    return gradients(plain)


def demonstration(group: int, prompt: Sequence[int], answer: Sequence[int], weight: float) -> Sample:
    length = len(prompt) + len(answer)
    return Sample(
        tokens=(*prompt, *answer),
        trained=(False,) * length,
        logprobs=(0.0,) * length,
        entropies=(0.0,) * length,
        advantages=(0.0,) * length,
        prefix=len(prompt),
        group=group,
        member=-1,
        supervised=(0.0,) * len(prompt) + (weight,) * len(answer),
    )


def assert_same_gradients(got: Gradients, wanted: Gradients, *, within: float = 1e-5) -> None:
    assert got.keys() == wanted.keys()
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, gradient in wanted.items():
        # A key's bias moves no softmax: its true gradient is 0, so it is held to the whole's size instead.
        size = max(float(gradient.norm()), 1e-3 * float(whole))
        assert float((got[name] - gradient).norm()) < within * size, name


def settings(loss: str, **changes: Any) -> AlgoConfig:
    return AlgoConfig(loss=loss, **{"max_gap": 1.0, "correction_cap": 1.2, **changes})
