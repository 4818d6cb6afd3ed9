"""Gradients of DeepSpeed ZeRO, read from an optimizer whose mean is the gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from groupwise.config import read_config
from groupwise.config.schema import LOSSES
from groupwise.errors import InvariantError
from groupwise.learner.learner import Learner
from groupwise.model import sharding
from groupwise.model.policy import Policy
from groupwise.parallel.processes import Processes, divide, joined_processes
from groupwise.records import Sampling
from tests.support.sharded_updates import uneven_samples
from tests.support.small_models import policy_of, small_model

STAGES = ("zero1", "zero2", "zero3")


def learner_of(policy: Policy, processes: Processes, *overrides: str) -> Learner:
    settings = ["algo.max_gap=100", "optim.minibatches=1", "optim.learning_rate=1e-3", *overrides]
    config = read_config(overrides=settings).resolve()
    return Learner(
        policy,
        algo=config.algo,
        optim=config.optim,
        sampling=Sampling(max_tokens=8),
        max_steps=4,
        processes=processes,
    )


def updated(learner: Learner) -> dict[str, float]:
    samples = uneven_samples()
    return learner.update(samples, sequences=14, tokens=sum(s.length for s in samples) + 9)


CASES = {
    **{loss: (f"algo.loss={loss}",) for loss in LOSSES},
    "with a KL penalty and an entropy bonus": ("algo.beta=0.1", "algo.entropy_bonus=0.01"),
    "in mini-batches and small micro-batches": ("optim.minibatches=2", "optim.micro_batch_tokens=12"),
    "with tied embeddings": (),
    "clipped, and stepping in main memory": ("optim.max_grad_norm=0.5", "optim.offload=true"),
}


# The second pass is off-policy; without a memory of older ones, Adam's mean is the gradient.
EXPOSED = ("optim.epochs=2", "optim.beta1=0", "optim.max_grad_norm=0")


def zero_gradients(layout: str) -> dict[str, Any]:
    """Return for each case the gradient of each optimizer step, and what the update says of itself."""
    torch.set_num_threads(1)
    sharding.KEPT_WHOLE = 0  # all weights of these models are small
    with joined_processes() as processes:
        found = {name: gradient(processes, layout, name) for name in CASES}
        return found if processes.count == 1 else {**found, "error": not_finite(processes, layout)}


def gradient(processes: Processes, layout: str, name: str) -> dict[str, Any]:
    policy = policy_of(small_model(tie_word_embeddings="tied" in name))
    if "KL" in name:
        policy = Policy(policy.model, policy.tokenizer, reference=policy_of(small_model()).model)
    if processes.count > 1:
        divide(policy, layout)
    learner = learner_of(policy, processes, *EXPOSED, *CASES[name])
    kept: list[dict[str, Any]] = []
    step = learner.step

    def step_and_keep() -> None:
        step()
        kept.append(means(learner))

    learner.step = step_and_keep  # type: ignore[method-assign]
    return {"report": updated(learner), "gradients": kept}


def means(learner: Learner) -> dict[str, Any]:
    policy = learner.policy
    if policy.zero is None:
        found = {name: learner.optimizer.state[p]["exp_avg"] for name, p in policy.trainable().items()}
    else:
        tensors, _ = policy.zero.optimizer_state()
        found = {key.removesuffix(".exp_avg"): t for key, t in tensors.items() if key.endswith(".exp_avg")}
    return {name: tensor.numpy().copy() for name, tensor in found.items()}


def not_finite(processes: Processes, layout: str) -> str:
    """Return what is said when a gradient has become infinite behind a loss that is not."""
    policy = policy_of(small_model())
    divide(policy, layout)
    learner = learner_of(policy, processes)
    policy.backward = lambda loss: policy.zero.backward(loss * float("inf"))  # type: ignore
    with pytest.raises(InvariantError) as stopped:
        updated(learner)
    return str(stopped.value)


@cache
def gradients_alone() -> dict[str, Any]:
    return zero_gradients("none")
