"""An agent for training loops of one's own: thin over the engine and the learner that `train` uses.

agent = gw.Agent(model="tiny", group_size=8, learning_rate=1e-4)
answers = agent.get_action(prompts)              # a group of rollouts to each prompt
loss, kl = agent.learn((answers, rewards))       # rewards: [batch, group], nan: could not be scored
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from groupwise.algo.advantages import with_advantages
from groupwise.config import config_from_keywords, dump_config, read_config
from groupwise.errors import ConfigError
from groupwise.evolution.population import Member, SharedBase
from groupwise.gym.env import PromptEnv
from groupwise.model.resolve import ADAPTER
from groupwise.records import Example, Group, Request, Rollout, Sampling
from groupwise.rollout.collect import as_rollout
from groupwise.seeds import derive_seed
from groupwise.tasks.task import Prompt
from groupwise.tracking.run_folder import AGENT, SETTINGS, is_agent

Experiences = tuple[Sequence[Sequence[Rollout]], Any]
"""Answers [batch][group] and their rewards [batch, group]."""


class Agent:
    """A policy that acts and learns. Clones share its base: each costs an adapter and an optimizer."""

    def __init__(self, *, base: SharedBase | None = None, **settings: Any) -> None:
        """Settings are those of `gw.train`: flags by name, or whole sections."""
        self.config = settings.pop("config", None) or config_from_keywords(**settings).resolve()
        algo = self.config.algo
        if algo.advantage == "gdpo" or algo.combine != "sum" or algo.mean_filter or algo.overlong_buffer:
            raise ConfigError(
                "an agent learns from one reward an answer: judge, combine and filter in the environment"
            )
        if self.config.engine.kind != "own":
            raise ConfigError("an agent answers by the model that it trains: engine.kind=own")
        self._base = base or SharedBase(self.config)
        self._member = Member(self._base, self.config, weights=self._base.fresh)
        self.actions = self.steps = 0
        """Batches answered and learned from: what all noise derives from, beside the seed."""
        self.fitness: list[float] = []
        """What each `test` found."""

    def get_action(self, prompts: Sequence[Prompt], training: bool = True) -> tuple[tuple[Rollout, ...], ...]:
        """Answer each prompt: with a group of `rollout.group_size` when training, else once and greedily."""
        rollout, policy = self.config.rollout, self._base.policy
        count = rollout.group_size if training else 1
        sampling = rollout.sampling if training else replace(rollout.sampling, temperature=0.0)
        noise = (self.config.run.seed, "agent", self.actions)
        self.actions += training
        requests = [
            Request(
                prompt=policy.encode(prompt),
                seeds=tuple(derive_seed(*noise, number, member) for member in range(count)),
                adapter=self._member.number,
            )
            for number, prompt in enumerate(prompts)
        ]
        answers = self._generate(requests, sampling)
        return tuple(
            tuple(
                as_rollout(request, completion, prompt=prompt, member=member, codec=policy)
                for member, completion in enumerate(group)
            )
            for prompt, request, group in zip(prompts, requests, answers, strict=True)
        )

    def learn(self, experiences: Experiences) -> tuple[float, float]:
        """Update on one batch, and return the loss and the KL divergence from the reference (0 without β)."""
        answers, rewards = experiences
        algo, policy = self.config.algo, self._base.policy
        self.steps += 1
        groups = [
            with_advantages(rewarded(group, values), kind=algo.advantage, weights={})
            for group, values in zip(answers, rewards, strict=True)
        ]
        torch.manual_seed(derive_seed(self.config.run.seed, "update", self.steps))
        self._member.put_in_place()
        if policy.device.type == "cuda":
            self._base.engine.release()  # the update needs the memory
        report = self._member.learner.train_on(groups)
        return report.get("policy/loss", 0.0), report.get("policy/kl", 0.0)

    def test(self, env: PromptEnv) -> float:
        """Answer every held-out prompt once, greedily; returns the mean reward and keeps it in `fitness`.

        The environment is left as it was. An answer that could not be scored counts as 0.
        """
        found: list[float] = []
        with env.eval_mode():
            prompts, _ = env.reset()
            while len(found) < len(env):
                prompts, rewards, _, _, _ = env.step(self.get_action(prompts, training=False))
                found += [0.0 if value != value else float(value) for value in rewards[:, 0]]
        self.fitness.append(fmean(found))
        return self.fitness[-1]

    def clone(self) -> Agent:
        """Another agent with the same weights and optimizer state, on the same base model."""
        other = Agent(base=self._base, config=self.config)
        other._member.become(self._member)
        other.actions, other.steps, other.fitness = self.actions, self.steps, list(self.fitness)
        return other

    def set_reference_policy(self) -> None:
        """From now on the KL penalty holds to the policy as it is now. Base and optimizer stay."""
        self._member.reference = {name: tensor.clone() for name, tensor in self._member.weights.items()}

    def save(self, folder: str | Path) -> Path:
        """Write what `load` goes on from; the folder is also an adapter (or model) for Hugging Face tools."""
        path = Path(folder)
        if is_agent(path) and (path / ADAPTER).is_file() != self._base.policy.has_adapter:
            raise ConfigError(f"{path} holds an agent of another kind (adapters or none): save elsewhere")
        self._member.save(path)
        (path / SETTINGS).write_text(dump_config(self.config), encoding="utf-8")
        counts = {"actions": self.actions, "steps": self.steps, "fitness": self.fitness}
        (path / AGENT).write_text(json.dumps(counts), encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | Path, *, base: SharedBase | None = None) -> Agent:
        """An agent that goes on, bit for bit, as the saved one would have."""
        path = Path(folder)
        if not (path / AGENT).is_file():
            raise ConfigError(f"{path} is not the folder of an agent: it has no {AGENT}")
        agent = cls(base=base, config=read_config(path / SETTINGS))
        agent._member.load(path)
        counts = json.loads((path / AGENT).read_text(encoding="utf-8"))
        agent.actions, agent.steps, agent.fitness = counts["actions"], counts["steps"], counts["fitness"]
        return agent

    def drop(self) -> None:
        """Give the memory of its adapter and optimizer back; the base stays for its clones."""
        self._member.drop()

    def _generate(self, requests: list[Request], sampling: Sampling) -> Any:
        return self._base.engine.alone(self._member.number, requests, sampling)


def rewarded(group: Sequence[Rollout], rewards: Sequence[float]) -> Group:
    """Answers to one prompt with their rewards; nan is a failure, never a 0."""
    rollouts = tuple(
        replace(rollout, error="it could not be scored")
        if value != value
        else replace(rollout, reward=float(value), error=None)
        for rollout, value in zip(group, rewards, strict=True)
    )
    return Group(example=Example({}), rollouts=rollouts)
