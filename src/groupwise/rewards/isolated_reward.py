"""A reward that runs in a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import RolloutError
from groupwise.records import Example, Rollout
from groupwise.rewards.reward_call import (
    Outcome,
    RewardContext,
    RewardFunction,
    outcomes_of,
    takes_batches,
)
from groupwise.rewards.time_limit import TimeLimits
from groupwise.rewards.worker import Job, Worker, WorkerLost


@dataclass(slots=True)
class IsolatedReward:
    """Stands in a task for the function; a direct call runs it here."""

    name: str
    function: RewardFunction
    worker: Worker | None
    """None: its arguments turned out not to travel, and it runs in this process."""

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        return self.function(*arguments, **columns)

    def scored(self, rollouts: Sequence[Rollout], example: Example, context: RewardContext) -> list[Outcome]:
        """Score rollouts in the worker. A call that hangs, or that ends the worker, fails.

        In TRL style the one call is for all rollouts. Otherwise the next ones go on in a new worker.
        """
        assert self.worker is not None
        together = takes_batches(self.function)
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
            except WorkerLost as lost:
                context.when_late()
                outcomes += [RolloutError(str(lost))] * (len(rest) if together else 1)
        return outcomes


def reward_job(function: RewardFunction) -> Job:
    """Return what the worker does with the rollouts of a request."""

    def job(request: Any, seconds: float) -> Iterator[dict[str, Any]]:
        rollouts, example, trainer_state = request
        with TimeLimits(seconds) as limit:
            late: list[bool] = []
            context = RewardContext(
                seconds=seconds, trainer_state=trainer_state, when_late=lambda: late.append(True)
            )
            for outcomes in outcomes_of(function, rollouts, example, limit=limit, context=context):
                replies = [as_reply(one) for one in outcomes]
                yield {"outcomes": replies, "metrics": dict(context.metrics), "late": bool(late)}
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
