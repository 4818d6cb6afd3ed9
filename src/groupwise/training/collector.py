"""The next step's batch, drawn while this step trains: one update off-policy, and never more."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from groupwise.algo.advantages import with_advantages, with_overlong_penalty
from groupwise.algo.reward_combination import agreeing, with_combined
from groupwise.algo.samples import batch_size, to_samples
from groupwise.config.schema import Config
from groupwise.errors import ConfigError, InvariantError
from groupwise.invariants import check_disjoint
from groupwise.parallel.processes import Processes
from groupwise.records import Example, Group, Rollout, Sample
from groupwise.rewards.llm_judge import spent_by_judges
from groupwise.rewards.runner import RewardContext, TrainerState, score_within, weighted_sum
from groupwise.rewards.time_limit import TimeLimit, TimeLimits
from groupwise.rollout.collect import Generate, PromptCodec, Tools, collect
from groupwise.seeds import derive_seed
from groupwise.tasks import ExampleStream, Split, Task


class BatchPrefetcher:
    """At most one batch under way, in a thread that mostly waits for servers."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._batch: Batch | None = None
        self._error: BaseException | None = None

    def start(self, draw: Callable[[], Batch]) -> None:
        """Begin to draw a batch; the one before must have been taken."""
        assert self._thread is None, "a batch is still under way"

        def work() -> None:
            try:
                self._batch = draw()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being drawn any more: servers may then get other weights."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Batch | None:
        """Return the batch that was started, or raise what went wrong there; None: none was started."""
        if self._thread is None:
            return None
        self.wait()
        self._thread = None
        batch, error = self._batch, self._error
        self._batch = self._error = None
        if error is not None:
            raise error
        return batch


Rates = Mapping[str, Sequence[float]]
"""For each kind of example, answers given and answers right, both fading."""

NOTHING_KNOWN: Rates = {}
FADING = 0.9
"""What an earlier group still counts when the next one of its kind is scored."""
LEAST = 0.05
"""Weight of a kind that seems to teach nothing: it is asked now and then, since the policy changes."""


def check_kinds(task: Task, split: Split) -> None:
    """Refuse a curriculum where no example is like an earlier one."""
    if isinstance(split.train, ExampleStream) and task.difficulty is None:
        raise ConfigError(
            f"rollout.curriculum: task {task.name} makes endless examples and does not say how they are "
            "alike; give it difficulty=…, a function from an example to a kind"
        )


def kind_of(task: Task, example: Example) -> str:
    """Return what an example is counted as: its difficulty, or itself where the task names none."""
    named = task.difficulty(example) if task.difficulty else None
    return named if named is not None else example.fingerprint


def success(rates: Rates, kind: str) -> float:
    """Return how often an answer to this kind is right; one half before anything is known."""
    given, right = rates.get(kind, (0.0, 0.0))
    return (right + 1) / (given + 2)


def choose(
    candidates: Sequence[Example], count: int, *, task: Task, rates: Rates, seed_parts: tuple[int | str, ...]
) -> list[Example]:
    """Draw `count` of the candidates without replacement, each by how much its answers will vary.

    Every candidate draws u^(1/weight) and the largest win (Efraimidis & Spirakis 2006).
    """

    def lot(place: int) -> float:
        p = success(rates, kind_of(task, candidates[place]))
        uniform = (derive_seed(*seed_parts, "curriculum", place) % 2**53 + 0.5) / 2**53
        return float(uniform ** (1 / max(LEAST, 4 * p * (1 - p))))

    winners = sorted(range(len(candidates)), key=lot, reverse=True)[:count]
    return [candidates[place] for place in sorted(winners)]


def updated(rates: Rates, groups: Iterable[Group], *, task: Task) -> dict[str, Sequence[float]]:
    """Return the rates with these groups counted in; answers that could not be scored count as neither."""
    known = dict(rates)
    for group in groups:
        kind = kind_of(task, group.example)
        given, right = known.get(kind, (0.0, 0.0))
        known[kind] = (
            FADING * given + len(group.valid),
            FADING * right + sum(map(task.is_right, group.valid)),
        )
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step trains on, and what was drawn for it in vain."""

    groups: tuple[Group, ...]
    dropped: tuple[Group, ...]
    """Groups without signal, not trained on."""
    replaced: int
    """Fresh groups that were drawn in the place of dropped ones."""
    cursor: int
    """Where in the training data the next step begins."""
    rates: Rates
    """How often each kind of example succeeds, as far as a curriculum has to know it."""
    passed_over: int
    """Training examples that the curriculum did not ask."""
    rollout_seconds: float
    reward_seconds: float
    tool_seconds: float = 0.0
    """Of the rollouts' time, what tools took; beside the generator, the most that they can have taken."""
    judged: Mapping[str, int] = field(default_factory=dict)
    """What language models as judges cost: calls and tokens, by kind; empty without one."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Means of what TRL-style rewards logged by `log_metric`."""

    @property
    def drawn(self) -> tuple[Group, ...]:
        """Every group, trained on or not: what the policy's rewards are measured on."""
        return self.groups + self.dropped


class Collector:
    """Makes batches; holds what does not change between steps."""

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
    ) -> None:
        self.config = config
        self.processes = processes or Processes()
        self.task = task
        self.split = split
        self.codec = codec
        self.engine = engine
        self.when_late = when_late
        """Called when a reward has taken longer than its limit."""
        if config.rollout.curriculum > 1:
            check_kinds(task, split)
        self.tools = Tools.of(task.tools, config.tools, state=task.state)
        self.held_out = {task.asks(example) for example in split.held_out}
        self.failures: dict[str, str] = {}
        """The first failure of each reward in this process, with its traceback."""

    def collect(self, step: int, *, cursor: int, rates: Rates = NOTHING_KNOWN) -> Batch:
        """Draw prompts until enough groups have signal, or `rollout.refill` rounds are used up."""
        rollout = self.config.rollout
        kept: list[Group] = []
        silent: list[Group] = []
        times = StageTimes()
        passed_over = 0
        spent = spent_by_judges(self.task.rewards)
        state = TrainerState(global_step=step - 1, max_steps=self.config.run.max_steps)
        context = RewardContext(trainer_state=state, failures=self.failures, when_late=self.when_late)
        for _ in range(1 + rollout.refill):
            missing = rollout.prompts - len(kept)
            if not missing or too_many_failed(kept + silent, limit=self.config.task.max_failed):
                break
            drawn = kept + silent
            candidates, cursor = self.split.take(cursor, missing * rollout.curriculum)
            examples = self._choose(candidates, missing, step=step, drawn=drawn, rates=rates)
            passed_over += len(candidates) - len(examples)
            groups = self._answer(examples, step=step, drawn=drawn, times=times, context=context)
            if rollout.curriculum > 1:
                rates = updated(rates, groups, task=self.task)
            kept += [group for group in groups if has_signal(group)]
            silent += [group for group in groups if not has_signal(group)]
        replaced = len(kept) + len(silent) - rollout.prompts
        if not rollout.refill:  # nothing is dropped: silent groups stay and count in the loss's mean
            kept, silent = kept + silent, []
        return Batch(
            groups=tuple(kept),
            dropped=tuple(silent),
            replaced=replaced,
            cursor=cursor,
            rates=rates,
            passed_over=passed_over,
            rollout_seconds=times.rollout,
            reward_seconds=times.reward,
            tool_seconds=times.tools,
            judged=sum(self.processes.gather(spent_by_judges(self.task.rewards) - spent), Counter()),
            logged=means_of(self.processes.gather(context.metrics)),
        )

    def shown_reward(self, rollout: Rollout) -> float:
        """The overall reward to show: `pca` centres each group on 0, so there the weighted sum is shown."""
        if self.config.algo.combine == "pca":
            return weighted_sum(rollout.rewards, self.task.weights)
        return rollout.reward

    def samples(self, batch: Batch) -> tuple[list[Sample], int, int]:
        """The batch as token sequences, and its size in sequences and tokens, silent members included."""
        algo = self.config.algo
        # A KL penalty or an entropy bonus pulls on members of zero advantage too.
        keep_zero = algo.beta > 0 or algo.entropy_bonus != 0
        samples = to_samples(batch.groups, mask_truncated=algo.mask_truncated, keep_zero=keep_zero)
        sequences, tokens = batch_size(batch.groups, mask_truncated=algo.mask_truncated)
        return samples, sequences, tokens

    def _choose(
        self, candidates: Sequence[Example], count: int, *, step: int, drawn: Sequence[Group], rates: Rates
    ) -> Sequence[Example]:
        if len(candidates) == count:
            return candidates
        seed_parts = (self.config.run.seed, step, len(drawn))
        return choose(candidates, count, task=self.task, rates=rates, seed_parts=seed_parts)

    def _answer(
        self,
        examples: Sequence[Example],
        *,
        step: int,
        drawn: Sequence[Group],
        times: StageTimes,
        context: RewardContext,
    ) -> list[Group]:
        """Answer and score the examples, each process its share; `drawn` are the step's earlier groups."""
        own = ProcessRound()
        with self.processes.together():
            own = self._answer_share(examples, step=step, drawn=drawn, context=context)
        slowest = self.processes.gather(own.times)
        times.rollout += max(each.rollout for each in slowest)
        times.reward += max(each.reward for each in slowest)
        times.tools += max(each.tools for each in slowest)
        return self.processes.joined(own.groups)

    def _answer_share(
        self, examples: Sequence[Example], *, step: int, drawn: Sequence[Group], context: RewardContext
    ) -> ProcessRound:
        check_disjoint((self.task.asks(example) for example in examples), self.held_out)
        times = StageTimes()
        started = time.perf_counter()
        groups = collect(
            examples,
            ask=self.task.ask,
            codec=self.codec,
            engine=self.engine,
            sampling=self.config.rollout.sampling,
            group_size=self.config.rollout.group_size,
            # The count tells apart one example drawn in two rounds of a step.
            seed_parts=(self.config.run.seed, "train", step, len(drawn)),
            tools=self.tools,
            share=self.processes.share,
        )
        answered = time.perf_counter()
        if self.tools is not None:
            times.tools = self.tools.toolbox.seconds_since_asked()
        enough = self.config.task.max_failed * (
            rollouts_in(drawn) + len(examples) * self.config.rollout.group_size
        )
        failed = failures(drawn)
        with TimeLimits(self.config.task.reward_seconds) as limit:
            for number, group in enumerate(groups):
                # In its place: what scoring makes does not add up until garbage is collected in its midst.
                groups[number] = scored = self.score(group, limit, context)
                failed += failures([scored])
                # Slow failures, such as time-outs, are not waited for once there are too many.
                if failed > enough:
                    del groups[number + 1 :]
                    break
        times.rollout = answered - started
        times.reward = time.perf_counter() - answered
        return ProcessRound(groups, times)

    def score(self, group: Group, limit: TimeLimit, context: RewardContext | None = None) -> Group:
        """Reward the answers of a group, each reward within the limit, and compare them."""
        task, algo = self.task, self.config.algo
        group = score_within(limit, group, rewards=task.rewards, weights=task.weights, context=context)
        group = with_combined(group, kind=algo.combine, weights=task.weights)
        group = with_overlong_penalty(
            group,
            max_tokens=self.config.rollout.max_tokens,
            buffer=algo.overlong_buffer,
            penalty=algo.overlong_penalty,
        )
        chosen = partial(agreeing, weights=task.weights) if algo.mean_filter else list
        return with_advantages(group, kind=algo.advantage, weights=task.weights, chosen=chosen)


@dataclass(slots=True)
class StageTimes:
    """Seconds spent so far in a step."""

    rollout: float = 0.0
    reward: float = 0.0
    tools: float = 0.0


@dataclass(slots=True)
class ProcessRound:
    """What one process has of a round."""

    groups: list[Group] = field(default_factory=list)
    times: StageTimes = field(default_factory=StageTimes)


def means_of(logged: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The mean of each metric over what all processes logged."""
    names = sorted({name for own in logged for name in own})
    return {name: fmean(value for own in logged for value in own.get(name, ())) for name in names}


def check_failures(batch: Batch, *, limit: float) -> None:
    """Stop the run when too many rollouts of a step could not be scored."""
    if too_many_failed(batch.drawn, limit=limit):
        share = failures(batch.drawn) / rollouts_in(batch.drawn)
        first = first_error(batch)
        raise InvariantError(
            f"{share:.0%} of the rollouts failed (task.max_failed is {limit:g}); the first: {first}"
        )


def first_error(batch: Batch) -> str | None:
    return next((r.error for group in batch.drawn for r in group.rollouts if r.error is not None), None)


def too_many_failed(groups: Sequence[Group], *, limit: float) -> bool:
    return failures(groups) > limit * rollouts_in(groups)


def failures(groups: Sequence[Group]) -> int:
    return sum(rollout.error is not None for group in groups for rollout in group.rollouts)


def rollouts_in(groups: Sequence[Group]) -> int:
    return sum(len(group.rollouts) for group in groups)


def has_signal(group: Group) -> bool:
    """Whether the group moves the policy: some answer was better than another."""
    return any(rollout.advantage != 0.0 for rollout in group.rollouts)
