"""Stages 1 to 4 of a step: sample prompts, roll out, score, compute advantages.

`training.loop.collect_batch` calls the stages in order. It repeats them with new prompts to replace groups
without a learning signal (`rollout.refill`): `needs_groups` and `is_informative` decide.
`prompt_selection` has the curriculum that chooses prompts. `evolution.population` runs the stages of several
collectors at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Protocol, TypeVar

from groupwise.algo.advantages import BATCH_STD, scaled_by_batch, with_advantages, with_overlong_penalty
from groupwise.algo.reward_combination import agreeing, with_combined
from groupwise.config.schema import Config
from groupwise.errors import InvariantError
from groupwise.invariants import check_disjoint
from groupwise.isolation.time_limit import TimeLimit, TimeLimits
from groupwise.parallel.processes import Processes
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.llm_judge import spent_by_judges
from groupwise.rewards.runner import RewardContext, TrainerState, score_within, weighted_sum
from groupwise.rewards.score_ahead import runs_ahead, score_ahead
from groupwise.rollout.collect import Generate, PromptCodec, collect
from groupwise.serve.agent_endpoint import multi_turn
from groupwise.tasks import Split, Task
from groupwise.training.callbacks import Callbacks
from groupwise.training.prompt_selection import NOTHING_KNOWN, Rates, check_kinds, choose, updated


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups that a step trains on, and those that were sampled and dropped."""

    groups: tuple[Group, ...]
    dropped: tuple[Group, ...]
    """Groups without a learning signal, which are not trained on."""
    replaced: int
    """Number of groups that were sampled to replace dropped ones."""
    cursor: int
    """Position in the training data where the next step begins."""
    rates: Rates
    """Success rate of each kind of example, for the curriculum."""
    passed_over: int
    """Training examples that the curriculum skipped."""
    rollout_seconds: float
    reward_seconds: float
    tool_seconds: float = 0.0
    """Part of the rollout time that tools took; an upper bound if they ran beside the engine."""
    judge_usage: Mapping[str, int] = field(default_factory=dict)
    """Calls and tokens of LLM judges, by kind; empty without a judge."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Mean of each metric that TRL-style rewards logged with `log_metric`."""

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """Return every sampled group, trained on or dropped. Rewards are measured on these."""
        return self.groups + self.dropped


@dataclass(slots=True)
class StageTimes:
    """Time that one process spent in one round, in seconds."""

    rollout: float = 0.0
    reward: float = 0.0
    tools: float = 0.0


@dataclass(slots=True, kw_only=True)
class BatchDraft:
    """A batch under construction: the state that the stages of a step share."""

    step: int
    cursor: int
    rates: Rates
    context: RewardContext
    judge_usage: Counter[str] = field(default_factory=Counter)
    """Calls and tokens of judges in this process."""
    informative: list[Group] = field(default_factory=list)
    """Groups that the update can learn from (`Collector.is_informative`)."""
    uninformative: list[Group] = field(default_factory=list)
    passed_over: int = 0
    rounds: int = 0
    expected: int = 0
    """Number of rollouts of the step after this round."""
    times: StageTimes = field(default_factory=StageTimes)
    rollout_seconds: float = 0.0
    reward_seconds: float = 0.0
    tool_seconds: float = 0.0

    @property
    def groups(self) -> list[Group]:
        return self.informative + self.uninformative


Draft = TypeVar("Draft")
Prompts = TypeVar("Prompts")
Groups = TypeVar("Groups")
Collected = TypeVar("Collected", covariant=True)


class Stages(Protocol[Draft, Prompts, Groups, Collected]):
    """What `training.loop.collect_batch` calls: the stages that make a batch, or one for each member."""

    def begin(self, step: int, *, cursor: int, rates: Rates) -> Draft: ...

    def needs_groups(self, draft: Draft) -> bool: ...

    def sample_prompts(self, draft: Draft) -> Prompts: ...

    def rollout(self, draft: Draft, prompts: Prompts, /) -> Groups: ...

    def score(self, draft: Draft, groups: Groups) -> Groups: ...

    def advantages(self, draft: Draft, groups: Groups) -> Groups: ...

    def add(self, draft: Draft, groups: Groups, /) -> None: ...

    def finish(self, draft: Draft) -> Collected: ...


class Collector:
    """Implements the stages that make a batch, and holds what does not change between steps."""

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        split: Split,
        codec: PromptCodec,
        engine: Generate,
        processes: Processes | None = None,
        when_late: Callable[[], None] = lambda: None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.config = config
        self.callbacks = callbacks
        self.processes = processes or Processes()
        self.task = task
        self.split = split
        self.codec = codec
        self.engine = engine
        self.when_late = when_late
        """Called when a reward has exceeded its time limit."""
        if config.rollout.curriculum > 1:
            check_kinds(task, split)
        self.tools = multi_turn(task, config.tools, config.agent)
        self.runs_ahead = any(map(runs_ahead, task.rewards.values()))
        """Whether some rewards can score all groups of a batch at the same time."""
        self.held_out = {task.asks(example) for example in split.held_out}
        self.failures: dict[str, str] = {}
        """The first failure of each reward in this process, with its traceback."""

    def begin(self, step: int, *, cursor: int, rates: Rates = NOTHING_KNOWN) -> BatchDraft:
        """Start the batch of a step at this position in the training data."""
        epoch = cursor / self.split.size if self.split.size else 0.0
        state = TrainerState(global_step=step - 1, max_steps=self.config.run.max_steps, epoch=epoch)
        context = RewardContext(trainer_state=state, failures=self.failures, when_late=self.when_late)
        return BatchDraft(step=step, cursor=cursor, rates=rates, context=context)

    def needs_groups(self, draft: BatchDraft) -> bool:
        """Whether to sample another round: groups are missing, refills are left, and few rollouts failed."""
        return (
            draft.rounds < 1 + self.config.rollout.refill
            and len(draft.informative) < self.config.rollout.prompts
            and not too_many_failed(draft.groups, limit=self.config.task.max_failed)
        )

    def sample_prompts(self, draft: BatchDraft) -> Sequence[Example]:
        """Take the next training examples. A curriculum chooses them from several candidates."""
        return self.take_prompts(draft, self.missing(draft))

    def missing(self, draft: BatchDraft) -> int:
        """Return the number of informative groups that the batch still needs."""
        return self.config.rollout.prompts - len(draft.informative)

    def take_prompts(self, draft: BatchDraft, missing: int) -> Sequence[Example]:
        """Take this many examples from the position of the draft on."""
        candidates, draft.cursor = self.split.take(draft.cursor, missing * self.config.rollout.curriculum)
        examples: Sequence[Example] = candidates
        if len(candidates) != missing:
            seed_parts = (self.config.run.seed, draft.step, len(draft.groups))
            examples = choose(candidates, missing, task=self.task, rates=draft.rates, seed_parts=seed_parts)
        draft.passed_over += len(candidates) - len(examples)
        check_disjoint((self.task.asks(example) for example in examples), self.held_out)
        return examples

    def rollout(self, draft: BatchDraft, examples: Sequence[Example]) -> list[Group]:
        """Generate a group of rollouts for each example of this process's share."""
        self._tell("before_rollout", draft)
        draft.times = StageTimes()
        started = time.perf_counter()
        groups: list[Group] = []
        with self.processes.together():
            groups = collect(
                examples,
                ask=self.task.ask,
                codec=self.codec,
                engine=self.engine,
                sampling=self.config.rollout.sampling,
                group_size=self.config.rollout.group_size,
                # The count distinguishes the seeds of an example that is sampled in two rounds of a step.
                seed_parts=(self.config.run.seed, "train", draft.step, len(draft.groups)),
                tools=self.tools,
                share=self.processes.share,
            )
            if self.tools is not None:
                draft.times.tools = self.tools.pop_seconds()
        self.expect(draft, len(examples))
        draft.times.rollout = time.perf_counter() - started
        self._tell("after_rollout", draft, groups)
        return groups

    def expect(self, draft: BatchDraft, examples: int) -> None:
        """Note how many rollouts the step has after this round."""
        draft.expected = rollouts_in(draft.groups) + examples * self.config.rollout.group_size

    def score(self, draft: BatchDraft, groups: list[Group]) -> list[Group]:
        """Score every rollout of this process. Stop early if too many cannot be scored."""
        self._tell("before_score", draft, groups)
        started = time.perf_counter()
        enough, failed = self.config.task.max_failed * draft.expected, failures(draft.groups)
        spent = spent_by_judges(self.task.rewards)
        with self.processes.together(), TimeLimits(self.config.task.reward_seconds) as limit:
            if self.runs_ahead:
                score_ahead(
                    groups,
                    rewards=self.task.rewards,
                    seconds=limit.seconds,
                    concurrency=self.config.task.reward_concurrency,
                    context=draft.context,
                )
            for number, group in enumerate(groups):
                # In place, so that memory does not grow with scored copies.
                groups[number] = scored = self.reward_group(group, limit, draft.context)
                failed += failures([scored])
                # Do not wait for more slow failures, such as timeouts, once there are too many.
                if failed > enough:
                    del groups[number + 1 :]
                    break
        draft.context.ready.clear()
        draft.judge_usage += spent_by_judges(self.task.rewards) - spent
        draft.times.reward = time.perf_counter() - started
        self._tell("after_score", draft, groups)
        return groups

    def _tell(self, hook: str, draft: BatchDraft, *arguments: Sequence[Group]) -> None:
        """Call a hook of the run's callbacks."""
        if self.callbacks is not None:
            # Pass a copy: the stages replace the groups of their list in place.
            self.callbacks.call(hook, draft.step, *map(tuple, arguments))

    def advantages(self, draft: BatchDraft, groups: list[Group]) -> list[Group]:
        """Set the advantage of each rollout relative to its group."""
        started = time.perf_counter()
        with self.processes.together():
            for number, group in enumerate(groups):
                groups[number] = self.group_advantages(group)
        draft.times.reward += time.perf_counter() - started
        return groups

    def add(self, draft: BatchDraft, own: list[Group]) -> None:
        """Gather the groups of all processes, and separate those with a learning signal from the others."""
        slowest = self.processes.gather(draft.times)
        draft.rollout_seconds += max(each.rollout for each in slowest)
        draft.reward_seconds += max(each.reward for each in slowest)
        draft.tool_seconds += max(each.tools for each in slowest)
        groups = self.processes.joined(own)
        if self.config.rollout.curriculum > 1:
            draft.rates = updated(draft.rates, groups, task=self.task)
        draft.informative += [group for group in groups if self.is_informative(group)]
        draft.uninformative += [group for group in groups if not self.is_informative(group)]
        draft.rounds += 1

    def is_informative(self, group: Group) -> bool:
        """Whether the policy learns from a group. The others are replaced (`rollout.refill`).

        From a teacher model it learns whatever the rewards are. The teacher `self` needs a better answer in
        the group, so there a signal is required.
        """
        return has_signal(group) or self.config.algo.teacher not in (None, "self")

    def finish(self, draft: BatchDraft) -> Batch:
        """Return the batch. Without refills no group is dropped: all of them count in the loss's mean."""
        groups, dropped = draft.informative, draft.uninformative
        replaced = len(groups) + len(dropped) - self.config.rollout.prompts
        if not self.config.rollout.refill:
            groups, dropped = groups + dropped, []
        if self.config.algo.advantage == BATCH_STD:
            groups = scaled_by_batch(groups, [*groups, *dropped])
        return Batch(
            groups=tuple(groups),
            dropped=tuple(dropped),
            replaced=replaced,
            cursor=draft.cursor,
            rates=draft.rates,
            passed_over=draft.passed_over,
            rollout_seconds=draft.rollout_seconds,
            reward_seconds=draft.reward_seconds,
            tool_seconds=draft.tool_seconds,
            judge_usage=sum(self.processes.gather(draft.judge_usage), Counter()),
            logged=means_of(self.processes.gather(draft.context.metrics)),
        )

    def reward_group(self, group: Group, limit: TimeLimit, context: RewardContext | None = None) -> Group:
        """Score the rollouts of a group within the time limit, and combine their rewards."""
        task, algo = self.task, self.config.algo
        group = score_within(limit, group, rewards=task.rewards, weights=task.weights, context=context)
        group = with_combined(group, kind=algo.combine, weights=task.weights)
        return with_overlong_penalty(
            group,
            max_tokens=self.config.rollout.max_tokens,
            buffer=algo.overlong_buffer,
            penalty=algo.overlong_penalty,
        )

    def group_advantages(self, group: Group) -> Group:
        """Return the group with the advantages of its rollouts, as `algo.advantage` defines them."""
        task, algo = self.task, self.config.algo
        chosen = partial(agreeing, weights=task.weights) if algo.mean_filter else list
        return with_advantages(group, kind=algo.advantage, weights=task.weights, chosen=chosen)

    def shown_reward(self, rollout: Rollout) -> float:
        """Return the reward to show: with `algo.combine=pca`, which centres each group, the weighted sum."""
        if self.config.algo.combine == "pca":
            return weighted_sum(rollout.rewards, self.task.weights)
        return rollout.reward


def means_of(logged: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of each metric over the values that all processes logged."""
    names = sorted({name for own in logged for name in own})
    return {name: fmean(value for own in logged for value in own.get(name, ())) for name in names}


def check_failures(batch: Batch, *, limit: float) -> None:
    """Stop the run if too many rollouts of a step failed."""
    if too_many_failed(batch.all_groups, limit=limit):
        share = failures(batch.all_groups) / rollouts_in(batch.all_groups)
        first = first_error(batch)
        raise InvariantError(
            f"{share:.0%} of the rollouts failed (task.max_failed is {limit:g}); the first: {first}"
        )


def first_error(batch: Batch) -> str | None:
    return next((r.error for group in batch.all_groups for r in group.rollouts if r.error is not None), None)


def too_many_failed(groups: Sequence[Group], *, limit: float) -> bool:
    return failures(groups) > limit * rollouts_in(groups)


def failures(groups: Sequence[Group]) -> int:
    return sum(rollout.error is not None for group in groups for rollout in group.rollouts)


def rollouts_in(groups: Sequence[Group]) -> int:
    return sum(len(group.rollouts) for group in groups)


def has_signal(group: Group) -> bool:
    """Whether the group has a learning signal: some advantage is not 0."""
    return any(rollout.has_signal for rollout in group.rollouts)
