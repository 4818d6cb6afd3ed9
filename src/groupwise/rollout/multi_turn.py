"""Multi-turn rollouts: some wait for tools or an environment while the engine continues the others.

A `Trajectory` is the token stream of one rollout. It is append-only. `joined` builds trajectories from the
recorded model calls of an agent.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from groupwise.errors import RolloutError
from groupwise.records import Branch, Call, Completion, Finish, Message, Request, Rollout, Sampling, Turn
from groupwise.rollout.environment import EnvironmentExecutor, Episode, Reply
from groupwise.rollout.tool_calls import ParsedToolCall, read_calls
from groupwise.rollout.tool_executor import ToolExecutor


@dataclass(slots=True)
class Trajectory:
    """The tokens that the policy read and sampled so far; only sampled tokens are trained."""

    prompt: tuple[int, ...]
    prompt_messages: Sequence[Message] | str
    """The prompt before the chat template."""
    member: int
    state: Any = None
    """The state of this rollout's tools."""
    episode: Episode | None = None
    """The environment of this rollout, while it runs."""
    tokens: list[int] = field(default_factory=list)
    """Tokens after the prompt; the next three fields are parallel to it."""
    trained: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    finish: Finish = "end"
    error: str | None = None

    @property
    def calls(self) -> int:
        return sum(len(turn.calls) for turn in self.turns)

    def append_completion(self, completion: Completion) -> None:
        """Append tokens that the policy sampled; all of them are trained."""
        count = len(completion.tokens)
        self._append(completion.tokens, (True,) * count, completion.logprobs, completion.entropies)
        self.completions.append(completion)
        self.finish = completion.finish

    def append_context(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: results, replies, template tokens."""
        zeros = (0.0,) * len(tokens)
        self._append(tokens, (False,) * len(tokens), zeros, zeros)

    def rollout(self) -> Rollout:
        before = len(self.prompt)
        zeros = (0.0,) * before
        return Rollout(
            prompt=self.prompt_messages,
            text=self.turns[-1].text,
            tokens=(*self.prompt, *self.tokens),
            trained=((False,) * before + tuple(self.trained)),
            logprobs=zeros + tuple(self.logprobs),
            entropies=zeros + tuple(self.entropies),
            prompt_length=before,
            finish=self.finish,
            member=self.member,
            turns=tuple(self.turns),
            error=self.error,
            state=self.state,
        )

    def _append(
        self,
        tokens: Sequence[int],
        trained: Sequence[bool],
        logprobs: Sequence[float],
        entropies: Sequence[float],
    ) -> None:
        self.tokens += tokens
        self.trained += trained
        self.logprobs += logprobs
        self.entropies += entropies


HERMES = "hermes"
"""The format of tool calls that needs no special tokens; see `tool_calls` for the others."""


class ToolCodec(Protocol):
    """Converts between text and tokens, for conversations of several turns."""

    end_tokens: frozenset[int]

    def encode(
        self, prompt: str | Sequence[Message], *, tools: Sequence[dict[str, object]] = ()
    ) -> tuple[int, ...]: ...

    def encode_all_results(
        self, turns: Sequence[Sequence[str]], *, prefill: str, ended: bool, role: str
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
    """Maximum number of tokens after the prompt: also tool results, replies and template tokens."""


@dataclass(frozen=True, slots=True)
class ContextMessages:
    """What the policy reads between two of its turns: tool results, or the reply of an environment."""

    results: tuple[str, ...]
    role: str
    """`tool`, or `user` for an environment."""
    prefill: str
    ended: bool
    """Whether the previous turn ended with its end token."""
    names: tuple[str, ...] = ()
    """Names of the tools that were called."""


Answer = tuple[Call, ...] | Reply | RolloutError
"""Completed calls, or an environment's reply, or why the rollout failed."""


@dataclass(slots=True)
class Conversations:
    """All rollouts in progress: takes finished turns from the engine and returns the turns to generate next.

    A turn without calls goes to the environment, or ends the rollout if there is none. The limits end a
    rollout too; the stream then ends with the policy's tokens. The environment replies to the last turn as
    well, for its reward. Nothing is sampled twice: a call that fails gets the error message as its result.

    The toolbox counts the time that tools cost: the time during which nothing else runs, plus the CPU time of
    threads that run alongside the engine, which is the most they can take from it.
    """

    streams: list[list[Trajectory]]
    """Trajectories by request and member, in the order given to the engine."""
    requests: Sequence[Request]
    """The requests of the first turns; later turns use the same adapters and temperatures."""
    seed: Callable[[int, int, int], int]
    """Maps (request, member, turn) to a seed."""
    toolbox: ToolExecutor
    codec: ToolCodec
    limits: ConversationLimits
    sampling: Sampling
    overlap: bool
    """Whether tools run in threads alongside the engine, and finish in any order, or between its steps."""
    environments: EnvironmentExecutor | None = None
    on_result: Callable[[], None] | None = None
    """Called, from any thread, when tools that run alongside the engine are done. The engine may set it."""
    _followed: list[tuple[int, int]] = field(default_factory=list)
    """The (request, member) of each follow-up turn submitted to the engine."""
    _last: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """The engine's (request, member) of each rollout's last turn."""
    _ready: list[Request] = field(default_factory=list)
    _encoded: dict[ContextMessages, tuple[int, ...]] = field(default_factory=dict)
    _running: dict[tuple[int, int, int], tuple[float, list[ParsedToolCall]]] = field(default_factory=dict)
    """Deadline and calls of each running thread, by (request, member, turn)."""
    _arrived: SimpleQueue[tuple[tuple[int, int, int], Answer]] = field(default_factory=SimpleQueue)

    def finished(self, request: int, member: int, completion: Completion) -> None:
        """Add a finished turn; start its tool calls, or ask the environment for a reply."""
        first = len(self.streams)
        key = (request, member) if request < first else self._followed[request - first]
        self._last[key] = (request, member)
        stream = self.streams[key[0]][key[1]]
        stream.append_completion(completion)
        text = self.codec.decode(completion.tokens)
        parsed_calls = self._calls(completion, text)
        stream.turns.append(Turn(text=text))
        if stream.error is not None:  # its state or its environment could not be made
            self._close(stream)
            return
        if stream.episode is None and (not parsed_calls or self._is_last(stream)):
            return
        if parsed_calls and self._is_last(stream):
            self._close(stream)
            return
        if self.overlap and (parsed_calls or self._concurrent):
            turn = (*key, len(stream.turns))
            # The worker or the event loop enforces the time limit of an environment.
            seconds = self.toolbox.seconds_each * len(parsed_calls) if parsed_calls else math.inf
            self._running[turn] = (time.monotonic() + seconds, parsed_calls)
            threading.Thread(target=self._run, args=(turn, parsed_calls), daemon=True).start()
        else:
            started = time.perf_counter()
            self._append_results([(key, self._answer(key, parsed_calls))])
            self.toolbox.spend(time.perf_counter() - started)

    def _calls(self, completion: Completion, text: str) -> list[ParsedToolCall]:
        """Return the tool calls of a turn, in the format of the chat template."""
        if not self.toolbox.tools or completion.finish == "length":
            return []
        style = getattr(self.codec, "tool_format", HERMES)
        if style == HERMES:
            return read_calls(text)
        return read_calls(self.codec.decode_calls(completion.tokens), style)  # type: ignore[attr-defined]

    def _is_last(self, stream: Trajectory) -> bool:
        """Whether the limits end the rollout after its current turn."""
        return stream.finish == "length" or len(stream.turns) >= self.limits.turns

    @property
    def _concurrent(self) -> bool:
        return self.environments is not None and self.environments.concurrent

    def close(self) -> None:
        """Close the environments of all rollouts that have not ended."""
        for members in self.streams:
            for stream in members:
                self._close(stream)

    def _close(self, stream: Trajectory) -> None:
        """Close the environment of a rollout that has ended."""
        if stream.episode is not None:
            assert self.environments is not None
            self.environments.close(stream.episode)
            stream.episode = None

    @property
    def waiting(self) -> bool:
        """Whether tools are still running."""
        return bool(self._running)

    def ready(self, *, wait: bool) -> list[Request]:
        """Return the turns that can start. With `wait`, an empty list means that every rollout has ended."""
        while self._running:
            started = time.perf_counter()
            self._append_results(list(self._arrivals(wait=wait and not self._ready)))
            self.toolbox.spend(time.perf_counter() - started)
            if self._ready or not wait:  # a result may end its rollout while others still wait for theirs
                break
        ready, self._ready = self._ready, []
        return ready

    def _answer(self, key: tuple[int, int], parsed_calls: Sequence[ParsedToolCall]) -> Answer:
        """Execute the calls of a turn; a turn without calls gets the environment's reply."""
        stream = self.streams[key[0]][key[1]]
        try:
            if not parsed_calls:
                assert self.environments is not None
                assert stream.episode is not None
                return self.environments.reply(stream.episode, stream.turns[-1].text)
            allowed = self.limits.calls - stream.calls
            return self.toolbox.answer(parsed_calls, allowed=allowed, state=stream.state, beside=self.overlap)
        except RolloutError as error:
            return error if not parsed_calls else RolloutError(f"tool: {error}")

    def _run(self, turn: tuple[int, int, int], parsed_calls: Sequence[ParsedToolCall]) -> None:
        try:
            answer = self._answer(turn[:2], parsed_calls)
        except BaseException as error:  # the thread must answer: the rollout would wait for its time limit
            part = "tool" if parsed_calls else "environment"
            answer = RolloutError(f"{part}: {type(error).__name__}: {error}")
        self.toolbox.spend(time.thread_time())  # CPU time since the thread started
        self._arrived.put((turn, answer))
        if self.on_result is not None:
            self.on_result()

    def _arrivals(self, *, wait: bool) -> Iterator[tuple[tuple[int, int], Answer]]:
        """Yield the results of finished threads; with `wait`, block until a result or a timeout."""
        while self._running:
            first = min(self._running, key=lambda turn: self._running[turn][0])
            left = self._running[first][0] - time.monotonic()
            patience = None if math.isinf(left) else max(left, 0.001)
            try:
                turn, calls = self._arrived.get(block=wait and left > 0, timeout=patience)
            except Empty:
                if left > 0 and not wait:
                    return
                if left <= 0:
                    turn, (_, late) = first, self._running.pop(first)
                    yield turn[:2], self.toolbox.timed_out(late)
                    wait = False
                continue
            if self._running.pop(turn, None) is not None:  # otherwise it has already timed out
                yield turn[:2], calls
                wait = False

    def _append_results(self, answers: Sequence[tuple[tuple[int, int], Answer]]) -> None:
        """Append tool results and replies, and create the next turns, if the limits allow one."""
        pending: list[tuple[tuple[int, int], ContextMessages]] = []
        for key, answer in answers:
            stream = self.streams[key[0]][key[1]]
            text = stream.turns[-1].text
            results: tuple[str, ...]
            if isinstance(answer, RolloutError):
                stream.error = str(answer)
                self._close(stream)
                continue
            if isinstance(answer, Reply):
                stream.turns[-1] = Turn(text=text, observation=answer.text, reward=answer.reward)
                if answer.done or self._is_last(stream):
                    self._close(stream)
                    continue
                results, role = (answer.text,), "user"
            else:
                stream.turns[-1] = Turn(text=text, calls=answer)
                results, role = tuple(call.result for call in answer), "tool"
            prefill = prefill_of(stream.prompt_messages)
            names = tuple(call.name for call in stream.turns[-1].calls)
            pending.append((key, ContextMessages(results, role, prefill, stream.finish == "end", names)))
        self._encode([messages for _, messages in pending])
        for key, messages in pending:
            self._next_turn(key, self._encoded[messages])

    def _next_turn(self, key: tuple[int, int], results: tuple[int, ...]) -> None:
        stream = self.streams[key[0]][key[1]]
        room = self.limits.tokens - len(stream.tokens) - len(results)
        if room < self.sampling.max_tokens:
            stream.finish = "length"
            self._close(stream)
            return
        stream.append_context(results)
        self._followed.append(key)
        seed = self.seed(*key, len(stream.turns))
        prompt = (*stream.prompt, *stream.tokens)
        first = self.requests[key[0]]
        self._ready.append(replace(first, prompt=prompt, seeds=(seed,), continues=self._last[key]))

    def _encode(self, pending: Sequence[ContextMessages]) -> None:
        """Tokenize messages in batches of one kind, and cache them: members share many."""
        new = [one for one in dict.fromkeys(pending) if one not in self._encoded]
        for kind in dict.fromkeys((one.role, one.prefill, one.ended) for one in new):
            role, prefill, ended = kind
            same_kind = [one for one in new if (one.role, one.prefill, one.ended) == kind]
            texts = [one.results for one in same_kind]
            extra: dict[str, Any] = {}
            if getattr(self.codec, "tool_format", HERMES) != HERMES:
                extra["names"] = [one.names for one in same_kind]
            tokens = self.codec.encode_all_results(texts, prefill=prefill, ended=ended, role=role, **extra)
            self._encoded.update(zip(same_kind, tokens, strict=True))


def prefill_of(prompt: Sequence[Message] | str) -> str:
    """Return the text that the task prefills the reply with; every later turn begins with it too."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    return str(prompt[-1]["content"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A model call of an agent that was answered."""

    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    tool_calls: tuple[tuple[Mapping[str, Any], ...], ...]
    """The tool calls in each completion, with id, name and arguments."""
    observation: str = ""
    """What the agent added since the policy's last turn."""


def joined(
    calls: Sequence[ModelCall],
    *,
    prompt: Sequence[Message] | str,
    member: int,
    results: Mapping[str, str],
) -> list[Trajectory]:
    """Join the model calls of an agent to token sequences; `results` are those of its tools, by call id.

    A call continues the sequence that its prompt extends; without one it starts a new sequence. So each
    completion is trained once.

    Example: prompts "1 2", "1 2 3 4" after the completion "3", and "1 2" again with completions "5", "6" ->
        1 2 [3] 4 [5], and 1 2 [6]
    """
    trajectories: list[Trajectory] = []
    for call in calls:
        for completion, text, made in zip(call.completions, call.texts, call.tool_calls, strict=True):
            trajectory = continued(trajectories, call.prompt)
            if trajectory is None:
                trajectory = Trajectory(call.prompt, prompt, member)
                trajectories.append(trajectory)
            else:
                kept = len(trajectory.prompt) + len(trajectory.tokens)
                trajectory.append_context(call.prompt[kept:])
                trajectory.turns[-1] = replace(trajectory.turns[-1], observation=call.observation)
            trajectory.append_completion(completion)
            own = tuple(
                Call(name=one["name"], arguments=one["arguments"], result=results.get(one["id"], ""))
                for one in made
            )
            trajectory.turns.append(Turn(text=text, calls=own))
    return trajectories


def continued(trajectories: Sequence[Trajectory], prompt: tuple[int, ...]) -> Trajectory | None:
    """Return the longest sequence that a prompt extends, or None."""

    def extends(trajectory: Trajectory) -> bool:
        tokens = (*trajectory.prompt, *trajectory.tokens)
        return len(prompt) > len(tokens) and prompt[: len(tokens)] == tokens

    extended = [trajectory for trajectory in trajectories if extends(trajectory)]
    return max(extended, key=lambda trajectory: len(trajectory.prompt) + len(trajectory.tokens), default=None)


def branch_of(trajectory: Trajectory) -> Branch:
    """Return a sequence as a branch of its rollout."""
    whole = trajectory.rollout()
    return Branch(
        tokens=whole.tokens,
        trained=whole.trained,
        logprobs=whole.logprobs,
        entropies=whole.entropies,
        prompt_length=whole.prompt_length,
    )
