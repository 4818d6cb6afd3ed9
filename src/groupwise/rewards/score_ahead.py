"""Run the rewards of a whole batch at the same time: asynchronous ones, and those with several workers.

`score_ahead` puts the outcomes where `runner.score_within` finds them. A call that fails here fails its own
rollout; a call that terminates a worker leaves the batch to be scored group by group.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from groupwise.errors import RolloutError, as_rollout_error
from groupwise.isolation.time_limit import TimeLimitReached, TimeLimits
from groupwise.isolation.worker import Job, UnmovableError, Worker, WorkerLost
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.runner import (
    BadValueError,
    IsolatedReward,
    Outcome,
    RewardContext,
    RewardFunction,
    as_outcome,
    as_reply,
    as_reward,
    call_seconds,
    completed,
    run_limited,
)
from groupwise.rewards.trl_style import is_trl_style

Pair = tuple[Rollout, Example]
ASYNC_JOB = "async "
"""Prefix of the job that runs all calls of an asynchronous reward at the same time."""


def is_concurrent(function: RewardFunction) -> bool:
    """Whether a reward is a coroutine function that is called once for each rollout.

    A function of this package that waits for another process has an attribute `waits`: its calls run in
    threads, at most `at_once` of them.
    """
    inner = getattr(function, "func", function)
    if getattr(inner, "waits", False):
        return True
    inner = inner if inspect.iscoroutinefunction(inner) else getattr(inner, "__call__", inner)  # noqa: B004
    return inspect.iscoroutinefunction(inner) and not is_trl_style(function)


async def await_all(
    function: RewardFunction, pairs: Sequence[Pair], *, seconds: float, concurrency: int
) -> list[Outcome]:
    """Await an asynchronous reward of many rollouts, at most `concurrency` calls at a time."""
    concurrency = min(concurrency, getattr(function, "at_once", concurrency))
    gate, loop = asyncio.Semaphore(concurrency), asyncio.get_running_loop()
    pool = ThreadPoolExecutor(concurrency) if getattr(function, "waits", False) else None

    def call(rollout: Rollout, example: Example) -> Awaitable[Any]:
        return (
            function(rollout, example)
            if pool is None
            else loop.run_in_executor(pool, function, rollout, example)
        )

    async def one(rollout: Rollout, example: Example) -> Outcome:
        async with gate:
            try:
                return as_reward(await asyncio.wait_for(call(rollout, example), seconds))
            except TimeoutError:
                return RolloutError(f"took longer than {seconds:g} s")
            except BadValueError as error:
                return RolloutError(str(error))
            except (KeyboardInterrupt, asyncio.CancelledError, TimeLimitReached):
                raise
            except BaseException as error:  # sys.exit() counts as a failure of the reward, too
                return as_rollout_error(error)

    try:
        return list(await asyncio.gather(*(one(*pair) for pair in pairs)))
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def async_job(function: RewardFunction) -> Job:
    """Return the worker's job that awaits a reward of many rollouts."""

    def job(request: Any, seconds: float) -> Iterator[list[Any]]:
        pairs, limit, concurrency = request
        outcomes = completed(await_all(function, pairs, seconds=limit, concurrency=concurrency))
        yield [as_reply(outcome) for outcome in outcomes]

    return job


def runs_ahead(function: RewardFunction) -> bool:
    """Whether a reward can score many rollouts at the same time: asynchronous, or with several workers."""
    return is_concurrent(getattr(function, "function", function)) or (
        isinstance(function, IsolatedReward) and bool(function.others)
    )


def score_ahead(
    groups: Sequence[Group],
    *,
    rewards: Mapping[str, RewardFunction],
    seconds: float,
    concurrency: int,
    context: RewardContext,
) -> None:
    """Run the rewards that can run at the same time, over all groups, into `context.ready`.

    These are asynchronous rewards, those that score a batch at once, and those that have several workers.
    What is missing afterwards is scored group by group.
    """
    for name, function in rewards.items():
        own = call_seconds(function, seconds)
        if is_concurrent(getattr(function, "function", function)):
            outcomes = awaited_ahead(function, groups, seconds=own, concurrency=concurrency)
        elif hasattr(function, "score_batch"):
            outcomes = batch_ahead(function, groups, seconds=own, concurrency=concurrency)
        elif isinstance(function, IsolatedReward) and function.others:
            outcomes = pooled_ahead(function, groups, replace(context, seconds=seconds))
        else:
            continue
        context.ready.update(((name, key), outcome) for key, outcome in outcomes.items())


def awaited_ahead(
    function: RewardFunction, groups: Sequence[Group], *, seconds: float, concurrency: int
) -> dict[int, Outcome]:
    pairs = [(rollout, group.example) for group in groups for rollout in group.valid]
    at_once = min(concurrency, getattr(function, "at_once", concurrency))
    most = seconds * math.ceil(len(pairs) / at_once) + 1.0
    if isinstance(function, IsolatedReward) and function.worker is not None:
        job = ASYNC_JOB + function.name
        try:
            (replies,) = function.worker.replies(job, (pairs, seconds, concurrency), seconds=most)
        except (WorkerLost, UnmovableError):
            return {}  # one call did this: group by group, it fails its own rollout
        outcomes = [as_outcome(reply) for reply in replies]
    else:
        own = getattr(function, "function", function)
        with TimeLimits(most) as limit:
            returned = run_limited(
                limit,
                lambda: completed(await_all(own, pairs, seconds=seconds, concurrency=concurrency)),
                RewardContext(seconds=most),
            )
        if isinstance(returned, RolloutError):
            return {}
        outcomes = returned
    return {id(rollout): outcome for (rollout, _), outcome in zip(pairs, outcomes, strict=True)}


def batch_ahead(
    function: RewardFunction, groups: Sequence[Group], *, seconds: float, concurrency: int
) -> dict[int, Outcome]:
    """Score all groups by a reward that takes them together: a reward model or a pairwise judge."""
    most = seconds * max(1, len(groups))
    with TimeLimits(most) as limit:
        found = run_limited(
            limit,
            lambda: function.score_batch(groups, concurrency=concurrency),  # type: ignore[attr-defined]
            RewardContext(seconds=most),
        )
    if isinstance(found, RolloutError):
        return {id(rollout): found for group in groups for rollout in group.valid}
    return {
        id(rollout): outcome
        for group, outcomes in zip(groups, found, strict=True)
        for rollout, outcome in zip(group.valid, outcomes, strict=True)
    }


def pooled_ahead(
    function: IsolatedReward, groups: Sequence[Group], context: RewardContext
) -> dict[int, Outcome]:
    """Score with several workers at a time; a thread for each gives it the next part of the groups."""
    assert function.worker is not None
    workers = (function.worker, *function.others)
    total = sum(len(group.valid) for group in groups)
    size = total if is_trl_style(function.function) else math.ceil(total / (4 * len(workers)))
    parts = [
        (group.valid[start : start + size], group.example)
        for group in groups
        for start in range(0, len(group.valid), max(1, size))
    ]
    waiting, outcomes = iter(parts), {}
    lock = threading.Lock()

    def work(worker: Worker) -> None:
        own = replace(function, worker=worker, others=())
        while True:
            with lock:
                part = next(waiting, None)
            if part is None:
                return
            try:
                scored = own.scored(*part, context)
            except UnmovableError:
                return
            with lock:
                outcomes.update({id(rollout): one for rollout, one in zip(part[0], scored, strict=True)})

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
