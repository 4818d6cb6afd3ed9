"""Requests that join and leave while others run get what they would get alone."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine import prefill, sampler
from groupwise.engine.engine import Engine
from groupwise.engine.sampler import Alternatives, Penalties
from groupwise.engine.scheduler import BlockPool, Prefix
from groupwise.engine.scheduler import Sequence as Member
from groupwise.engine.serving.serving_engine import Busy, ServingEngine, StreamChunk
from groupwise.engine.serving.serving_scheduler import CPUSteps, DecodeSteps, Job, ServingScheduler
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling
from tests.support.naive_distribution import naive_logprobs
from tests.support.small_models import small_model

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


interpreting = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""Numpy's."""


def alone(policy: Policy, job: Job) -> list[Completion]:
    (completions,) = Engine(policy, EngineConfig(block_size=4)).generate(
        [Request(prompt=job.prompt, seeds=job.seeds)], job.sampling
    )
    return completions


def graph_steps(policy: Policy, scheduler: ServingScheduler) -> DecodeSteps:
    """The GPU's way, its kernels interpreted."""
    pytest.importorskip("triton")
    import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)
    from groupwise.engine.serving.cuda_serving import CUDASteps

    steps = CUDASteps(policy, scheduler, policy.end_tokens)
    steps.runner.refresh()
    return steps


def plain_steps(policy: Policy, scheduler: ServingScheduler) -> DecodeSteps:
    return CPUSteps(policy, scheduler, policy.end_tokens)


class IssuedStep(NamedTuple):
    """What the graph runner was asked for."""

    rows: int
    likely: bool
    penalized: bool


def issued_steps(steps: Any, monkeypatch: pytest.MonkeyPatch) -> list[IssuedStep]:
    """Record the steps of a graph runner; the list grows as it runs."""
    issued: list[IssuedStep] = []
    step = steps.runner.step

    def recorded(scheduler: Any, slots: Any, sampling: Sampling, **options: Any) -> None:
        issued.append(IssuedStep(len(slots), options["likely"], options["penalized"]))
        step(scheduler, slots, sampling, **options)

    monkeypatch.setattr(steps.runner, "step", recorded)
    return issued


def ending(
    steps: DecodeSteps, scheduler: ServingScheduler, jobs: Sequence[Job] = ()
) -> Iterator[tuple[Member, Completion]]:
    """Let jobs enter, and yield who ends until nobody is left."""
    for job in jobs:
        scheduler.enter(job)
    while scheduler.busy:
        yield from steps.advance()


@interpreting
@pytest.mark.parametrize("make", [plain_steps, graph_steps])
def test_jobs_that_join_one_by_one_end_as_if_alone(small_policy, make: Any):
    pool = BlockPool(24, block_size=4)
    scheduler = ServingScheduler(slots=4, pool=pool, context=24)
    with torch.no_grad():
        steps: DecodeSteps = make(small_policy, scheduler)
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


@interpreting
def test_answers_of_different_temperatures_share_a_step(small_policy, monkeypatch):
    scheduler = ServingScheduler(slots=4, pool=BlockPool(24, block_size=4), context=24)
    jobs = [
        Job(prompt=PROMPT, seeds=(1,), sampling=Sampling(max_tokens=3, temperature=heat))
        for heat in (0.6, 1.0, 1.4)
    ]
    with torch.no_grad():
        steps: Any = graph_steps(small_policy, scheduler)
        issued = issued_steps(steps, monkeypatch)
        found = {scheduler.forget(who): wrote for who, wrote in ending(steps, scheduler, jobs)}
    assert [step.rows for step in issued] == [3, 3]
    for job in jobs:
        (expected,) = alone(small_policy, job)
        assert found[job].tokens == expected.tokens
        assert found[job].logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_job_without_a_prompt_is_refused():
    scheduler = ServingScheduler(slots=4, pool=BlockPool(24, block_size=4), context=24)
    with pytest.raises(ValueError, match="the prompt is empty"):
        scheduler.check(Job(prompt=(), seeds=(1,), sampling=Sampling(max_tokens=2)))


@interpreting
def test_short_prompts_in_a_row_of_fixed_size_are_what_a_plain_pass_computes(small_policy, monkeypatch):
    scheduler = ServingScheduler(slots=4, pool=BlockPool(24, block_size=4), context=24)
    texts = [PROMPT, PROMPT[:2], PROMPT[1:4]]
    with torch.no_grad():
        steps: Any = graph_steps(small_policy, scheduler)
        from groupwise.engine.serving import cuda_serving

        monkeypatch.setattr(cuda_serving, "SIZES", (8, 12))
        monkeypatch.setattr(cuda_serving, "PROMPTS", 3)
        cache, hidden, plain = steps.runner.cache, steps.runner.hidden, steps.runner.prefill
        idle = scheduler.pool.count
        graphs = cuda_serving.PrefillGraphs(small_policy, cache, idle_block=idle)
        rows = graphs.rows

        def computed(texts: Sequence[tuple[int, ...]], how: Any) -> tuple[list[torch.Tensor], list[Any]]:
            cache.keys.zero_()
            cache.values.zero_()
            prefixes = [Prefix(tokens=text, blocks=[3 * n, 3 * n + 1]) for n, text in enumerate(texts)]
            how(prefixes)
            assert [prefix.done for prefix in prefixes] == [len(prefix.tokens) for prefix in prefixes]
            left = [stored[:, :idle].clone() for stored in (cache.keys, cache.values)]
            return left, [prefix.logits_V for prefix in prefixes]

        def in_rows(prefixes: list[Prefix]) -> None:
            graphs.compute(prefixes, hidden)

        for chosen, size in ((texts, 12), (texts[:2], 8), (texts[1:], 8), (texts, 12)):
            torch.testing.assert_close(computed(chosen, in_rows), computed(chosen, plain), atol=1e-5, rtol=0)
            assert size in rows
        for too_much in ([PROMPT, PROMPT, PROMPT], [PROMPT[:1]] * 4):
            before = dict(rows)
            torch.testing.assert_close(computed(too_much, in_rows), computed(too_much, plain))
            assert rows == before
        computed([PROMPT[:1]] * 2, in_rows)  # what the row held before is left alone
        assert not cache.keys[:, [1, 2, 4]].any()


class Late:
    """Prompts that are computed at once, but are known to be only when asked for the third time."""

    def __init__(self) -> None:
        self.asked, self.waited = 0, False

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def wait(self) -> None:
        self.waited = True


@interpreting
@pytest.mark.parametrize("stop", [(), ("a", "e", "\n")])
def test_drafted_tokens_end_at_each_request_s_limit_and_stop_strings(small_policy, stop, monkeypatch):
    """All requests have the same settings but for limits, so steps have several lanes a sequence."""
    jobs = [
        Job(
            prompt=PROMPT[: 2 + n],
            seeds=(n, n + 1),
            sampling=Sampling(max_tokens=most, temperature=0.1, stop=stop),
        )
        for n, most in enumerate((11, 3, 8))
    ]
    pool = BlockPool(40, block_size=4)
    scheduler = ServingScheduler(slots=6, pool=pool, context=24)
    with torch.no_grad():
        steps: Any = graph_steps(small_policy, scheduler)
        from groupwise.engine.cuda.speculation import Pace

        widths: list[int] = []
        monkeypatch.setattr(Pace, "width", lambda self, sequences: 4)
        monkeypatch.setattr(Pace, "gained", lambda self, counts, width: widths.append(width))
        found: dict[tuple[Job, int], Completion] = {}
        for member, completion in ending(steps, scheduler, jobs):
            found[scheduler.forget(member), member.member] = completion
    assert 4 in widths
    assert pool.free == pool.count
    for job in jobs:
        for member, expected in enumerate(alone(small_policy, job)):
            assert found[job, member].tokens == expected.tokens
            assert found[job, member].finish == expected.finish
            assert found[job, member].logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@interpreting
def test_drafts_take_no_block_beyond_what_a_request_has_reserved(small_policy, monkeypatch):
    """The cache holds exactly prompt and completion of four requests, and every draft is wrong."""
    jobs = [Job(prompt=PROMPT[:8], seeds=(n,), sampling=Sampling(max_tokens=16)) for n in range(4)]
    pool = BlockPool(4 * 24 // 4, block_size=4)
    scheduler = ServingScheduler(slots=4, pool=pool, context=24)
    with torch.no_grad():
        steps: Any = graph_steps(small_policy, scheduler)
        from groupwise.engine.cuda.speculation import Pace

        monkeypatch.setattr(Pace, "width", lambda self, sequences: 4)
        ended = dict(ending(steps, scheduler, jobs))
    assert sorted(len(completion.tokens) for completion in ended.values()) == [16] * 4
    assert scheduler.preempted == 0
    assert pool.free == pool.count


@interpreting
def test_others_go_on_while_prompts_are_computed_and_who_is_cancelled_meanwhile_leaves_nothing(
    small_policy, monkeypatch
):
    pool = BlockPool(24, block_size=4)
    scheduler = ServingScheduler(slots=4, pool=pool, context=24)
    first, second, third = (
        Job(prompt=PROMPT[:count], seeds=(count,), sampling=Sampling(max_tokens=12)) for count in (3, 4, 5)
    )
    events: list[Late] = []

    def run(stream: Any, work: Any) -> Late:
        work()
        events.append(Late())
        return events[-1]

    with torch.no_grad():
        steps: Any = graph_steps(small_policy, scheduler)
        from groupwise.engine.serving import cuda_serving

        monkeypatch.setattr(cuda_serving.SideStream, "run", run)
        scheduler.enter(first)
        steps.advance()
        assert events[0].waited, "nobody runs who could go on"
        steps.known[[slot for slot in range(4) if slot != scheduler.running[0].slot]] = 7  # what others left
        scheduler.enter(second)
        scheduler.enter(third)
        steps.advance()
        joining = [sequence.slot for sequence in scheduler.running if sequence.prefix.tokens != first.prompt]
        assert steps.known[joining].tolist() == [0, 0]
        (going,) = [sequence for sequence in scheduler.running if sequence.prefix.tokens == first.prompt]
        before = scheduler.length[going.slot]
        steps.advance()
        assert scheduler.length[going.slot] > before
        assert not events[1].waited
        for member in scheduler.drop(third):
            scheduler.forget(member)
        found = {scheduler.forget(who): wrote for who, wrote in ending(steps, scheduler)}
    assert events[1].waited
    assert pool.free == pool.count
    assert {job: done.tokens for job, done in found.items()} == {
        job: alone(small_policy, job)[0].tokens for job in (first, second)
    }


ASKING = [
    Job(prompt=PROMPT, seeds=(1,), sampling=Sampling(max_tokens=3), alternatives=20),
    Job(
        prompt=PROMPT[:3], seeds=(2,), sampling=Sampling(max_tokens=4)
    ),  # the same settings, but does not ask
    Job(prompt=PROMPT, seeds=(3,), sampling=Sampling(max_tokens=3, temperature=0.0), alternatives=2),
    Job(
        prompt=PROMPT, seeds=(4,), sampling=Sampling(max_tokens=3, temperature=1.4, top_k=9), alternatives=20
    ),
]


@torch.no_grad()
def naive_alternatives(job: Job, written: Completion) -> list[Alternatives]:
    """The best of one plain forward pass over prompt and completion."""
    row = torch.tensor([job.prompt + written.tokens])
    logits_TV = small_model()(row).logits[0, len(job.prompt) - 1 : -1]
    ranked = []
    for logits_V in logits_TV:
        pairs = enumerate(naive_logprobs(logits_V, job.sampling))
        possible = [pair for pair in pairs if pair[1] > -math.inf]
        ranked.append(tuple(sorted(possible, key=lambda pair: -pair[1])[: job.alternatives]))
    return ranked


@interpreting
@pytest.mark.parametrize("make", [plain_steps, graph_steps])
def test_who_asks_is_told_the_likeliest_tokens_and_nobody_draws_otherwise(small_policy, make: Any):
    scheduler = ServingScheduler(slots=4, pool=BlockPool(24, block_size=4), context=24)
    found: dict[Job, tuple[Completion, list[Alternatives]]] = {}
    with torch.no_grad():
        steps: DecodeSteps = make(small_policy, scheduler)
        for sequence, completion in ending(steps, scheduler, ASKING):
            told = scheduler.unsent.get(sequence, [])
            found[scheduler.forget(sequence)] = completion, told
    assert not scheduler.unsent
    for job in ASKING:
        completion, told = found[job]
        assert completion.tokens == alone(small_policy, job)[0].tokens
        if not job.alternatives:
            assert told == []
            continue
        for pairs, expected in zip(told, naive_alternatives(job, completion), strict=True):
            assert [token for token, _ in pairs] == [token for token, _ in expected]
            assert [value for _, value in pairs] == pytest.approx([value for _, value in expected], abs=1e-4)
        for pairs, token, own in zip(told, completion.tokens, completion.logprobs, strict=True):
            assert dict(pairs).get(token, own) == own
    assert [len(pairs) for pairs in found[ASKING[3]][1]] == [9, 9, 9]  # no others can be drawn


@interpreting
@pytest.mark.parametrize("make", [plain_steps, graph_steps])
def test_a_prompt_is_scored_as_a_plain_forward_pass_would(small_policy, make: Any, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 6)  # it takes two passes
    monkeypatch.setattr(sampler, "LOGITS_CHUNK", 4)
    asking = Job(
        prompt=tuple(range(50, 61)),
        seeds=(1,),
        sampling=Sampling(max_tokens=1),
        alternatives=3,
        scores_prompt=True,
    )
    beside = replace(asking, prompt=PROMPT, scores_prompt=False)
    scheduler = ServingScheduler(slots=4, pool=BlockPool(24, block_size=4), context=24)
    with torch.no_grad():
        steps: DecodeSteps = make(small_policy, scheduler)
        scheduler.enter(beside)
        scheduler.enter(asking)
        ended = {scheduler.job_of(sequence): sequence for sequence, _ in steps.advance()}
        ended |= {scheduler.job_of(sequence): sequence for sequence, _ in steps.advance()}
        logprobs_TV = small_model()(torch.tensor([asking.prompt])).logits[0].log_softmax(-1)
    assert ended[beside].prefix.scores is None
    found = ended[asking].prefix.scores
    assert found is not None
    for place, logprobs_V, token in zip(found.positions, logprobs_TV[:-1], asking.prompt[1:], strict=True):
        best = logprobs_V.topk(3)
        assert [token for token, _ in place] == [token, *best.indices.tolist()]
        expected = [float(logprobs_V[token]), *best.values.tolist()]
        assert [value for _, value in place] == pytest.approx(expected, abs=1e-4)


@interpreting
def test_steps_of_those_who_did_not_ask_are_the_ones_there_always_were(small_policy, monkeypatch):
    scheduler = ServingScheduler(slots=4, pool=BlockPool(24, block_size=4), context=24)
    with torch.no_grad():
        steps: Any = graph_steps(small_policy, scheduler)
        issued = issued_steps(steps, monkeypatch)
        for _ in ending(steps, scheduler, ASKING[:2]):
            pass
    # Both run together while the one that asks is there; its neighbour, which writes more, goes on alone.
    assert [(step.rows, step.likely) for step in issued] == [(2, True), (2, True), (1, False)]
    assert steps.runner.status()[0].shape[0] == 4


PENALIZED = [
    Job(
        prompt=PROMPT,
        seeds=(1, 2),
        sampling=Sampling(max_tokens=5, temperature=0.0),
        penalties=Penalties(bias=((60, 12.0), (61, 11.0), (40, 10.5)), frequency=0.7, presence=0.4),
    ),
    Job(
        prompt=PROMPT[:3],
        seeds=(3,),
        sampling=Sampling(max_tokens=4, temperature=1.3, top_k=30),
        penalties=Penalties(bias=((41, 6.0), (70, -100.0)), repetition=3.0),
        alternatives=4,
    ),
    Job(prompt=PROMPT, seeds=(4,), sampling=Sampling(max_tokens=6)),  # shares steps, has none
    Job(
        prompt=PROMPT,
        seeds=(5,),
        sampling=Sampling(max_tokens=4),
        penalties=Penalties(bias=((3, 9.0),), frequency=-2.0, repetition=0.5),
    ),
]


def naive_penalized(logits: list[float], penalties: Penalties, prompt: Any, written: Any) -> torch.Tensor:
    for token, value in penalties.bias:
        logits[token] += value
    for token in set(prompt) | set(written):
        by = penalties.repetition
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    for token in set(written):
        logits[token] -= penalties.frequency * list(written).count(token) + penalties.presence
    return torch.tensor(logits)


@interpreting
@pytest.mark.parametrize("make", [plain_steps, graph_steps])
def test_penalties_count_the_tokens_of_their_own_sequence_and_leave_others_alone(small_policy, make: Any):
    scheduler = ServingScheduler(slots=4, pool=BlockPool(24, block_size=4), context=24)
    found: dict[Job, list[Completion]] = {job: [] for job in PENALIZED}
    with torch.no_grad():
        steps: Any = make(small_policy, scheduler)
        for _ in range(2):  # the second time in slots that others have left
            for sequence, completion in ending(steps, scheduler, PENALIZED):
                found[scheduler.forget(sequence)].append(completion)
        model = small_model()
        for job in PENALIZED:
            for completion in found[job]:
                row = torch.tensor([job.prompt + completion.tokens])
                logits_TV = model(row).logits[0, len(job.prompt) - 1 : -1]
                for at, token in enumerate(completion.tokens):
                    changed_V = naive_penalized(
                        logits_TV[at].tolist(),
                        job.penalties or Penalties(),
                        job.prompt,
                        completion.tokens[:at],
                    )
                    logprobs = naive_logprobs(changed_V, job.sampling)
                    assert completion.logprobs[at] == pytest.approx(logprobs[token], abs=1e-4)
                    if job.sampling.greedy:
                        assert token == int(changed_V.argmax())
    assert [len(completions) for completions in found.values()] == [4, 2, 2, 2]
    assert found[PENALIZED[2]][0].tokens == alone(small_policy, PENALIZED[2])[0].tokens
    assert {*found[PENALIZED[0]][0].tokens} >= {60, 61}  # a penalty moved it from one to the other


@interpreting
def test_sequences_without_penalties_reserve_no_memory_for_them(small_policy, monkeypatch):
    scheduler = ServingScheduler(slots=4, pool=BlockPool(24, block_size=4), context=24)
    with torch.no_grad():
        steps: Any = graph_steps(small_policy, scheduler)
        from groupwise.engine.cuda import sampling_kernels

        monkeypatch.setattr(
            sampling_kernels, "PenaltyState", lambda *_, **__: pytest.fail("memory for penalties")
        )
        issued = issued_steps(steps, monkeypatch)
        for _ in ending(steps, scheduler, JOBS[:1]):
            pass
    assert {step.penalized for step in issued} == {False}


class Inbox:
    """Collects what a live engine delivers."""

    def __init__(self) -> None:
        self.news: queue.Queue[StreamChunk[Job]] = queue.Queue()
        self.errors: list[Exception] = []

    def deliver(self, news: Any) -> None:
        for part in news:
            self.news.put(part)

    def engine(self, policy: Policy, **settings: Any) -> ServingEngine:
        usual = {"slots": 2, "context": 64, "waiting": 3}
        return ServingEngine(policy, deliver=self.deliver, failed=self.errors.append, **{**usual, **settings})


def test_news_add_up_to_the_answer(small_policy):
    inbox = Inbox()
    engine = inbox.engine(small_policy)
    engine.start()
    job = replace(JOBS[0], sampling=Sampling(max_tokens=20), alternatives=1, scores_prompt=True)
    engine.submit(job)
    parts = []
    while not parts or parts[-1].finish is None:
        parts.append(inbox.news.get(timeout=30))
    engine.close()
    (expected,) = alone(small_policy, job)
    assert tuple(token for part in parts for token in part.tokens) == expected.tokens
    assert all(len(part.alternatives) == len(part.tokens) for part in parts)
    assert [len(part.prompt) for part in parts] == [len(job.prompt) - 1, *[0] * (len(parts) - 1)]
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
    with pytest.raises(ValueError, match="exceed the server's capacity"):
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


def test_the_end_of_an_answer_is_sent_when_the_last_other_job_is_cancelled(small_policy, monkeypatch):
    inbox = Inbox()
    engine = inbox.engine(small_policy)
    short, long = (Job(prompt=PROMPT, seeds=(n,), sampling=Sampling(max_tokens=n)) for n in (3, 59))
    advance = CPUSteps.advance

    def cancelling(steps: CPUSteps, *meanwhile: Any) -> list[tuple[Member, Completion]]:
        ended = advance(steps, *meanwhile)
        if ended:
            engine.cancel(long)
        return ended

    monkeypatch.setattr(CPUSteps, "advance", cancelling)
    for job in (short, long):
        engine.submit(job)
    engine.start()
    while (part := inbox.news.get(timeout=30)).job is not short or part.finish is None:
        pass
    engine.close()


def test_a_failure_is_told(small_policy, monkeypatch):
    inbox = Inbox()
    engine = inbox.engine(small_policy)

    def broken(steps: CPUSteps, meanwhile: Any) -> list[tuple[Member, Completion]]:
        raise RuntimeError("broken")

    monkeypatch.setattr(CPUSteps, "advance", broken)
    engine.submit(Job(prompt=PROMPT, seeds=(1,), sampling=Sampling(max_tokens=3)))
    with pytest.raises(RuntimeError, match="broken"):
        engine.run()
    assert [str(error) for error in inbox.errors] == ["broken"]
    assert not engine.jobs
