"""Rollouts of an agent: a program that owns its loop and calls the policy through an OpenAI client.

    def run_agent(example: gw.Example, base_url: str, api_key: str) -> str:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        …
        return answer

Each rollout has an API key of its own. An endpoint in the trainer's process passes the model calls of all
agents to a `CallQueue`, which batches them for the engine. `multi_turn.joined` turns the recorded calls
of a rollout into token sequences. A call whose prompt extends an earlier prompt and its completion continues
that sequence, and any other call starts a new one. Every sampled token is trained in exactly one sequence.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import secrets
import shlex
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from groupwise.config.schema import AgentConfig
from groupwise.errors import ConfigError, RolloutError, as_rollout_error
from groupwise.invariants import check_stream_exact
from groupwise.isolation.worker import Command, Job, UnmovableError, Worker, WorkerLost
from groupwise.records import (
    Completion,
    Example,
    Group,
    Message,
    Request,
    Rollout,
    Sampling,
    Turn,
    derive_seed,
    plain,
)
from groupwise.rollout.environment import finished
from groupwise.rollout.multi_turn import ModelCall, branch_of, joined
from groupwise.tracking.run_folder import LOGGER

if TYPE_CHECKING:
    from groupwise.rollout.collect import GroupRequest

AGENT_JOB = "agent"
"""Name of the worker's job."""

AgentFunction = Callable[[Example, str, str], Any]
"""Takes an example, the base URL and the API key; returns the final answer. May be `async`."""


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """An agent that is a command line. The example is its standard input, its output is the answer."""

    command: Command
    seconds: float

    def __call__(self, example: Example, base_url: str, api_key: str) -> str:
        variables = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1"))),
        }
        text = json.dumps(dict(example), ensure_ascii=False, default=plain)
        return self.command.run(text, variables=variables, seconds=self.seconds)


def source_of_command(command: str) -> str:
    """Return a command with the contents of the files that it names; a resumed run must not change them."""
    named = [Path(word) for word in shlex.split(command)]
    texts = [path.read_text(errors="replace") for path in named if path.suffix == ".py" and path.is_file()]
    return "\n".join([command, *texts])


@dataclass(frozen=True, slots=True)
class IsolatedAgent:
    """Replaces a task's agent by one that runs in a worker. A direct call runs it here."""

    function: AgentFunction
    worker: Worker

    def __call__(self, example: Example, base_url: str, api_key: str) -> Any:
        return self.function(example, base_url, api_key)


def check_agent(agent: Any, *, task: str) -> None:
    """Raise ConfigError for anything that is not a command or a function of three arguments."""
    wanted = "agent must be a command line, or a function of (example, base_url, api_key)"
    if isinstance(agent, str):
        if not shlex.split(agent):
            raise ConfigError(f"task {task}: {wanted}; got an empty string")
        return
    if not callable(agent):
        raise ConfigError(f"task {task}: {wanted}; got {agent!r:.80}")
    with suppress(ValueError):  # a callable without a signature
        try:
            inspect.signature(agent).bind("example", "base_url", "api_key")
        except TypeError as error:
            raise ConfigError(f"task {task}: {wanted}: {error}") from None


def agent_job(agent: AgentFunction) -> Job:
    """Return the worker's job that runs an agent for several rollouts."""

    def job(request: Any, seconds: float) -> Iterator[dict[str, Any]]:
        rollouts, concurrency = request
        return run_concurrently(agent, rollouts, concurrency=concurrency, seconds=seconds)

    return job


def run_concurrently(
    agent: AgentFunction,
    rollouts: Sequence[tuple[int, Example, str, str]],
    *,
    concurrency: int,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Run an agent for each (number, example, base_url, api_key), and yield the results as they come.

    The rollouts start in order. A coroutine that takes longer than `seconds` is cancelled; a thread cannot
    be, and is left behind.
    """
    waiting = deque(rollouts)
    deadlines: dict[int, float] = {}
    results: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()

    def work(number: int, example: Example, base_url: str, api_key: str) -> None:
        results.put((number, result_of(agent, example, base_url, api_key, seconds=seconds)))

    while waiting or deadlines:
        while waiting and len(deadlines) < concurrency:
            rollout = waiting.popleft()
            deadlines[rollout[0]] = time.monotonic() + seconds
            threading.Thread(target=work, args=rollout, name="groupwise-agent", daemon=True).start()
        first = min(deadlines, key=lambda number: deadlines[number])
        try:
            number, result = results.get(timeout=max(0.0, deadlines[first] - time.monotonic()))
        except Empty:
            number, result = first, {"error": f"took longer than {seconds:g} s", "late": True}
        if deadlines.pop(number, None) is not None:  # otherwise it was late
            yield {"number": number, **result}


def result_of(
    agent: AgentFunction, example: Example, base_url: str, api_key: str, *, seconds: float
) -> dict[str, Any]:
    """Run an agent once; return its answer, or `error` with the reason, as JSON data."""
    try:
        answer = finished(agent(example, base_url, api_key), seconds)
        return {"answer": json.loads(json.dumps(answer, default=str))}
    except TimeoutError:
        return {"error": f"took longer than {seconds:g} s"}
    except RolloutError as error:
        return {"error": str(error)}
    except BaseException as error:  # sys.exit() in an agent must end the rollout, not the run
        failure = as_rollout_error(error)
        return {"error": str(failure), "trace": "".join(getattr(failure, "__notes__", ()))}


@dataclass(slots=True, eq=False, kw_only=True)
class AgentRun:
    """One rollout of an agent in progress."""

    number: int
    """Its position in the batch."""
    example: Example
    member: int
    seed_parts: tuple[int | str, ...]
    adapter: int = 0
    """Index of the adapter that answers it, if the engine has several."""
    temperature: float | None = None
    """Overrides the temperature of the batch, unless that is greedy."""
    key: str = field(default_factory=lambda: f"gw-{secrets.token_hex(12)}")
    """Its API key."""
    calls: list[ModelCall] = field(default_factory=list)
    prompt: Sequence[Message] | str | None = None
    """The prompt of the first call, before the chat template."""
    results: dict[str, str] = field(default_factory=dict)
    """What tools returned, by the id of their call."""
    rewritten: int = 0
    submitted: int = 0
    """Number of model calls, answered or not."""
    asked: Counter[str] = field(default_factory=Counter)
    """How often each prompt was submitted."""
    open: bool = True
    """Whether the agent may call the policy: it has begun and not ended."""
    answer: Any = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class PendingCall:
    """A model call that waits for the engine."""

    run: AgentRun
    request: Request
    sampling: Sampling
    future: Future[list[Completion]] = field(default_factory=Future)

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts a batch, so that its order does not depend on when calls arrived."""
        limits = (self.sampling.max_tokens, self.sampling.stop)
        return (*limits, self.run.adapter, self.request.prompt, self.run.number, self.request.seeds)

    @property
    def shared(self) -> tuple[Any, ...]:
        """Equal for calls that the engine may answer as one request."""
        return self.run.adapter, self.run.temperature, self.request.prompt


class CallQueue:
    """The model calls of all agents of a batch, from the endpoint's thread to the engine's.

    `overlap`: generate as soon as a call waits. Otherwise wait until every running agent waits for the
    policy: batches, and so the rounding of their logits, then depend only on what the agents ask.
    """

    def __init__(
        self, runs: Sequence[AgentRun], *, sampling: Sampling, config: AgentConfig, overlap: bool
    ) -> None:
        self.sampling, self.config, self.overlap = sampling, config, overlap
        self.waited = 0.0
        """Seconds during which no call was ready."""
        self._runs = {run.key: run for run in runs}
        self._unstarted = deque(runs)
        self._running: set[AgentRun] = set()
        self._pending: list[PendingCall] = []
        self._changed = threading.Condition()
        self._fill()

    def _fill(self) -> None:
        while self._unstarted and len(self._running) < self.config.concurrency:
            self._running.add(self._unstarted.popleft())

    def run_of(self, key: str) -> AgentRun | None:
        """Return the rollout with an API key; None if there is none that may call the policy."""
        run = self._runs.get(key)
        return run if run is not None and run.open else None

    def submit(
        self, run: AgentRun, prompt: tuple[int, ...], sampling: Sampling, *, count: int, seed: int | None
    ) -> PendingCall:
        """Queue a call for `count` completions. Raise RolloutError if the rollout may make no more.

        The noise derives from the rollout and the prompt, so concurrent calls may arrive in any order.
        """
        digest = hashlib.sha256(repr(prompt).encode()).hexdigest()[:16]
        with self._changed:
            if not run.open:
                raise RolloutError("this rollout has ended")
            if run.submitted >= self.config.max_calls:
                raise RolloutError(
                    f"the agent has made {run.submitted} model calls, the limit of agent.max_calls"
                )
            parts = (*run.seed_parts, digest, run.asked[digest], *(() if seed is None else (seed,)))
            run.submitted += 1
            run.asked[digest] += 1
            seeds = tuple(derive_seed(*parts, choice) for choice in range(count))
            request = Request(prompt=prompt, seeds=seeds, adapter=run.adapter, temperature=run.temperature)
            call = PendingCall(run, request, sampling)
            self._pending.append(call)
            self._changed.notify_all()
        return call

    def withdraw(self, call: PendingCall) -> None:
        """Forget a call whose client has disconnected."""
        with self._changed:
            self._pending = [other for other in self._pending if other is not call]

    def end(self, run: AgentRun, *, answer: Any = None, error: str | None = None) -> None:
        """End a rollout; its agent has returned, or failed with an error. The next one may begin."""
        with self._changed:
            if not run.open:
                return
            run.open, run.answer, run.error = False, answer, error
            self._running.discard(run)
            self._drop([call for call in self._pending if call.run is run])
            self._fill()
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all calls: generation has failed."""
        with self._changed:
            for run in self._runs.values():
                run.open = False
            self._drop(self._pending)

    def _drop(self, calls: Sequence[PendingCall]) -> None:
        self._pending = [call for call in self._pending if call not in calls]
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(RolloutError("this rollout has ended"))

    def batches(self) -> Iterator[list[PendingCall]]:
        """Yield the calls to generate next, until all rollouts have ended."""
        while True:
            started = time.perf_counter()
            with self._changed:
                self._changed.wait_for(lambda: self._ready or not self._running)
                batch, self._pending = self._pending, []
            self.waited += time.perf_counter() - started
            if not batch:
                return
            yield sorted(batch, key=lambda call: call.order)

    @property
    def _ready(self) -> bool:
        if self.overlap:
            return bool(self._pending)
        return bool(self._pending) and self._running <= {call.run for call in self._pending}


def generate(engine: Any, calls: Sequence[PendingCall]) -> None:
    """Answer a sorted batch of calls. Those with the same limits run together, and share equal prompts."""
    for _, limited in groupby(calls, key=lambda call: call.order[:2]):
        prompts = [list(same) for _, same in groupby(limited, key=lambda call: call.shared)]
        requests = [
            replace(same[0].request, seeds=tuple(seed for call in same for seed in call.request.seeds))
            for same in prompts
        ]
        completions = engine.generate(requests, prompts[0][0].sampling)
        for same, own in zip(prompts, completions, strict=True):
            each = iter(own)
            for call in same:
                answers = [next(each) for _ in call.request.seeds]
                if call.future.set_running_or_notify_cancel():
                    call.future.set_result(answers)


OpenEndpoint = Callable[[CallQueue, Any], AbstractContextManager[str]]
"""Opens an endpoint for a queue and a codec, and returns its base URL."""


@dataclass(slots=True)
class AgentRollouts:
    """Generates the rollouts of a task with an agent."""

    agent: AgentFunction | str
    config: AgentConfig
    open_endpoint: OpenEndpoint
    original: Callable[[Example], Example] | None = None
    """Returns the example of the task, where `collect` is given others."""
    needs_example = True
    _waited: float = 0.0

    def pop_seconds(self) -> float:
        """Return the seconds that generation waited for agents since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def generate_groups(
        self, wanted: Sequence[GroupRequest], *, codec: Any, engine: Any, sampling: Sampling
    ) -> list[Group]:
        """Run the agent for each member of each group, and return the groups."""
        own = [(one, member) for one in wanted for member in range(one.size)]
        runs = [
            AgentRun(
                number=number,
                example=one.example if self.original is None else self.original(one.example),
                member=member,
                seed_parts=(*one.seed_parts, member),
                adapter=one.adapter,
                temperature=one.temperature,
            )
            for number, (one, member) in enumerate(own)
        ]
        overlap = self.config.overlap
        if overlap is None:
            overlap = bool(getattr(engine, "unrepeatable", False))
        calls = CallQueue(runs, sampling=sampling, config=self.config, overlap=overlap)
        with self.open_endpoint(calls, codec) as base_url:
            programs = threading.Thread(
                target=self._run_programs, args=(runs, calls, base_url), name="groupwise-agents", daemon=True
            )
            programs.start()
            ended = False
            try:
                for batch in calls.batches():
                    generate(engine, batch)
                ended = True
            finally:
                if not ended:
                    calls.close()
                    self._kill()
        programs.join()
        self._waited += calls.waited
        rollouts = iter([rollout_of(run, codec) for run in runs])
        return [
            Group(example=one.example, rollouts=tuple(next(rollouts) for _ in range(one.size)))
            for one in wanted
        ]

    def _run_programs(self, runs: Sequence[AgentRun], calls: CallQueue, base_url: str) -> None:
        """Run the agents, in the worker if there is one, and end each rollout when its agent returns."""
        arguments = [(run.number, run.example, base_url, run.key) for run in runs]
        try:
            for result in self._results(arguments):
                error = result.get("error")
                calls.end(
                    runs[result["number"]],
                    answer=result.get("answer"),
                    error=None if error is None else f"agent: {error}",
                )
        except WorkerLost as lost:
            for run in runs:
                calls.end(run, error=f"agent: an agent {lost}")
        except BaseException as error:
            for run in runs:
                calls.end(run, error=f"agent: it could not be started: {error}")
            raise

    def _results(self, arguments: Sequence[tuple[int, Example, str, str]]) -> Iterator[dict[str, Any]]:
        seconds, concurrency = self.config.seconds, self.config.concurrency
        agent = self._program()
        if isinstance(agent, IsolatedAgent):
            late = False
            try:
                for result in agent.worker.replies(AGENT_JOB, (arguments, concurrency), seconds=seconds):
                    late = late or "late" in result
                    yield result
                if late:
                    agent.worker.discard()  # its threads cannot be stopped otherwise
                return
            except UnmovableError as error:
                LOGGER.warning("the agent runs in the trainer's process: %s", error)
        yield from run_concurrently(agent, arguments, concurrency=concurrency, seconds=seconds)

    def _program(self) -> AgentFunction:
        if isinstance(self.agent, str):
            self.agent = CommandAgent(Command(self.agent), self.config.seconds)
        return self.agent

    def _kill(self) -> None:
        """Stop the agents after a failure of the engine, as far as they can be stopped."""
        agent = self._program()
        if isinstance(agent, CommandAgent):
            agent.command.kill()
        elif isinstance(agent, IsolatedAgent):
            agent.worker.discard()


def rollout_of(run: AgentRun, codec: Any) -> Rollout:
    """Return the recorded calls of an agent as a rollout; the agent's answer is its text."""
    trajectories = joined(run.calls, prompt=run.prompt or "", member=run.member, results=run.results)
    if not trajectories:
        error = run.error or "agent: it made no model call; pass it base_url and api_key, and call the policy"
        about = json.dumps(dict(run.example), ensure_ascii=False, default=plain)
        nothing: dict[str, Any] = dict.fromkeys(("tokens", "trained", "logprobs", "entropies"), ())
        return Rollout(
            **nothing,
            prompt=({"role": "user", "content": about},),
            text="",
            turns=(Turn(text=""),),
            prompt_length=0,
            finish="end",
            member=run.member,
            error=error,
            rewritten=0,
        )
    first, *others = trajectories
    last = run.calls[-1]
    text = last.texts[-1] if run.answer is None else run.answer
    first.error, first.finish = run.error, last.completions[-1].finish
    whole = replace(
        first.rollout(),
        text=text if isinstance(text, str) else json.dumps(text, ensure_ascii=False),
        turns=tuple(turn for trajectory in trajectories for turn in trajectory.turns),
        state=None if isinstance(text, str) else text,
        branches=tuple(map(branch_of, others)),
        rewritten=run.rewritten,
    )
    for sequence, trajectory in zip(whole.sequences, trajectories, strict=True):
        check_stream_exact(sequence, trajectory.completions, end_tokens=codec.end_tokens)
    return whole
