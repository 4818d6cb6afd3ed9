"""Chat sessions in the current process: streamed answers, test-time strategies, tools, examples of a task."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.config import Config
from groupwise.config.schema import NO_TASK, EngineConfig, ToolsConfig
from groupwise.engine.engine import Engine
from groupwise.engine.serving.serving_engine import ServingEngine, StreamChunk
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.errors import ConfigError, RolloutError
from groupwise.evaluate.strategies import Sampler, plain_judge, strategy_named
from groupwise.model.policy import Policy
from groupwise.records import Example, Finish, Message, Sampling, Turn, derive_seed
from groupwise.rollout.tool_calls import read_calls
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.rollout.tool_rollouts import Tools
from groupwise.serve.detokenizer import TextStream
from groupwise.tasks import Task, load_task, without_data
from groupwise.tasks.self_test import check

Answering = Callable[[Sequence[Message]], Iterator[str]]
"""Maps a conversation to the next answer, yielded in parts."""
CONTEXT = 2048
"""Minimum context length in tokens, the same as the default of `groupwise serve`. A KV cache for the model's
full context may not fit in memory. If `max_tokens` is larger, the context is twice that."""


class ChatSession:
    """The messages of a conversation, and the function that answers the next one."""

    def __init__(self, answering: Answering, *, system: str | None = None) -> None:
        self._answering = answering
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._system)

    def ask(self, text: str) -> Iterator[str]:
        """Send a user message and yield the answer as it is generated.

        If generation fails, the conversation is left unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        parts: list[str] = []
        for part in self._answering(messages):
            parts.append(part)
            yield part
        self.messages = [*messages, *self._answer_messages("".join(parts))]

    def _answer_messages(self, text: str) -> list[Message]:
        return [{"role": "assistant", "content": text}]

    def reset(self) -> None:
        self.messages = list(self._system)


class StreamingAnswers:
    """Generates answers and streams their text token by token."""

    def __init__(self, policy: Policy, sampling: Sampling, *, seed: int, speculative: bool = True) -> None:
        self.policy, self.sampling, self.seed = policy, sampling, seed
        self._turn = 0
        self._chunks: queue.Queue[StreamChunk[Job] | Exception] = queue.Queue()
        self._engine = ServingEngine(
            policy,
            slots=1,
            context=max(CONTEXT, 2 * sampling.max_tokens),
            waiting=0,
            deliver=self._deliver,
            failed=self._chunks.put,
            speculative=speculative,
        )
        self._engine.start()

    def __call__(self, messages: Sequence[Message]) -> Iterator[str]:
        yield from self.write(self.policy.encode(messages))

    def write(self, prompt: tuple[int, ...]) -> Generator[str, None, tuple[tuple[int, ...], Finish]]:
        """Yield the text generated for a prompt; return its tokens and finish reason."""
        self._turn += 1
        seed = derive_seed(self.seed, "chat", self._turn)
        room = max(1, self._engine.context - len(prompt))
        sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
        job = Job(prompt=prompt, seeds=(seed,), sampling=sampling)
        generated: list[int] = []
        try:
            self._engine.submit(job)
        except ValueError as error:
            context = self._engine.context
            if len(prompt) < context:
                raise ConfigError(str(error)) from None
            can_grow = context < self.policy.context_length
            hint = ", or raise --max-tokens to enlarge the context" if can_grow else ""
            raise ConfigError(
                f"the conversation has {len(prompt)} tokens, which fill the context of {context} tokens; "
                f"start a new conversation{hint}"
            ) from None
        stream = TextStream(self.policy.decode, stop=self.sampling.stop)
        finish = None
        try:
            while finish is None:
                chunk = self._chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                finish = chunk.finish
                generated += chunk.tokens
                yield stream.push(chunk.tokens, finish)
            return tuple(generated), finish
        finally:
            if finish is None:
                self._engine.cancel(job)
                self._drain(job)

    def close(self) -> None:
        self._engine.close()

    def _deliver(self, chunks: Sequence[StreamChunk[Job]]) -> None:
        for chunk in chunks:
            self._chunks.put(chunk)

    def _drain(self, job: Job) -> None:
        """Discard the remaining chunks of a cancelled job."""
        while job in self._engine.jobs:
            with suppress(queue.Empty):
                self._chunks.get(timeout=0.05)
        while not self._chunks.empty():
            self._chunks.get_nowait()


def by_strategy(
    name: str,
    policy: Policy,
    sampling: Sampling,
    *,
    engine: EngineConfig,
    seed: int,
    tools: Tools | None = None,
    session: ToolSession | None = None,
    examples: Sequence[Example] = (),
) -> Answering:
    """Answer with a test-time strategy; each answer is yielded in one part.

    `tools`: what the policy may call; the turns of the chosen answer are kept in `session`. `examples`: the
    example of the prompt, for tools with a state.
    """
    strategy = strategy_named(name, tools=tools is not None)
    generate = Engine(policy, engine)

    def answering(messages: Sequence[Message]) -> Iterator[str]:
        sampler = Sampler(
            codec=policy, engine=generate, sampling=sampling, seed=seed, tools=tools, examples=examples
        )
        (result,) = strategy([list(messages)], sampler, plain_judge())
        if session is not None:
            session.turns = list(result.rollout.turns)
        yield result.rollout.transcript if tools is not None else result.rollout.text

    return answering


@dataclass(slots=True, kw_only=True)
class ToolSession:
    """The tools of a chat, their state, and the turns of the last answer."""

    toolbox: ToolExecutor
    state: Any
    """The state that the tools operate on, or None."""
    turns: list[Turn] = field(default_factory=list)
    """Turns of the last answer."""

    @property
    def messages(self) -> list[Message]:
        """The last answer as chat messages: assistant turns and tool results."""
        messages: list[Message] = []
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.text})
            messages += [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
        return messages


class ToolAnswers:
    """Generates multi-turn answers, and shows tool results between the turns."""

    def __init__(self, streaming: StreamingAnswers, session: ToolSession, *, limits: ToolsConfig) -> None:
        self._streaming, self._session, self._limits = streaming, session, limits

    def __call__(self, messages: Sequence[Message]) -> Iterator[str]:
        codec, toolbox, used = self._streaming.policy, self._session.toolbox, 0
        tokens = codec.encode(messages, tools=toolbox.schemas)
        turns = self._session.turns = []
        while True:
            generated, finish = yield from self._streaming.write(tokens)
            text = codec.decode(generated)
            turns.append(Turn(text=text))
            parsed_calls = (
                read_calls(codec.decode_calls(generated), codec.tool_format) if finish != "length" else []
            )
            if not parsed_calls or len(turns) == self._limits.max_turns:
                return
            allowed = self._limits.max_calls - used
            try:
                calls = toolbox.answer(parsed_calls, allowed=allowed, state=self._session.state)
            except RolloutError as error:  # would abort the rollout in training; here it ends the answer
                raise ConfigError(f"a tool failed: {error}") from error
            used += len(calls)
            turns[-1] = Turn(text=text, calls=calls)
            results = [call.result for call in calls]
            yield "".join(f"\n→ {result}" for result in results) + "\n"
            glue = codec.encode_results(results, prefill="", ended=finish == "end")
            tokens = (*tokens, *generated, *glue)


class ToolChatSession(ChatSession):
    """A chat session that stores tool calls and results as separate messages."""

    def __init__(self, answering: Answering, tools: ToolSession, *, system: str | None = None) -> None:
        super().__init__(answering, system=system)
        self._tools = tools

    def _answer_messages(self, text: str) -> list[Message]:
        return self._tools.messages


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompt:
    """An example of a task, as the policy sees it."""

    task: Task
    example: Example

    @property
    def messages(self) -> Sequence[Message]:
        prompt = self.task.ask(self.example)
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    @property
    def question(self) -> str:
        return "\n".join(str(message["content"]) for message in self.messages)

    def verdict(self, answer: str, *, seconds: float, kit: ToolSession | None = None) -> str:
        """Score an answer, and the tool calls before it, with the task's rewards."""
        turns, state = (tuple(kit.turns), kit.state) if kit else ((), None)
        answer = turns[-1].text if turns else answer
        result = check(self.task, answer, self.example, seconds=seconds, turns=turns, state=state)
        parts = ", ".join(f"{name} {value:g}" for name, value in result.parts.items())
        return f"--- {'correct' if result.correct else 'incorrect'}: {parts or result.error}"


def system_of(prompt: TaskPrompt) -> str | None:
    """Return the system message of a task's prompt, or None."""
    first = prompt.messages[0]
    return str(first["content"]) if first["role"] == "system" else None


def tools_of(config: Config, task: Task, example: Example | None) -> ToolSession:
    """Prepare a task's tools and the state they operate on, which requires an example."""
    if not task.tools:
        raise ConfigError(
            f"task {task.name} has no tools: choose a task with tools, such as --task search_qa, "
            "or omit --tools"
        )
    if task.state is not None and example is None:
        raise ConfigError(f"the tools of task {task.name} need the state of an example: give --example")
    limits = config.tools
    toolbox = ToolExecutor.of(task.tools, seconds=limits.seconds, characters=limits.result_characters)
    return ToolSession(toolbox=toolbox, state=task.state(example) if task.state and example else None)


def held_out_example(config: Config, task: str | None, *, number: int) -> TaskPrompt:
    """Return held-out example `number`, counted from 1, of the given task or the run's own."""
    settings = config.task if task is None else without_data(replace(config.task, name=task, options={}))
    if settings.name == NO_TASK:
        raise ConfigError("no task is configured: give --task")
    loaded = load_task(replace(config, task=settings).resolve().task)
    rows = loaded.split(settings, config.run.seed).held_out
    if number > len(rows):
        raise ConfigError(
            f"task {loaded.name} has {len(rows)} held-out examples; number {number} is out of range"
        )
    return TaskPrompt(task=loaded, example=rows[number - 1])
