"""A conversation with a policy in this process, streamed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from groupwise.config.schema import EngineConfig, ToolsConfig
from groupwise.engine.engine import Engine
from groupwise.engine.serving.serving_engine import ServingEngine, StreamChunk
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.errors import ConfigError, RolloutError
from groupwise.model.policy import Policy
from groupwise.records import Finish, Message, Sampling, Turn
from groupwise.rollout.tool_calls import read_calls
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.seeds import derive_seed
from groupwise.serve.detokenizer import TextStream

Answering = Callable[[Sequence[Message]], Iterator[str]]
"""From a conversation to the next answer, in parts."""
CONTEXT = 2048
"""Tokens of conversation there is memory for, as `groupwise serve` has them by default: a model's whole
context may take more than a machine has. Longer answers get as much again for what comes before them."""


class ChatSession:
    """Messages so far, and who answers the next."""

    def __init__(self, answering: Answering, *, system: str | None = None) -> None:
        self._answering = answering
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._system)

    def ask(self, text: str) -> Iterator[str]:
        """Say something and yield the answer as it comes; an answer that fails leaves nothing behind."""
        messages = [*self.messages, {"role": "user", "content": text}]
        parts: list[str] = []
        for part in self._answering(messages):
            parts.append(part)
            yield part
        self.messages = [*messages, *self._said("".join(parts))]

    def _said(self, text: str) -> list[Message]:
        return [{"role": "assistant", "content": text}]

    def reset(self) -> None:
        self.messages = list(self._system)


class StreamingAnswers:
    """Answers drawn token by token, shown as they come."""

    def __init__(self, policy: Policy, sampling: Sampling, *, seed: int) -> None:
        self.policy, self.sampling, self.seed = policy, sampling, seed
        self._turn = 0
        self._news: queue.Queue[StreamChunk | Exception] = queue.Queue()
        self._engine = ServingEngine(
            policy,
            slots=1,
            context=max(CONTEXT, 2 * sampling.max_tokens),
            waiting=0,
            deliver=self._deliver,
            failed=self._news.put,
        )
        self._engine.start()

    def __call__(self, messages: Sequence[Message]) -> Iterator[str]:
        yield from self.write(self.policy.encode(messages))

    def write(self, prompt: tuple[int, ...]) -> Generator[str, None, tuple[tuple[int, ...], Finish]]:
        """Yield what comes after a prompt as text; returns its tokens and why they end."""
        self._turn += 1
        seed = derive_seed(self.seed, "chat", self._turn)
        room = max(1, self._engine.context - len(prompt))
        sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
        job = Job(prompt=prompt, seeds=(seed,), sampling=sampling)
        written: list[int] = []
        try:
            self._engine.submit(job)
        except ValueError as error:
            more = self._engine.context < self.policy.context_length
            hint = ", or give more room with a larger --max-tokens" if more else ""
            raise ConfigError(f"{error}: begin anew{hint}") from None
        stream = TextStream(self.policy.decode, stop=self.sampling.stop)
        finish = None
        try:
            while finish is None:
                news = self._news.get()
                if isinstance(news, Exception):
                    raise news
                finish = news.finish
                written += news.tokens
                yield stream.push(news.tokens, finish)
            return tuple(written), finish
        finally:
            if finish is None:
                self._engine.cancel(job)
                self._drain(job)

    def close(self) -> None:
        self._engine.close()

    def _deliver(self, news: Sequence[StreamChunk]) -> None:
        for part in news:
            self._news.put(part)

    def _drain(self, job: Job) -> None:
        """Throw away what came of an answer that nobody waits for."""
        while job in self._engine.jobs:
            with suppress(queue.Empty):
                self._news.get(timeout=0.05)
        while not self._news.empty():
            self._news.get_nowait()


def by_strategy(
    name: str, policy: Policy, sampling: Sampling, *, engine: EngineConfig, seed: int
) -> Answering:
    """Answers that a test-time strategy settles on, each in one piece."""
    try:
        strategies: Any = import_module("groupwise.evaluate.strategies")
    except ModuleNotFoundError:
        raise ConfigError("this version has no test-time strategies: leave --strategy out") from None
    strategy = strategies.strategy_named(name)
    generate = Engine(policy, engine)

    def answering(messages: Sequence[Message]) -> Iterator[str]:
        draws = strategies.Draws(codec=policy, engine=generate, sampling=sampling, seed=seed)
        (found,) = strategy([list(messages)], draws, strategies.plain_judge())
        yield found.rollout.text

    return answering


@dataclass(slots=True, kw_only=True)
class ToolSession:
    """What the model works with."""

    toolbox: ToolExecutor
    state: Any
    """What the tools work on, where they do."""
    turns: list[Turn] = field(default_factory=list)
    """Of the last answer."""


class ToolAnswers:
    """Answers of several turns: what tools return is shown between them."""

    def __init__(self, streaming: StreamingAnswers, kit: ToolSession, *, limits: ToolsConfig) -> None:
        self._streaming, self._kit, self._limits = streaming, kit, limits

    def __call__(self, messages: Sequence[Message]) -> Iterator[str]:
        codec, toolbox, made = self._streaming.policy, self._kit.toolbox, 0
        tokens = codec.encode(messages, tools=toolbox.schemas)
        turns = self._kit.turns = []
        while True:
            written, finish = yield from self._streaming.write(tokens)
            text = codec.decode(written)
            turns.append(Turn(text=text))
            wishes = read_calls(text) if finish != "length" else []
            if not wishes or len(turns) == self._limits.max_turns:
                return
            allowed = self._limits.max_calls - made
            try:
                calls = toolbox.answer(wishes, allowed=allowed, state=self._kit.state)
            except RolloutError as error:  # in training it would end the rollout, here the answer
                raise ConfigError(f"a tool failed: {error}") from error
            made += len(calls)
            turns[-1] = Turn(text=text, calls=calls)
            results = [call.result for call in calls]
            yield "".join(f"\n→ {result}" for result in results) + "\n"
            glue = codec.encode_results(results, prefill="", ended=finish == "end")
            tokens = (*tokens, *written, *glue)

    @property
    def messages(self) -> list[Message]:
        """The last answer as a chat has it."""
        found: list[Message] = []
        for turn in self._kit.turns:
            found.append({"role": "assistant", "content": turn.text})
            found += [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
        return found


class ToolChatSession(ChatSession):
    """A conversation that remembers calls and results as what they are."""

    def __init__(self, answering: ToolAnswers, *, system: str | None = None) -> None:
        super().__init__(answering, system=system)
        self._with_tools = answering

    def _said(self, text: str) -> list[Message]:
        return self._with_tools.messages
