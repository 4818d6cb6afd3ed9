"""What a client is told: answers in the shapes of OpenAI's API, whole or in parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.records import Finish
from groupwise.rollout.calls import OPEN
from groupwise.serve.asked import Asked
from groupwise.serve.link import Words
from groupwise.serve.text import TextStream
from groupwise.serve.tool_calls import read_answer

REASONS: dict[Finish, str] = {"end": "stop", "stop": "stop", "length": "length"}


@dataclass(slots=True)
class Choice:
    """One answer while it comes."""

    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None


class Telling:
    """One request's answers."""

    def __init__(self, asked: Asked, *, model: str, decode: Callable[[Sequence[int]], str]) -> None:
        self.asked, self.model, self._decode = asked, model, decode
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        hold = (OPEN,) if asked.tools else ()
        stop = asked.job.sampling.stop
        self.choices = [Choice(TextStream(decode, stop=stop, hold=hold)) for _ in asked.job.seeds]

    @property
    def done(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def take(self, news: Sequence[Words]) -> Iterator[dict[str, Any]]:
        """Take in what was written, and yield the parts of a stream that tell of it."""
        for index, choice in enumerate(self.choices):
            mine = [part for part in news if part.member == index]
            if mine:
                tokens = [token for part in mine for token in part.tokens]
                logprobs = [value for part in mine for value in part.logprobs]
                choice.tokens += tokens
                choice.logprobs += logprobs
                choice.finish = mine[-1].finish
                text = choice.stream.push(tokens, choice.finish)
                yield from self._parts(index, choice, text, self._logprobs(tokens, logprobs))

    def first(self) -> Iterator[dict[str, Any]]:
        """The parts that open a chat's answers: who speaks."""
        if self.asked.chat:
            for index in range(len(self.choices)):
                yield self._part(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def _parts(
        self, index: int, choice: Choice, text: str, logprobs: Mapping[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        calls = self._calls(choice) if choice.finish is not None else []
        if choice.finish is not None and self.asked.tools and not calls:
            text += choice.stream.unsent  # it looked like a call and is none
        body = {"delta": {"content": text}} if self.asked.chat else {"text": text}
        if text or logprobs or choice.finish is None:
            yield self._part(index, body, None, logprobs=logprobs)
        for number, call in enumerate(calls):
            yield self._part(index, {"delta": {"tool_calls": [{"index": number, **call}]}}, None)
        if choice.finish is not None:
            empty: dict[str, Any] = {"delta": {}} if self.asked.chat else {"text": ""}
            yield self._part(index, empty, self._reason(choice, calls))

    def _part(
        self, index: int, body: Mapping[str, Any], reason: str | None, *, logprobs: Any = None
    ) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(kind), "choices": [choice]}

    def last(self) -> dict[str, Any]:
        """The part that closes a stream with the count of tokens."""
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        kind = "chat.completion" if self.asked.chat else "text_completion"
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        calls = self._calls(choice)
        logprobs = self._logprobs(choice.tokens, choice.logprobs)
        rest = {"index": index, "logprobs": logprobs, "finish_reason": self._reason(choice, calls)}
        if not self.asked.chat:
            return {"text": choice.stream.text, **rest}
        said = read_answer(choice.stream.text)[0] if calls else choice.stream.text
        message: dict[str, Any] = {"role": "assistant", "content": said or None if calls else said}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, **rest}

    def _calls(self, choice: Choice) -> list[dict[str, Any]]:
        if not self.asked.tools:
            return []
        found = read_answer(choice.stream.text)[1]
        # Named after the answer and the place: the same in a stream's parts as in the whole.
        return [
            {"id": f"call_{self.id[-12:]}_{number}", "type": "function", "function": call}
            for number, call in enumerate(found)
        ]

    def _reason(self, choice: Choice, calls: Sequence[Any]) -> str:
        assert choice.finish is not None
        return "tool_calls" if calls else REASONS[choice.finish]

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        texts = [self._decode([token]) for token in tokens]
        if not self.asked.chat:
            return {
                "tokens": texts,
                "token_logprobs": list(logprobs),
                "top_logprobs": None,
                "text_offset": [],
            }
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def usage(self) -> dict[str, int]:
        prompt = len(self.asked.job.prompt)
        written = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
