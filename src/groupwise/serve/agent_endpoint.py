"""The OpenAI endpoint that answers agents during training, in the trainer's process.

The API key of a request, or its header X-Rollout-Id, names the rollout that it belongs to. Requests are
sampled with the settings of the run, because the trainer computes log-probabilities for these; a request for
others is refused. Where the client returns earlier messages unchanged, their sampled tokens are kept: they
are not rendered and tokenized again.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from groupwise.config.schema import AgentConfig, ToolsConfig
from groupwise.engine.serving.serving_engine import StreamChunk
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.errors import RolloutError
from groupwise.model.policy import Policy
from groupwise.records import Completion, Message, Sampling
from groupwise.rollout.agent_rollouts import AgentRollouts, AgentRun, CallQueue
from groupwise.rollout.multi_turn import ModelCall
from groupwise.rollout.tool_rollouts import Tools
from groupwise.serve.completion_request import (
    CompletionRequest,
    arguments_of,
    parse_completion_request,
    read_message,
    template_messages,
    typed,
)
from groupwise.serve.completion_response import ResponseBuilder
from groupwise.serve.detokenizer import TokenTable
from groupwise.serve.http_server import (
    HEAD_LIMIT,
    Connections,
    Events,
    EventStream,
    HTTPError,
    HTTPReply,
    HTTPRequest,
)
from groupwise.serve.responses_api import ResponsesBuilder, chat_body, echoed
from groupwise.tasks import Task

MODEL = "policy"
HEADER = "x-rollout-id"
LIMITS = ("max_tokens", "stop")
"""Sampling settings that a request may choose: they do not change the distribution of a token."""
NAMES = {
    "alternatives": "top_logprobs",
    "scores_prompt": "echo with logprobs",
    "penalties": "a penalty or logit_bias",
    "grammar": "a response_format or another constraint",
}
"""What requests call the fields of a `Job`."""


def multi_turn(task: Task, tools: ToolsConfig, agent: AgentConfig) -> Tools | AgentRollouts | None:
    """Return what the rollouts of a task with tools, an environment or an agent need, or None."""
    if task.agent is not None:
        return AgentRollouts(task.agent, agent, open_endpoint)
    return task.multi_turn(tools)


@contextmanager
def open_endpoint(calls: CallQueue, codec: Policy) -> Iterator[str]:
    """Answer the agents of a batch in a thread of its own; yield the base URL."""
    endpoint = AgentEndpoint(calls, codec)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="groupwise-endpoint", daemon=True)
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(endpoint.start(), loop).result()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(endpoint.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a chat up to an answer of the policy, with their tokens."""

    messages: tuple[Message, ...]
    """The request's messages and the answer, each as `essential` returns it."""
    tools: str
    answers: tuple[int, ...]
    """Positions of the messages that the policy wrote."""
    tokens: tuple[int, ...]
    ended: bool
    """Whether the tokens end with an end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A chat request, compared with the earlier conversations of its rollout."""

    messages: tuple[Message, ...]
    tools: str
    prompt: tuple[int, ...] | None
    """Tokens of an earlier conversation, and of the messages after it. None: it continues none."""
    kept: int
    """Number of messages whose tokens are those of an earlier conversation."""
    answers: tuple[int, ...]
    """Positions of the messages that the policy wrote."""
    rewritten: bool
    """Whether it edits or drops an answer of the policy."""

    @property
    def observation(self) -> str:
        """The text that the client added."""
        added = self.messages[self.kept :] if self.prompt is not None else ()
        return "\n".join(m["content"] for m in added if m["role"] not in ("assistant", "tool"))


class AgentEndpoint:
    """Routes the requests of agents to a `CallQueue`, and records their answers."""

    def __init__(self, calls: CallQueue, codec: Policy) -> None:
        self.calls, self.codec = calls, codec
        self.context = codec.context_length
        self._pieces = TokenTable(codec.tokenizer)
        self._conversations: dict[AgentRun, list[Conversation]] = {}
        self._server: asyncio.Server | None = None
        self._connections = Connections(self.answer)

    async def start(self) -> int:
        """Listen on a free port of this machine, and return it."""
        self._server = await asyncio.start_server(
            self._connections.accept, "127.0.0.1", 0, limit=HEAD_LIMIT, backlog=512
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close the port and all connections."""
        if self._server is not None:
            self._server.close()
        await self._connections.close()

    async def answer(self, request: HTTPRequest) -> HTTPReply | EventStream:
        """Route one request to its handler."""
        run = self.calls.run_of(rollout_key(request))
        if run is None:
            raise HTTPError(
                401, "no running rollout has this API key; use the api_key that the agent was given"
            )
        match request.method, request.path.rstrip("/"):
            case "GET", "/v1/models":
                about = {"id": MODEL, "object": "model", "created": 0, "owned_by": "groupwise"}
                return HTTPReply(body={"object": "list", "data": [about]})
            case "POST", "/v1/chat/completions":
                return await self._complete(run, request.json(), chat=True)
            case "POST", "/v1/completions":
                return await self._complete(run, request.json(), chat=False)
            case "POST", "/v1/responses":
                body = request.json()
                return await self._complete(run, chat_body(body), chat=True, settings=echoed(body))
        raise HTTPError(404, f"no such endpoint during training: {request.method} {request.path}")

    async def _complete(
        self, run: AgentRun, body: dict[str, Any], *, chat: bool, settings: Mapping[str, Any] | None = None
    ) -> HTTPReply | EventStream:
        """Answer a chat or a plain completion; `settings`: what an answer of `/v1/responses` repeats."""
        named = typed(body, "model", str, MODEL)
        given = {name: value for name, value in body.items() if value is not None}
        sampling = self._sampling(run)
        usual = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        usual |= {"top_k": sampling.top_k, "min_p": sampling.min_p, "max_tokens": sampling.max_tokens}
        if "max_completion_tokens" in given:
            del usual["max_tokens"]
        parsed = parse_completion_request(
            {**usual, **given, "model": MODEL}, self.codec, chat=chat, context=self.context, model=MODEL
        )
        if parsed.silent:
            raise HTTPError(400, "max_tokens=0 is not supported during training")
        turn = self._chat_turn(run, given) if chat else None
        jobs = tuple(self._job(job, turn, sampling) for job in parsed.jobs)
        request = replace(parsed, jobs=jobs)
        completions = await self._generate(run, jobs, seed=typed(body, "seed", int, None))
        answer = ResponseBuilder(request, model=named, decode=self.codec.decode, pieces=self._pieces)
        response = answer if settings is None else ResponsesBuilder(answer, settings)
        chunks = [
            StreamChunk(0, index, one.tokens, one.logprobs, (), (), one.finish)
            for index, one in enumerate(completions)
        ]
        events = [*response.first(), *response.take(chunks), *response.last()]
        if not run.open:  # the agent returned without this answer
            raise HTTPError(400, "this rollout has ended")
        self._record(run, request, turn, completions, answer.whole()["choices"])
        if request.stream:
            return EventStream(events=one_batch(events), named=settings is not None)
        return HTTPReply(body=response.whole())

    def _chat_turn(self, run: AgentRun, body: Mapping[str, Any]) -> ChatTurn:
        """Compare a chat with the earlier ones of its rollout; keep the tokens of the longest it extends."""
        messages = [read_message(message) for message in body["messages"]]
        tools = body.get("tools", []) if body.get("tool_choice") != "none" else []
        shown, named = tuple(map(essential, messages)), json.dumps(tools, sort_keys=True)
        earlier = self._conversations.get(run, [])
        closest = max(earlier, key=lambda one: common_prefix(one.messages, shown), default=None)
        same = 0 if closest is None else common_prefix(closest.messages, shown)
        turn = ChatTurn(
            messages=shown,
            tools=named,
            prompt=None,
            kept=0,
            answers=() if closest is None else tuple(one for one in closest.answers if one < same),
            rewritten=changes_answers(earlier, shown),
        )
        extended = [
            one
            for one in earlier
            if one.tools == named
            and one.messages == shown[: len(one.messages)]
            and len(one.messages) < len(shown)
        ]
        for one in sorted(extended, key=lambda one: -len(one.messages)):
            tokens = self._after(one, messages, tools)
            if tokens is not None:
                return replace(turn, prompt=(*one.tokens, *tokens), kept=len(one.messages))
        return turn

    def _after(
        self, earlier: Conversation, messages: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[int, ...] | None:
        """Return the tokens of the messages after an earlier conversation; None if they are not separate."""
        try:
            rendered = template_messages(messages, self.codec)
            return self.codec.encode_continuation(
                rendered, len(earlier.messages), ended=earlier.ended, tools=tools
            )
        except Exception:  # a template may raise any exception
            return None

    def _sampling(self, run: AgentRun) -> Sampling:
        """Return the sampling settings of a rollout."""
        usual = self.calls.sampling
        return (
            usual if usual.greedy or run.temperature is None else replace(usual, temperature=run.temperature)
        )

    def _job(self, job: Job, turn: ChatTurn | None, run: Sampling) -> Job:
        """Return a job with the tokens kept and the run's sampling settings; refuse any others."""
        for one in fields(Job):
            changed = (
                one.name not in ("prompt", "seeds", "sampling") and getattr(job, one.name) != one.default
            )
            if changed:
                raise HTTPError(400, f"{NAMES.get(one.name, one.name)} is not supported during training")
        for one in () if run.greedy else fields(Sampling):
            wanted, own = getattr(job.sampling, one.name), getattr(run, one.name)
            if one.name not in LIMITS and wanted != own:
                raise HTTPError(
                    400,
                    f"{one.name}={wanted} differs from {own}, which the trainer assumes for every token of "
                    f"this run; leave {one.name} out, or set rollout.{one.name}",
                )
        prompt = job.prompt if turn is None or turn.prompt is None else turn.prompt
        room = self.context - len(prompt)
        if room < 1:
            raise HTTPError(
                400, f"the prompt has {len(prompt)} tokens, but the model's context only {self.context}"
            )
        sampling = replace(
            run,
            max_tokens=min(job.sampling.max_tokens, run.max_tokens, room),
            stop=tuple(dict.fromkeys((*run.stop, *job.sampling.stop))),
        )
        return replace(job, prompt=prompt, sampling=sampling)

    async def _generate(self, run: AgentRun, jobs: Sequence[Job], *, seed: int | None) -> list[Completion]:
        """Return the completions of all jobs."""
        pending = []
        try:
            for job in jobs:
                count = len(job.seeds)
                pending.append(self.calls.submit(run, job.prompt, job.sampling, count=count, seed=seed))
            each = [await asyncio.wrap_future(call.future) for call in pending]
        except RolloutError as error:
            raise HTTPError(400, str(error)) from None
        finally:
            for call in pending:
                self.calls.withdraw(call)
        return [completion for completions in each for completion in completions]

    def _record(
        self,
        run: AgentRun,
        request: CompletionRequest,
        turn: ChatTurn | None,
        completions: Sequence[Completion],
        choices: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add an answered request to its rollout."""
        texts = [self.codec.decode(completion.tokens) for completion in completions]
        first = 0
        for job in request.jobs:
            own = slice(first, first + len(job.seeds))
            first += len(job.seeds)
            run.calls.append(
                ModelCall(
                    prompt=job.prompt,
                    completions=tuple(completions[own]),
                    texts=tuple(texts[own]),
                    tool_calls=tuple(map(tool_calls_of, choices[own])),
                    observation="" if turn is None else turn.observation,
                )
            )
        if run.prompt is None:
            run.prompt = self.codec.decode(request.jobs[0].prompt) if turn is None else turn.messages
        if turn is not None:
            self._remember(run, request, turn, completions, choices)

    def _remember(
        self,
        run: AgentRun,
        request: CompletionRequest,
        turn: ChatTurn,
        completions: Sequence[Completion],
        choices: Sequence[Mapping[str, Any]],
    ) -> None:
        conversations = self._conversations.setdefault(run, [])
        run.rewritten += turn.rewritten
        for message in turn.messages:
            if message["role"] == "tool" and (name := message.get("tool_call_id")) is not None:
                run.results[name] = message["content"]
        for completion, choice in zip(completions, choices, strict=True):
            answer = essential(read_message(choice["message"]))
            conversations.append(
                Conversation(
                    messages=(*turn.messages, answer),
                    tools=turn.tools,
                    answers=(*turn.answers, len(turn.messages)),
                    tokens=(*request.jobs[0].prompt, *completion.tokens),
                    ended=completion.finish == "end",
                )
            )


def rollout_key(request: HTTPRequest) -> str:
    """Return the API key or the header by which a request names its rollout."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return request.headers.get(HEADER) or (key.strip() if scheme.lower() == "bearer" else "")


def essential(message: Message) -> Message:
    """Return what of a message the policy reads; clients may add other fields, and calls get new ids."""
    kept = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if name in message}
    if message["role"] == "assistant":
        kept.pop("name", None)
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        kept["tool_calls"] = [{"name": call["name"], "arguments": arguments_of(call)} for call in calls]
    return kept


def tool_calls_of(choice: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tool calls of a choice with id, name and arguments."""
    return tuple(
        {"id": call["id"], "name": call["function"]["name"], "arguments": arguments_of(call["function"])}
        for call in choice.get("message", {}).get("tool_calls") or ()
    )


def common_prefix(left: Sequence[Message], right: Sequence[Message]) -> int:
    """Return the number of messages that both begin with."""
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def changes_answers(earlier: Sequence[Conversation], shown: Sequence[Message]) -> bool:
    """Whether a chat edits or drops an answer of the policy in an earlier conversation that it follows.

    It does where other messages stand in an answer's place, or where it has an answer of the policy but not
    one that came before. A second try, an edited question and a new conversation change no answer.
    """
    same = [common_prefix(one.messages, shown) for one in earlier]
    most = max(same, default=0)
    closest = [one for one, length in zip(earlier, same, strict=True) if length == most]
    if most == len(shown) or any(len(one.messages) == most for one in closest):
        return False
    if any(most in one.answers for one in closest):
        return True
    for one in closest:
        kept = [one.messages[answer] in shown[most:] for answer in one.answers if answer >= most]
        if any(later and not before for before, later in pairwise(kept)):
            return True
    return False


async def one_batch(events: Sequence[Mapping[str, Any]]) -> Events:
    """Stream a complete answer at once."""
    yield events
