"""Rollouts of several turns: while some wait for their tools, the engine goes on with the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from groupwise.errors import RolloutError
from groupwise.records import Call, Completion, Message, Request, Sampling, Turn
from groupwise.rollout.tool_calls import ParsedToolCall, read_calls
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.rollout.trajectory import Trajectory


class ToolCodec(Protocol):
    """Between text and tokens, for conversations with tools."""

    end_tokens: frozenset[int]

    def encode(
        self, prompt: str | Sequence[Message], *, tools: Sequence[dict[str, object]] = ()
    ) -> tuple[int, ...]: ...

    def encode_all_results(
        self, turns: Sequence[Sequence[str]], *, prefill: str, ended: bool
    ) -> list[tuple[int, ...]]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """How far a conversation may go."""

    turns: int
    """Of the policy."""
    calls: int
    tokens: int
    """Behind the prompt in all, those of tools and template included."""


@dataclass(frozen=True, slots=True)
class ToolMessages:
    """What a policy reads between two of its turns."""

    results: tuple[str, ...]
    prefill: str
    ended: bool
    """Whether the turn before has its end token."""


Answer = tuple[tuple[int, int], tuple[Call, ...] | RolloutError]
"""Of a request's member: its calls as they were answered, or that the tool is out of order."""


@dataclass(slots=True)
class Conversations:
    """Every rollout under way: takes in what the engine finished, hands out the turns that come next.

    Turns without calls end a rollout, and so do the limits; then the stream ends in what the policy
    wrote. Nothing that happened is drawn again: a call that fails is answered with what went wrong.

    What tools cost is counted in the toolbox: the time in which nothing else happens, and of threads beside
    the engine the processor's time, which is the most that they can take from it.
    """

    streams: list[list[Trajectory]]
    """By request and member, as they were given to the engine."""
    seed: Callable[[int, int, int], int]
    """Of (request, member, turn)."""
    toolbox: ToolExecutor
    codec: ToolCodec
    limits: ConversationLimits
    sampling: Sampling
    overlap: bool
    """Tools run in threads beside the engine, and their order is the clock's; or between two of its steps."""
    _followed: list[tuple[int, int]] = field(default_factory=list)
    """The request and member behind each turn handed out."""
    _last: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """The engine's own numbers of each one's last turn."""
    _ready: list[Request] = field(default_factory=list)
    _encoded: dict[ToolMessages, tuple[int, ...]] = field(default_factory=dict)
    _running: dict[tuple[int, int, int], tuple[float, list[ParsedToolCall]]] = field(default_factory=dict)
    """Calls in threads, by request, member and turn: since when, and which."""
    _arrived: SimpleQueue[tuple[tuple[int, int, int], tuple[Call, ...] | RolloutError]] = field(
        default_factory=SimpleQueue
    )

    def finished(self, request: int, member: int, completion: Completion) -> None:
        """Take in one turn."""
        first = len(self.streams)
        which = (request, member) if request < first else self._followed[request - first]
        self._last[which] = (request, member)
        stream = self.streams[which[0]][which[1]]
        stream.wrote(completion)
        text = self.codec.decode(completion.tokens)
        wishes = read_calls(text) if completion.finish != "length" else []
        stream.turns.append(Turn(text=text))
        if not wishes or len(stream.turns) >= self.limits.turns:
            return
        if self.overlap:
            turn = (*which, len(stream.turns))
            self._running[turn] = (time.monotonic(), wishes)
            threading.Thread(target=self._work, args=(turn, wishes), daemon=True).start()
        else:
            started = time.perf_counter()
            self._take([(which, self._answer(which, wishes))])
            self.toolbox.spend(time.perf_counter() - started)

    @property
    def waiting(self) -> bool:
        """Whether tools are still at work."""
        return bool(self._running)

    def ready(self, *, wait: bool) -> list[Request]:
        """Return the turns that can begin. With `wait`, none means that every rollout has ended."""
        if self._running:
            started = time.perf_counter()
            self._take(list(self._arrivals(wait=wait and not self._ready)))
            self.toolbox.spend(time.perf_counter() - started)
        ready, self._ready = self._ready, []
        return ready

    def _answer(
        self, which: tuple[int, int], wishes: Sequence[ParsedToolCall]
    ) -> tuple[Call, ...] | RolloutError:
        stream = self.streams[which[0]][which[1]]
        try:
            allowed = self.limits.calls - stream.calls
            return self.toolbox.answer(wishes, allowed=allowed, state=stream.state, beside=self.overlap)
        except RolloutError as error:
            return error

    def _work(self, turn: tuple[int, int, int], wishes: Sequence[ParsedToolCall]) -> None:
        answer = self._answer(turn[:2], wishes)
        self.toolbox.spend(time.thread_time())  # since the thread began
        self._arrived.put((turn, answer))

    def _arrivals(self, *, wait: bool) -> Iterator[Answer]:
        """Yield what threads have answered; with `wait`, there is an answer, or the end of its time."""
        while self._running:
            since, wishes = next(iter(self._running.values()))
            left = since + self.toolbox.seconds_each * len(wishes) - time.monotonic()
            try:
                turn, calls = self._arrived.get(block=wait and left > 0, timeout=max(left, 0.001))
            except Empty:
                if left > 0 and not wait:
                    return
                if left <= 0:
                    turn, (_, late) = next(iter(self._running.items()))
                    del self._running[turn]
                    yield turn[:2], self.toolbox.timed_out(late)
                    wait = False
                continue
            if self._running.pop(turn, None) is not None:  # else it comes too late: its time was up
                yield turn[:2], calls
                wait = False

    def _take(self, answers: Sequence[Answer]) -> None:
        """Append results and make the next turns, where there is room for one."""
        read: list[tuple[tuple[int, int], ToolMessages]] = []
        for which, calls in answers:
            stream = self.streams[which[0]][which[1]]
            if isinstance(calls, RolloutError):
                stream.error = f"tool: {calls}"
                continue
            stream.turns[-1] = Turn(text=stream.turns[-1].text, calls=calls)
            results = tuple(call.result for call in calls)
            read.append((which, ToolMessages(results, prefill_of(stream.given), stream.finish == "end")))
        self._encode([between for _, between in read])
        for which, between in read:
            self._go_on(which, self._encoded[between])

    def _go_on(self, which: tuple[int, int], results: tuple[int, ...]) -> None:
        stream = self.streams[which[0]][which[1]]
        room = self.limits.tokens - len(stream.tokens) - len(results)
        if room < self.sampling.max_tokens:
            stream.finish = "length"
            return
        stream.read(results)
        self._followed.append(which)
        seed = self.seed(*which, len(stream.turns))
        prompt = (*stream.prompt, *stream.tokens)
        self._ready.append(Request(prompt=prompt, seeds=(seed,), continues=self._last[which]))

    def _encode(self, read: Sequence[ToolMessages]) -> None:
        """Make tokens of results, all of a kind at once; members of a group often read the same."""
        new = [one for one in dict.fromkeys(read) if one not in self._encoded]
        for prefill, ended in dict.fromkeys((one.prefill, one.ended) for one in new):
            some = [one for one in new if (one.prefill, one.ended) == (prefill, ended)]
            texts = [one.results for one in some]
            tokens = self.codec.encode_all_results(texts, prefill=prefill, ended=ended)
            self._encoded.update(zip(some, tokens, strict=True))


def prefill_of(prompt: Sequence[Message] | str) -> str:
    """What the task has begun the reply with; every later turn begins with it too."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    return str(prompt[-1]["content"])
