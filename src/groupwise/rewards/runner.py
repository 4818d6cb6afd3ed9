"""Run reward functions over the rollouts of a group and combine their values into one reward.

A reward is a function in one of two styles, detected by its parameter names:

    (rollout, example) -> float | bool | None          called once for each rollout
    (prompts, completions, **columns) -> list          TRL style, called once for each group

Either style may be `async`. `trl_style` says what a TRL-style function gets.

None means that the reward does not apply. An exception, a timeout or a non-finite value marks the rollout
as failed (in TRL style: every rollout of the group). A failure never becomes a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, SupportsFloat, TypeVar

from groupwise.errors import RolloutError, as_rollout_error, copy_notes, readable
from groupwise.isolation.time_limit import AnyLimit, TimeLimit, TimeLimitReached, TimeLimits, Watched, is_ours
from groupwise.isolation.worker import Job, UnmovableError, Worker, WorkerLost, described
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.trl_style import TEXT_COMPLETIONS, batch_arguments, is_trl_style
from groupwise.tracking.run_folder import LOGGER

RewardFunction = Callable[..., Any]
Outcome = float | None | RolloutError
Result = TypeVar("Result")

MAX_REWARD = 1e30
"""Largest magnitude of a reward: it must fit into float32, and sums and squares must not overflow."""


class BadValueError(Exception):
    """A reward function returned a value that is not a valid reward."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress of the run, with the field names of transformers' `TrainerState`."""

    global_step: int = 0
    """Completed steps."""
    max_steps: int = 0
    epoch: float = 0.0
    """Completed passes over the training examples; 0 for generated ones, which have no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """State that rewards read from the run, and the metrics and failures they record."""

    seconds: float = 0.0
    """Time limit of one call, in seconds."""
    trainer_state: TrainerState = TrainerState()
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Values that TRL-style rewards logged with `log_metric`."""
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Values that TRL-style rewards logged with `log_extra`, by the id of the rollout and the column."""
    failures: dict[str, str] = field(default_factory=dict)
    """The first failure of each reward, with its traceback."""
    when_late: Callable[[], None] = lambda: None
    """Callback for each call that exceeded its time limit or terminated its worker."""
    ready: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    """Outcomes of `score_ahead`, by the reward's name and the id of the rollout."""

    def log_metric(self, name: str, value: SupportsFloat) -> None:
        """Log a number, as TRL's `log_metric` does. Ignore NaN and inf."""
        if math.isfinite(number := float(value)):
            self.metrics.setdefault(readable(str(name)), []).append(number)

    def log_extra(self, rollouts: Sequence[Rollout], column: str, values: Sequence[Any]) -> None:
        """Log a column with one value for each completion, as TRL's `log_extra` does."""
        values = [json.loads(json.dumps(value, default=str)) for value in values]
        if len(values) != len(rollouts):
            raise ValueError(
                f"log_extra({column!r}) needs one value for each of the {len(rollouts)} completions; "
                f"got {len(values)}"
            )
        for rollout, value in zip(rollouts, values, strict=True):
            self.extras.setdefault(id(rollout), {})[readable(str(column))] = value

    def failed(self, name: str, error: RolloutError) -> None:
        trace = "".join(getattr(error, "__notes__", ()))
        self.failures.setdefault(name, f"{error}\n{trace}" if trace else str(error))


def call_reward(
    function: RewardFunction,
    rollouts: Sequence[Rollout],
    example: Example,
    *,
    limit: AnyLimit,
    context: RewardContext,
) -> Iterator[list[Outcome]]:
    """Call a reward and yield the outcomes of each call: of one rollout, or in TRL style of all rollouts."""
    if not is_trl_style(function):
        for rollout in rollouts:
            work = partial(score_one, function, rollout, example)
            yield [run_limited(limit, work, context)]
        return

    def call_batch() -> list[float | None]:
        values = completed(function(**batch_arguments(function, rollouts, example, context)))
        try:
            values = list(islice(values, len(rollouts) + 1))  # it may be an infinite generator
        except TypeError:
            raise BadValueError(f"returned {type(values).__name__}, not a list of numbers") from None
        if len(values) != len(rollouts):
            returned = "too many" if len(values) > len(rollouts) else str(len(values))
            raise BadValueError(f"returned {returned} values for {len(rollouts)} completions")
        return [as_reward(value) for value in values]

    outcome = run_limited(limit, call_batch, context)
    if isinstance(outcome, RolloutError):
        if isinstance(rollouts[0].prompt, str) and "string indices" in str(outcome):
            outcome = copy_notes(outcome, RolloutError(f"{outcome}; {TEXT_COMPLETIONS}"))
        yield [outcome] * len(rollouts)
    else:
        yield list(outcome)


def call_seconds(function: RewardFunction, seconds: float) -> float:
    """Return the time limit of a call. A reward of this package that asks a server may have a longer one."""
    inner = getattr(function, "function", function)
    return max(seconds, float(getattr(inner, "own_seconds", 0.0)))


def score_one(function: RewardFunction, rollout: Rollout, example: Example) -> float | None:
    return as_reward(completed(function(rollout, example)))


def run_limited(limit: AnyLimit, work: Callable[[], Result], context: RewardContext) -> Result | RolloutError:
    """Run `work` within the limit. Return its result, or its failure as a `RolloutError`; raise Ctrl-C."""
    try:
        with limit:
            return work()
    except TimeLimitReached:
        context.when_late()
        return RolloutError(f"took longer than {context.seconds:g} s")
    except BadValueError as error:
        return RolloutError(str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() and cancelled tasks count as failures of the reward, too
        return as_rollout_error(error)


def completed(result: Any) -> Any:
    """Return a result, awaiting it if needed, also where an event loop is already running (in a notebook)."""
    if isinstance(result, float) or not inspect.isawaitable(result):  # isawaitable is slow: check float first
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_awaitable(result)
    return in_thread(lambda: run_awaitable(result))


def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread and wait for it. A time limit abandons the daemon thread."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def run_awaitable(result: Awaitable[Any]) -> Any:
    """Await in a new event loop."""
    tasks: list[asyncio.Task[Any] | None] = []

    async def awaited() -> Any:
        tasks.append(asyncio.current_task())
        return await result

    try:
        return asyncio.run(awaited())
    finally:
        # An interruption ends the loop before anyone reads the task's exception. A task whose exception was
        # never read is logged when it is collected, at any later time.
        for task in tasks:
            if task is not None and task.done() and not task.cancelled():
                task.exception()


def as_reward(value: Any) -> float | None:
    """Return a reward as a float, or None for None. Raise BadValueError for any other value."""
    if value is None:
        return None
    if not isinstance(value, float) and not isinstance(value, SupportsFloat):  # the protocol check is slow
        raise BadValueError(f"returned {type(value).__name__}, not a number")
    try:
        number = float(value)
    except Exception as error:
        raise BadValueError(
            f"returned a {type(value).__name__} that cannot be converted to a float: {error}"
        ) from error
    if not -MAX_REWARD <= number <= MAX_REWARD:  # also true for NaN
        if math.isfinite(number):
            raise BadValueError(
                f"returned {number}; a reward must lie between -{MAX_REWARD:g} and {MAX_REWARD:g}"
            )
        raise BadValueError(f"returned {number}; a reward must be finite")
    return number


@dataclass(slots=True)
class IsolatedReward:
    """Replace a reward function in a task by one that runs in a worker. A direct call runs it here."""

    name: str
    function: RewardFunction
    worker: Worker | None
    """None if its arguments cannot be pickled: the function then runs in this process."""
    others: tuple[Worker, ...] = ()
    """Further workers, which score other groups at the same time (`task.reward_workers`)."""

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        return self.function(*arguments, **columns)

    def scored(self, rollouts: Sequence[Rollout], example: Example, context: RewardContext) -> list[Outcome]:
        """Score rollouts in the worker. A call fails if it hangs or terminates the worker.

        In TRL style one call scores all rollouts. Otherwise a new worker scores the remaining rollouts.
        """
        assert self.worker is not None
        is_batch = is_trl_style(self.function)
        outcomes: list[Outcome] = []
        while len(outcomes) < len(rollouts):
            rest = rollouts[len(outcomes) :]
            request = (rest, example, context.trainer_state)
            try:
                for reply in self.worker.replies(self.name, request, seconds=context.seconds):
                    outcomes += map(as_outcome, reply["outcomes"])
                    if reply["late"]:
                        context.when_late()
                    for name, values in reply["metrics"].items():
                        context.metrics.setdefault(name, []).extend(values)
                    for rollout, extra in zip(rest, reply["extras"], strict=False):
                        context.extras.setdefault(id(rollout), {}).update(extra)
            except WorkerLost as lost:
                context.when_late()
                outcomes += [RolloutError(str(lost))] * (len(rest) if is_batch else 1)
        return outcomes


def reward_job(function: RewardFunction) -> Job:
    """Return the job that scores the rollouts of a request inside the worker."""

    def job(request: Any, seconds: float) -> Iterator[dict[str, Any]]:
        rollouts, example, trainer_state = request
        with TimeLimits(seconds) as limit:
            late: list[bool] = []
            context = RewardContext(
                seconds=seconds, trainer_state=trainer_state, when_late=lambda: late.append(True)
            )
            for outcomes in call_reward(function, rollouts, example, limit=limit, context=context):
                replies = [as_reply(one) for one in outcomes]
                extras = [context.extras.get(id(rollout), {}) for rollout in rollouts]
                yield {
                    "outcomes": replies,
                    "metrics": dict(context.metrics),
                    "extras": extras if context.extras else [],
                    "late": bool(late),
                }
                context.metrics.clear()
                late.clear()

    return job


def as_reply(outcome: Outcome) -> float | dict[str, str] | None:
    if isinstance(outcome, RolloutError):
        return {"error": str(outcome), "trace": "".join(getattr(outcome, "__notes__", ()))}
    return outcome


def as_outcome(reply: Any) -> Outcome:
    if not isinstance(reply, dict):
        return None if reply is None else float(reply)
    error = RolloutError(reply["error"])
    if reply["trace"]:
        error.add_note(reply["trace"])
    return error


def score_group(
    group: Group, *, rewards: Mapping[str, RewardFunction], weights: Mapping[str, float], seconds: float
) -> Group:
    """Return the group with each rollout's rewards and their weighted sum, or its error.

    The default weight is 1; a reward of weight 0 is only a metric. Rollouts that already failed are not
    scored. `seconds` limits each call (see `time_limit` for the exceptions).
    """
    with TimeLimits(seconds) as limit:
        return score_within(limit, group, rewards=rewards, weights=weights)


def score_within(
    limit: TimeLimit,
    group: Group,
    *,
    rewards: Mapping[str, RewardFunction],
    weights: Mapping[str, float],
    context: RewardContext | None = None,
) -> Group:
    """Score a group as `score_group` does, under a time limit shared by many groups."""
    context = replace(context or RewardContext(), seconds=limit.seconds)
    members = {index: rollout for index, rollout in enumerate(group.rollouts) if rollout.error is None}
    parts: dict[int, dict[str, float]] = {index: {} for index in members}
    errors: dict[int, str] = {}
    for name, function in rewards.items():
        if not members:
            break
        keys = [(name, id(rollout)) for rollout in members.values()]
        if all(key in context.ready for key in keys):
            outcomes = [context.ready[key] for key in keys]
        else:
            seconds, rollouts = call_seconds(function, limit.seconds), list(members.values())
            with nullcontext(limit) if seconds == limit.seconds else TimeLimits(seconds) as own:
                timed = replace(context, seconds=seconds)
                outcomes = score_rollouts(function, rollouts, group.example, limit=own, context=timed)
        for index, outcome in zip(list(members), outcomes, strict=True):
            if isinstance(outcome, RolloutError):
                errors[index] = f"reward {name}: {outcome}"
                context.failed(name, outcome)
                del members[index]
            elif outcome is not None:
                parts[index][name] = outcome

    def scored(index: int, rollout: Rollout) -> Rollout:
        if index not in parts:
            return rollout
        extra = context.extras.pop(id(rollout), None)
        if index in errors:
            return rollout.scored(error=errors[index])
        if not parts[index]:
            return rollout.scored(error="no reward applies: every reward function returned None")
        total = weighted_sum(parts[index], weights)
        if not -MAX_REWARD <= total <= MAX_REWARD:
            return rollout.scored(error=f"the weighted sum of the rewards is {total}; lower task.weights")
        return rollout.scored(rewards=parts[index], reward=total, extra=extra)

    return replace(group, rollouts=tuple(scored(i, r) for i, r in enumerate(group.rollouts)))


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of rewards; the default weight is 1."""
    return sum([weights.get(name, 1.0) * value for name, value in rewards.items()])


def score_rollouts(
    function: RewardFunction,
    rollouts: Sequence[Rollout],
    example: Example,
    *,
    limit: TimeLimit,
    context: RewardContext,
) -> list[Outcome]:
    """Return the outcome of each rollout, from a worker process or from this one."""
    if isinstance(function, IsolatedReward):
        if function.worker is not None:
            try:
                return function.scored(rollouts, example, context)
            except UnmovableError as error:
                LOGGER.warning("%s runs in the trainer's process: %s", function.name, error)
                function.worker = None
        function = function.function
    if hasattr(function, "score_batch"):
        group = Group(example=example, rollouts=tuple(rollouts))
        scores = run_limited(limit, lambda: function.score_batch([group], concurrency=64)[0], context)
        return [scores] * len(rollouts) if isinstance(scores, RolloutError) else list(scores)
    guard = limit if is_ours(function) else Watched(limit, f"the reward {described(function)}")
    calls = call_reward(function, rollouts, example, limit=guard, context=context)
    return [outcome for outcomes in calls for outcome in outcomes]
