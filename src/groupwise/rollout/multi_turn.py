"""Multi-turn rollouts with tools: some wait for their tools while the engine continues the others."""

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
    """Converts between text and tokens, for conversations with tools."""

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
    """Limits of one conversation."""

    turns: int
    """Maximum number of turns of the policy."""
    calls: int
    """Maximum number of tool calls."""
    tokens: int
    """Maximum number of tokens after the prompt, including tool results and template tokens."""


@dataclass(frozen=True, slots=True)
class ToolMessages:
    """The tool results that the policy reads between two of its turns."""

    results: tuple[str, ...]
    prefill: str
    ended: bool
    """Whether the previous turn ended with its end token."""


Answer = tuple[tuple[int, int], tuple[Call, ...] | RolloutError]
"""A (request, member) and its completed calls, or the failure of a tool."""


@dataclass(slots=True)
class Conversations:
    """All rollouts in progress: takes finished turns from the engine and returns the turns to generate next.

    A turn without calls ends a rollout, and so do the limits; the stream then ends with the policy's tokens.
    Nothing is sampled twice: a call that fails gets the error message as its result.

    The toolbox counts the time that tools cost: the time during which nothing else runs, plus the CPU time of
    threads that run alongside the engine, which is the most they can take from it.
    """

    streams: list[list[Trajectory]]
    """Trajectories by request and member, in the order given to the engine."""
    seed: Callable[[int, int, int], int]
    """Maps (request, member, turn) to a seed."""
    toolbox: ToolExecutor
    codec: ToolCodec
    limits: ConversationLimits
    sampling: Sampling
    overlap: bool
    """Whether tools run in threads alongside the engine, and finish in any order, or between its steps."""
    _followed: list[tuple[int, int]] = field(default_factory=list)
    """The (request, member) of each follow-up turn submitted to the engine."""
    _last: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """The engine's (request, member) of each rollout's last turn."""
    _ready: list[Request] = field(default_factory=list)
    _encoded: dict[ToolMessages, tuple[int, ...]] = field(default_factory=dict)
    _running: dict[tuple[int, int, int], tuple[float, list[ParsedToolCall]]] = field(default_factory=dict)
    """Start time and calls of each running thread, by (request, member, turn)."""
    _arrived: SimpleQueue[tuple[tuple[int, int, int], tuple[Call, ...] | RolloutError]] = field(
        default_factory=SimpleQueue
    )

    def finished(self, request: int, member: int, completion: Completion) -> None:
        """Add a finished turn and start its tool calls."""
        first = len(self.streams)
        key = (request, member) if request < first else self._followed[request - first]
        self._last[key] = (request, member)
        stream = self.streams[key[0]][key[1]]
        stream.append_completion(completion)
        text = self.codec.decode(completion.tokens)
        parsed_calls = read_calls(text) if completion.finish != "length" else []
        stream.turns.append(Turn(text=text))
        if not parsed_calls or len(stream.turns) >= self.limits.turns:
            return
        if self.overlap:
            turn = (*key, len(stream.turns))
            self._running[turn] = (time.monotonic(), parsed_calls)
            threading.Thread(target=self._run_tools, args=(turn, parsed_calls), daemon=True).start()
        else:
            started = time.perf_counter()
            self._append_results([(key, self._answer(key, parsed_calls))])
            self.toolbox.spend(time.perf_counter() - started)

    @property
    def waiting(self) -> bool:
        """Whether tools are still running."""
        return bool(self._running)

    def ready(self, *, wait: bool) -> list[Request]:
        """Return the turns that can start. With `wait`, an empty list means that every rollout has ended."""
        if self._running:
            started = time.perf_counter()
            self._append_results(list(self._arrivals(wait=wait and not self._ready)))
            self.toolbox.spend(time.perf_counter() - started)
        ready, self._ready = self._ready, []
        return ready

    def _answer(
        self, key: tuple[int, int], parsed_calls: Sequence[ParsedToolCall]
    ) -> tuple[Call, ...] | RolloutError:
        stream = self.streams[key[0]][key[1]]
        try:
            allowed = self.limits.calls - stream.calls
            return self.toolbox.answer(parsed_calls, allowed=allowed, state=stream.state, beside=self.overlap)
        except RolloutError as error:
            return error

    def _run_tools(self, turn: tuple[int, int, int], parsed_calls: Sequence[ParsedToolCall]) -> None:
        answer = self._answer(turn[:2], parsed_calls)
        self.toolbox.spend(time.thread_time())  # CPU time since the thread started
        self._arrived.put((turn, answer))

    def _arrivals(self, *, wait: bool) -> Iterator[Answer]:
        """Yield the results of finished threads; with `wait`, block until a result or a timeout."""
        while self._running:
            since, parsed_calls = next(iter(self._running.values()))
            left = since + self.toolbox.seconds_each * len(parsed_calls) - time.monotonic()
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
            if self._running.pop(turn, None) is not None:  # otherwise it has already timed out
                yield turn[:2], calls
                wait = False

    def _append_results(self, answers: Sequence[Answer]) -> None:
        """Append tool results and create the next turns, if the limits allow one."""
        pending: list[tuple[tuple[int, int], ToolMessages]] = []
        for key, calls in answers:
            stream = self.streams[key[0]][key[1]]
            if isinstance(calls, RolloutError):
                stream.error = f"tool: {calls}"
                continue
            stream.turns[-1] = Turn(text=stream.turns[-1].text, calls=calls)
            results = tuple(call.result for call in calls)
            pending.append(
                (key, ToolMessages(results, prefill_of(stream.prompt_messages), stream.finish == "end"))
            )
        self._encode([messages for _, messages in pending])
        for key, messages in pending:
            self._next_turn(key, self._encoded[messages])

    def _next_turn(self, key: tuple[int, int], results: tuple[int, ...]) -> None:
        stream = self.streams[key[0]][key[1]]
        room = self.limits.tokens - len(stream.tokens) - len(results)
        if room < self.sampling.max_tokens:
            stream.finish = "length"
            return
        stream.append_context(results)
        self._followed.append(key)
        seed = self.seed(*key, len(stream.turns))
        prompt = (*stream.prompt, *stream.tokens)
        self._ready.append(Request(prompt=prompt, seeds=(seed,), continues=self._last[key]))

    def _encode(self, pending: Sequence[ToolMessages]) -> None:
        """Tokenize results in batches of equal prefill and ending, and cache them: members share many."""
        new = [one for one in dict.fromkeys(pending) if one not in self._encoded]
        for prefill, ended in dict.fromkeys((one.prefill, one.ended) for one in new):
            same_kind = [one for one in new if (one.prefill, one.ended) == (prefill, ended)]
            texts = [one.results for one in same_kind]
            tokens = self.codec.encode_all_results(texts, prefill=prefill, ended=ended)
            self._encoded.update(zip(same_kind, tokens, strict=True))


def prefill_of(prompt: Sequence[Message] | str) -> str:
    """Return the text that the task prefills the reply with; every later turn begins with it too."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    return str(prompt[-1]["content"])
