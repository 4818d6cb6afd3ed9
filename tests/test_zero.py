"""DeepSpeed divides an update among processes, and what it computes is what one process computes without it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import read_config
from groupwise.config.sections import LOSSES
from groupwise.learner.learner import Learner
from groupwise.model import zero
from groupwise.parallel.processes import joined_processes
from groupwise.records import Sampling
from several import in_processes
from small_models import policy_of, small_model
from test_processes import gradients, made_samples, relative_difference

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

OFF_POLICY = ("algo.max_gap=100", "optim.minibatches=1", "optim.epochs=2")
# Adam's mean of one gradient is then that gradient.
NO_MEMORY = ("optim.beta1=0",)


def zero_gradients(losses: list[str], overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    zero.KEPT_WHOLE = 0  # the models of tests are small
    found = []
    with joined_processes() as processes:
        for loss in losses:
            config = read_config(
                overrides=[f"algo.loss={loss}", "optim.max_grad_norm=0", "optim.learning_rate=1e-3", *overrides]
            ).resolve()
            policy = policy_of(small_model())
            policy.divide(config.run.parallel)
            learner = Learner(
                policy,
                algo=config.algo,
                optim=config.optim,
                sampling=Sampling(max_tokens=8),
                max_steps=1,
                processes=processes,
            )
            kept = []
            step = learner._step

            def keep_after() -> float:
                norm = step()
                tensors, _ = policy.zero.optimizer_state()
                kept.append({n: tensors[f"{n}.exp_avg"].numpy() for n in policy.trainable()})
                return norm

            learner._step = keep_after
            samples = made_samples()
            report = learner.update(samples, sequences=14, tokens=sum(s.length for s in samples) + 9)
            found.append({"gradients": kept, "report": report})
    return found


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_gradient_of_two_processes_is_that_of_one(stage: str) -> None:
    settings = (*OFF_POLICY, *NO_MEMORY, f"run.parallel={stage}")
    losses = list(LOSSES)
    both = in_processes(2, zero_gradients, losses, settings)
    for i, loss in enumerate(losses):
        alone = gradients(loss, settings)
        for each in both:
            for ours, expected in zip(each[i]["gradients"], alone["gradients"], strict=True):
                print(loss, relative_difference(expected, ours))
                assert relative_difference(expected, ours) <= 1e-5
            assert each[i]["report"] == pytest.approx(alone["report"], rel=1e-4, abs=1e-6)
