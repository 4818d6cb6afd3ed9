"""An agent for custom training loops: a thin layer over the engine and the learner of `groupwise.train`.

agent = gw.Agent(model="tiny", group_size=8, learning_rate=1e-4)
answers = agent.get_action(prompts)              # a group of rollouts for each prompt of a `PromptEnv`
loss, kl = agent.learn((answers, rewards))       # rewards: [batch, group]; NaN: could not be scored
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from groupwise.algo.advantages import BATCH_STD, scaled_by_batch, with_advantages
from groupwise.config import config_from_keywords, dump_config, read_config
from groupwise.config.schema import ADAPTER
from groupwise.engine.multi_lora import Weights
from groupwise.errors import ConfigError
from groupwise.evaluate.contamination import prompt_digest
from groupwise.evolution.population import Member, SharedBase
from groupwise.gym.env import PromptBatch, PromptEnv
from groupwise.learner.learner import try_custom_loss
from groupwise.learner.teacher import SELF
from groupwise.model.grammar import rollout_grammar
from groupwise.records import Example, Group, Rollout, derive_seed
from groupwise.rollout.agent_rollouts import AgentRollouts
from groupwise.rollout.collect import GroupRequest, generate_groups
from groupwise.rollout.tool_rollouts import Tools
from groupwise.serve.agent_endpoint import multi_turn
from groupwise.tasks.task import Prompt, Task
from groupwise.tasks.user_code import split_functions, use_functions
from groupwise.tracking.run_folder import AGENT, SETTINGS, is_agent
from groupwise.training.base_run import check_single_turn

Experiences = tuple[Sequence[Sequence[Rollout]], Any]
"""Answers [batch][group] and their rewards [batch, group]."""


class Agent:
    """A policy that acts and learns.

    Clones share the base model; each adds the memory of an adapter and an optimizer.
    """

    def __init__(self, *, base: SharedBase | None = None, **settings: Any) -> None:
        """Take the settings of `gw.train`: flags by name, whole sections, and functions of your own."""
        named, self._given = split_functions(settings)
        self.config = named.pop("config", None) or config_from_keywords(**named).resolve()
        functions = use_functions(self.config, self._given)
        try_custom_loss(self.config.algo)
        algo = self.config.algo
        if algo.advantage == "gdpo" or algo.combine != "sum" or algo.mean_filter or algo.overlong_buffer:
            raise ConfigError(
                "an agent learns from one reward per answer: combine and filter rewards in the environment"
            )
        if algo.sft_weight:
            raise ConfigError(
                "an agent has no worked answers to imitate: algo.sft_weight requires groupwise train"
            )
        if algo.teacher == SELF and self.config.task.correct_at is None:
            raise ConfigError(
                "algo.teacher=self shows right answers: set task.correct_at to the reward of a right answer"
            )
        if functions.callbacks:
            raise ConfigError("an agent has no callbacks: call your functions in your loop")
        if self.config.engine.kind != "own":
            raise ConfigError("an agent generates with the model it trains: set engine.kind=own")
        self.base = base or SharedBase(self.config, functions)
        """The base model and its engine; pass it to another agent to share them."""
        rule = self.base.policy.logits_processor
        if (None if rule is None else rule.name) != self.config.rollout.logits_processor:
            raise ConfigError("agents on one base model need the same rollout.logits_processor")
        grammar = self.base.policy.grammar
        if (None if grammar is None else grammar.text) != rollout_grammar(self.config):
            raise ConfigError(
                "agents on one base model need the same rollout.json_schema and rollout.grammar"
            )
        self._member = Member(self.base, self.config, weights=self.base.fresh, is_right=self._is_right)
        self.actions = self.steps = 0
        """Number of batches generated and of updates; seeds derive from these and `run.seed`."""
        self.fitness: list[float] = []
        """Mean reward of each `test`."""
        self.prompts: set[str] = set()
        """Digests of the prompts it has learned from, which `groupwise eval` leaves out."""
        self._tools: tuple[Task, Tools | AgentRollouts | None] | None = None
        """The last task, and its tools and environment."""

    @property
    def weights(self) -> Weights:
        """The parameters that this agent trains, by name: those of its adapter, or of the whole model."""
        return self._member.weights

    def get_action(self, prompts: Sequence[Prompt], training: bool = True) -> tuple[tuple[Rollout, ...], ...]:
        """Generate `rollout.group_size` answers per prompt when training, otherwise one greedy answer.

        The prompts of a `PromptEnv` carry its task. If that has tools or an environment, an answer is the
        whole conversation; the section `tools` of the settings limits it.
        """
        rollout = self.config.rollout
        tools = self._tools_of(prompts.task) if isinstance(prompts, PromptBatch) else None
        examples = prompts.examples if isinstance(prompts, PromptBatch) else [Example({})] * len(prompts)
        sampling = rollout.sampling if training else replace(rollout.sampling, temperature=0.0)
        wanted = [
            GroupRequest(
                example=example,
                prompt=prompt,
                seed_parts=(self.config.run.seed, "agent", self.actions, number),
                size=rollout.group_size if training else 1,
                adapter=self._member.number,
            )
            for number, (example, prompt) in enumerate(zip(examples, prompts, strict=True))
        ]
        self.actions += training
        engine = self.base.engine.alone(self._member.number)
        groups = generate_groups(
            wanted, codec=self.base.policy, engine=engine, sampling=sampling, tools=tools
        )
        return tuple(group.rollouts for group in groups)

    def _is_right(self, rollout: Rollout) -> bool:
        """Return whether the one reward of an answer counts as right, for `algo.teacher=self`."""
        least = self.config.task.correct_at
        return least is not None and rollout.reward >= least

    def _tools_of(self, task: Task) -> Tools | AgentRollouts | None:
        """Return the tools, the environment or the agent of a task; None for a task of one turn."""
        if self._tools is None or self._tools[0] is not task:
            check_single_turn(self.config, multi_turn=task.is_multi_turn)
            self._tools = (task, multi_turn(task, self.config.tools, self.config.agent))
        return self._tools[1]

    def learn(self, experiences: Experiences) -> tuple[float, float]:
        """Update on one batch; return the loss and the KL divergence from the reference (0 if beta is 0)."""
        answers, rewards = experiences
        algo, policy = self.config.algo, self.base.policy
        self.steps += 1
        self.prompts.update(prompt_digest(group[0].prompt) for group in answers if group)
        groups = [
            with_advantages(rewarded(group, values), kind=algo.advantage, weights={})
            for group, values in zip(answers, rewards, strict=True)
        ]
        if algo.advantage == BATCH_STD:
            groups = scaled_by_batch(groups, groups)
        torch.manual_seed(derive_seed(self.config.run.seed, "update", self.steps))
        self._member.put_in_place()
        if policy.device.type == "cuda":
            self.base.engine.release()  # the update needs the memory
        report = self._member.learner.train_on(groups)
        return report.get("policy/loss", 0.0), report.get("policy/kl", 0.0)

    def test(self, env: PromptEnv) -> float:
        """Answer every held-out prompt greedily; return the mean reward and append it to `fitness`.

        The state of the environment is restored. An answer that could not be scored counts as 0.
        """
        scores: list[float] = []
        with env.eval_mode():
            prompts, _ = env.reset()
            while len(scores) < len(env):
                prompts, rewards, _, _, _ = env.step(self.get_action(prompts, training=False))
                scores += [0.0 if value != value else float(value) for value in rewards[:, 0]]
        self.fitness.append(fmean(scores))
        return self.fitness[-1]

    def clone(self) -> Agent:
        """Return a copy with the same weights and optimizer state, on the same base model."""
        other = Agent(base=self.base, config=self.config, **self._given)
        other._member.become(self._member)
        other.actions, other.steps, other.fitness = self.actions, self.steps, list(self.fitness)
        other.prompts = set(self.prompts)
        return other

    def set_reference_policy(self) -> None:
        """Use the current policy as the reference of the KL penalty."""
        self._member.reference = {name: tensor.clone() for name, tensor in self.weights.items()}

    def save(self, folder: str | Path) -> Path:
        """Save the agent for `load`. Hugging Face tools can load the folder as an adapter or a model."""
        path = Path(folder)
        if is_agent(path) and (path / ADAPTER).is_file() != self.base.policy.has_adapter:
            raise ConfigError(
                f"{path} contains an agent of another kind (adapter or full model): save to another folder"
            )
        self._member.save(path)
        (path / SETTINGS).write_text(dump_config(self.config), encoding="utf-8")
        kept = {
            "actions": self.actions,
            "steps": self.steps,
            "fitness": self.fitness,
            "prompts": sorted(self.prompts),
        }
        (path / AGENT).write_text(json.dumps(kept), encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | Path, *, base: SharedBase | None = None, **functions: Any) -> Agent:
        """Load a saved agent; it continues exactly as the saved one would have.

        `functions`: your own, such as `loss`, if they were defined where they cannot be imported from.
        """
        path = Path(folder)
        if not (path / AGENT).is_file():
            raise ConfigError(f"{path} is not a saved agent: it has no {AGENT}")
        agent = cls(base=base, config=read_config(path / SETTINGS), **functions)
        agent._member.load(path)
        kept = json.loads((path / AGENT).read_text(encoding="utf-8"))
        agent.actions, agent.steps, agent.fitness = kept["actions"], kept["steps"], kept["fitness"]
        agent.prompts = set(kept.get("prompts", ()))
        return agent

    def drop(self) -> None:
        """Free the memory of the adapter and optimizer; the base model remains for clones."""
        self._member.drop()


def rewarded(group: Sequence[Rollout], rewards: Sequence[float]) -> Group:
    """Return the group of one prompt with its rewards; NaN marks a failed rollout, not a reward of 0."""
    rollouts = tuple(
        replace(rollout, error="could not be scored: its reward is NaN")
        if value != value
        else replace(rollout, reward=float(value), error=None)
        for rollout, value in zip(group, rewards, strict=True)
    )
    return Group(example=Example({}), rollouts=rollouts)
