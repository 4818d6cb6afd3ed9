"""Updates and runs that several processes share, and what to compare between them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from groupwise.config import read_config
from groupwise.learner.learner import Learner
from groupwise.model.attention.ulysses import UlyssesContext
from groupwise.model.ops.checkpointing import recompute_layers
from groupwise.model.policy import Policy
from groupwise.parallel.processes import Processes, divide, joined_processes
from groupwise.records import Sample, Sampling
from groupwise.training import train
from tests.support.small_models import policy_of, small_model


def uneven_samples() -> list[Sample]:
    """Five groups of unlike size, prompts and answers, with advantages of both signs."""
    noise = torch.Generator().manual_seed(1)
    samples = []
    for group, members in enumerate((4, 2, 1, 3, 2)):
        prompt = torch.randint(3, 250, (3 + 2 * group,), generator=noise).tolist()
        for member in range(members):
            answer = torch.randint(3, 250, (2 + (member + group) % 4,), generator=noise).tolist()
            drawn = torch.rand(len(answer), generator=noise).tolist()
            nothing = (0.0,) * len(prompt)
            advantage = (-1.0) ** member * (0.5 + group)
            samples.append(
                Sample(
                    tokens=(*prompt, *answer),
                    trained=(False,) * len(prompt) + (True,) * len(answer),
                    logprobs=(*nothing, *(-3 - 4 * x for x in drawn)),
                    entropies=(*nothing, *drawn),
                    advantages=(*nothing, *(advantage for _ in answer)),
                    prefix=len(prompt),
                    group=group,
                    member=member,
                )
            )
    return samples


def gradients(loss: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the gradient of the policy after every process of this run has computed its share."""
    return gradients_of_cases({loss: (loss, overrides)})[loss]


def gradients_of_cases(cases: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, dict[str, Any]]:
    """Return the gradients of each case, a loss and its settings, all from one process group."""
    torch.set_num_threads(1)
    with joined_processes() as processes:
        return {name: shared_gradients(processes, *case) for name, case in cases.items()}


def shared_gradients(processes: Processes, loss: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    config = read_config(
        overrides=[f"algo.loss={loss}", "optim.max_grad_norm=0", "optim.learning_rate=1e-3", *overrides]
    ).resolve()
    policy = policy_of(small_model())
    if config.model.gradient_checkpointing:
        recompute_layers(policy)
    if config.algo.beta:
        policy = type(policy)(policy.model, policy.tokenizer, reference=policy_of(small_model()).model)
    if processes.count > 1 and config.run.parallel == "fsdp":
        divide(policy, "fsdp")
    context = None
    if processes.count > 1 and config.run.parallel == "context":
        context = UlyssesContext(rank=processes.rank, count=processes.count)
    learner = Learner(
        policy,
        algo=config.algo,
        optim=config.optim,
        sampling=Sampling(max_tokens=8),
        max_steps=1,
        processes=processes,
        context=context,
    )
    kept: list[dict[str, Any]] = []
    step = learner.optimizer.step

    def keep_and_step() -> None:
        gradient = {name: whole_of(policy, name, p.grad) for name, p in policy.owned().items()}
        kept.append(gradient)
        step()

    learner.optimizer.step = keep_and_step
    samples = uneven_samples()
    report = learner.update(samples, sequences=14, tokens=sum(s.length for s in samples) + 9)
    weights = {name: whole_of(policy, name, p.detach()) for name, p in policy.owned().items()}
    return {"gradients": kept, "weights": weights, "report": report, "seen": learner.all_logprobs()}


def whole_of(policy: Policy, name: str, tensor: torch.Tensor) -> Any:
    divided = policy.shards is not None and name in policy.shards.parts
    return (policy.shards.gathered(name, tensor) if divided else tensor).numpy().copy()


def relative_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    a, b = (torch.cat([torch.as_tensor(x).flatten() for x in each.values()]) for each in (one, other))
    return float((a - b).norm() / a.norm())


# The second pass is off-policy: there every loss has a gradient of its own.
OFF_POLICY = ("algo.max_gap=100", "optim.minibatches=1", "optim.epochs=2")


def trained(config: Any, resume: Path | None = None, environment: dict[str, str] | None = None) -> str:
    os.environ.update(environment or {})
    torch.set_num_threads(1)
    return str(train(config, resume=resume))
