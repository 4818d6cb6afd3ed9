"""Requests that join and leave while others run get what they would get alone."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.config.sections import EngineConfig
from groupwise.engine.blocks import BlockPool
from groupwise.engine.engine import Engine
from groupwise.engine.live import Busy, LiveEngine, News
from groupwise.engine.live_scheduler import Job, LiveScheduler
from groupwise.engine.live_steps import PlainSteps, Steps
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling

PROMPT = (40, 41, 42, 43, 44)
SETTINGS = [
    Sampling(max_tokens=7),
    Sampling(max_tokens=12, temperature=0.0),
    Sampling(max_tokens=9, temperature=1.4, top_k=20),
    Sampling(max_tokens=5),
]
JOBS = [
    Job(prompt=PROMPT[: 2 + n % 4], seeds=tuple(range(n, n + 1 + n % 3)), sampling=SETTINGS[n % 4])
    for n in range(9)
]


def alone(policy: Policy, job: Job) -> list[Completion]:
    (completions,) = Engine(policy, EngineConfig(block_size=4)).generate(
        [Request(prompt=job.prompt, seeds=job.seeds)], job.sampling
    )
    return completions


def graph_steps(policy: Policy, scheduler: LiveScheduler) -> Steps:
    """The GPU's way, its kernels interpreted."""
    pytest.importorskip("triton")
    import interpreted  # noqa: F401  (before any kernel is imported)
    from groupwise.engine.cuda.live import GraphSteps

    steps = GraphSteps(policy, scheduler, policy.end_tokens)
    steps.runner.refresh()
    return steps


def plain_steps(policy: Policy, scheduler: LiveScheduler) -> Steps:
    return PlainSteps(policy, scheduler, policy.end_tokens)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize("make", [plain_steps, graph_steps])
def test_jobs_that_join_one_by_one_end_as_if_alone(small_policy, make: Any):
    pool = BlockPool(24, block_size=4)
    scheduler = LiveScheduler(slots=4, pool=pool, context=24)
    with torch.no_grad():
        steps: Steps = make(small_policy, scheduler)
        jobs = JOBS if make is plain_steps else JOBS[:4]  # interpreting takes its time
        coming = list(jobs)
        found: dict[tuple[Job, int], Completion] = {}
        while coming or scheduler.busy:
            if coming:
                scheduler.enter(coming.pop(0))
            for sequence, completion in steps.advance():
                found[scheduler.forget(sequence), sequence.member] = completion
            assert len(scheduler.running) <= 4
    assert pool.free == pool.count
    assert scheduler.preempted == 0
    for job in jobs:
        for member, expected in enumerate(alone(small_policy, job)):
            got = found[job, member]
            assert (got.tokens, got.finish) == (expected.tokens, expected.finish)
            assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


class Inbox:
    """Collects what a live engine delivers."""

    def __init__(self) -> None:
        self.news: queue.Queue[News] = queue.Queue()
        self.errors: list[BaseException] = []

    def deliver(self, news: Any) -> None:
        for part in news:
            self.news.put(part)

    def engine(self, policy: Policy, **settings: Any) -> LiveEngine:
        usual = {"slots": 2, "context": 64, "waiting": 3}
        return LiveEngine(policy, deliver=self.deliver, failed=self.errors.append, **{**usual, **settings})


def test_news_add_up_to_the_answer(small_policy):
    inbox = Inbox()
    engine = inbox.engine(small_policy)
    engine.start()
    job = replace(JOBS[0], sampling=Sampling(max_tokens=20))
    engine.submit(job)
    parts = []
    while not parts or parts[-1].finish is None:
        parts.append(inbox.news.get(timeout=30))
    engine.close()
    (expected,) = alone(small_policy, job)
    assert tuple(token for part in parts for token in part.tokens) == expected.tokens
    assert len(parts) > 1
    assert not inbox.errors


def test_too_many_are_refused_and_so_is_what_can_never_run(small_policy):
    engine = Inbox().engine(small_policy)  # not started: everyone waits
    job = Job(prompt=PROMPT, seeds=(1,), sampling=Sampling(max_tokens=8))
    for _ in range(5):
        engine.submit(replace(job))
    with pytest.raises(Busy):
        engine.submit(replace(job))
    with pytest.raises(ValueError, match="exceed the context of 64"):
        engine.submit(replace(job, sampling=Sampling(max_tokens=64)))
    with pytest.raises(ValueError, match="do not fit at once"):
        engine.submit(replace(job, seeds=(1, 2, 3)))


def test_cancelling_frees_everything(small_policy):
    inbox = Inbox()
    engine = inbox.engine(small_policy)
    engine.start()
    jobs = [Job(prompt=PROMPT, seeds=(n,), sampling=Sampling(max_tokens=59)) for n in range(4)]
    for job in jobs:
        engine.submit(job)
    inbox.news.get(timeout=30)
    for job in jobs:
        engine.cancel(job)
    last = Job(prompt=PROMPT, seeds=(9,), sampling=Sampling(max_tokens=3))
    engine.submit(last)
    while (part := inbox.news.get(timeout=30)).job is not last or part.finish is None:
        pass
    engine.close()
    assert engine.load == (0, 0)
    assert engine.scheduler.pool.free == engine.scheduler.pool.count


def test_a_failure_is_told(small_policy, monkeypatch):
    inbox = Inbox()
    engine = inbox.engine(small_policy)

    def broken(steps: Steps) -> list[News]:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine, "_news", broken)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    engine.start()
    engine.submit(Job(prompt=PROMPT, seeds=(1,), sampling=Sampling(max_tokens=3)))
    engine._thread.join(30)
    assert [str(error) for error in inbox.errors] == ["broken"]
