"""What a client is told: answers in the shapes of OpenAI's API, whole or in parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.records import Finish
from groupwise.serve.completion_request import CompletionRequest, read_answer, surely_said
from groupwise.serve.detokenizer import TextStream, TokenTable
from groupwise.serve.ipc import WireChunk

Place = tuple[tuple[int, float | None], ...]
"""The token that stands there and its log-probability, then others; a prompt's first has none."""

REASONS: dict[Finish, str] = {"end": "stop", "stop": "stop", "length": "length"}


@dataclass(slots=True)
class ChoiceBuilder:
    """One answer while it comes."""

    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """Of all its tokens, after those of a prompt that is echoed."""
    offsets: list[int] = field(default_factory=lambda: [0])
    """In its text, of the places that were told, and of the next."""
    finish: Finish | None = None

    def add(self, part: WireChunk) -> None:
        self.tokens += part.tokens
        drawn = zip(part.tokens, part.logprobs, strict=True)
        likely = part.alternatives or [()] * len(part.tokens)
        self.places += part.prompt
        self.places += [(pair, *others) for pair, others in zip(drawn, likely, strict=True)]
        self.finish = part.finish


class ResponseBuilder:
    """One request's answers."""

    def __init__(
        self,
        asked: CompletionRequest,
        *,
        model: str,
        decode: Callable[[Sequence[int]], str],
        pieces: TokenTable,
    ) -> None:
        self.asked, self.model, self._pieces = asked, model, pieces
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        showable = surely_said if asked.tools else len
        stop = asked.job.sampling.stop
        first: list[Place] = [((asked.job.prompt[0], None),)] if asked.job.scores_prompt else []
        self.choices = [
            ChoiceBuilder(TextStream(decode, stop=stop, showable=showable), places=first.copy())
            for _ in asked.job.seeds
        ]

    @property
    def done(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def take(self, news: Sequence[WireChunk]) -> Iterator[dict[str, Any]]:
        """Take in what was written, and yield the parts of a stream that tell of it."""
        for index, choice in enumerate(self.choices):
            mine = [part for part in news if part.member == index]
            if self.asked.silent:
                nothing: dict[str, Any] = {"tokens": (), "logprobs": (), "alternatives": ()}
                mine = [part._replace(**nothing, finish="length") for part in mine]
            if mine:
                known = len(choice.tokens)
                told = len(choice.places) if known else 0
                for part in mine:
                    choice.add(part)
                text = choice.stream.push(choice.tokens[known:], choice.finish)
                text = text if known else self.asked.echo + text
                yield from self._parts(index, choice, text, self._logprobs(choice, told))

    def first(self) -> Iterator[dict[str, Any]]:
        """The parts that open a chat's answers: who speaks."""
        if self.asked.chat:
            for index in range(len(self.choices)):
                yield self._part(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def _parts(
        self, index: int, choice: ChoiceBuilder, text: str, logprobs: Mapping[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        calls = self._calls(choice) if choice.finish is not None else []
        if choice.finish is not None and self.asked.tools:
            text += self._kept_back(choice)
        body = {"delta": {"content": text}} if self.asked.chat else {"text": text}
        if text or logprobs or choice.finish is None:
            yield self._part(index, body, None, logprobs=logprobs)
        for number, call in enumerate(calls):
            yield self._part(index, {"delta": {"tool_calls": [{"index": number, **call}]}}, None)
        if choice.finish is not None:
            empty: dict[str, Any] = {"delta": {}} if self.asked.chat else {"text": ""}
            yield self._part(index, empty, self._reason(choice, calls))

    def _kept_back(self, choice: ChoiceBuilder) -> str:
        """What an answer says beyond what was sent of it: what looked like a call, or came after one."""
        said, calls = read_answer(choice.stream.text)
        # Beside calls, an answer is told without the spaces around it.
        return said[len(choice.stream.sent.lstrip() if calls else choice.stream.sent) :]

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

    def _choice(self, index: int, choice: ChoiceBuilder) -> dict[str, Any]:
        calls = self._calls(choice)
        logprobs = self._logprobs(choice)
        rest = {"index": index, "logprobs": logprobs, "finish_reason": self._reason(choice, calls)}
        if not self.asked.chat:
            return {"text": self.asked.echo + choice.stream.text, **rest}
        said = read_answer(choice.stream.text)[0] if calls else choice.stream.text
        message: dict[str, Any] = {"role": "assistant", "content": said or None if calls else said}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, **rest}

    def _calls(self, choice: ChoiceBuilder) -> list[dict[str, Any]]:
        if not self.asked.tools:
            return []
        found = read_answer(choice.stream.text)[1]
        # Named after the answer and the place: the same in a stream's parts as in the whole.
        return [
            {"id": f"call_{self.id[-12:]}_{number}", "type": "function", "function": call}
            for number, call in enumerate(found)
        ]

    def _reason(self, choice: ChoiceBuilder, calls: Sequence[Any]) -> str:
        assert choice.finish is not None
        return "tool_calls" if calls else REASONS[choice.finish]

    def _logprobs(self, choice: ChoiceBuilder, start: int = 0) -> dict[str, Any] | None:
        """Of its places from `start` on."""
        if not self.asked.logprobs:
            return None
        places = choice.places[start:]
        if self.asked.chat:
            content = [
                {**self._named(*own), "top_logprobs": [self._named(*other) for other in others]}
                for own, *others in places
            ]
            return {"content": content, "refusal": None}
        for (own, _), *_ in choice.places[len(choice.offsets) - 1 :]:
            choice.offsets.append(choice.offsets[-1] + self._pieces[own].characters)
        return {
            "tokens": [self._pieces[own].text for (own, _), *_ in places],
            "token_logprobs": [logprob for (_, logprob), *_ in places],
            "top_logprobs": [None if place[0][1] is None else self._by_text(place) for place in places],
            "text_offset": choice.offsets[start:-1],
        }

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self._pieces[token]
        return {"token": piece.text, "logprob": logprob, "bytes": piece.bytes}

    def _by_text(self, place: Place) -> dict[str, float | None]:
        """Where two tokens read the same, the first counts."""
        found: dict[str, float | None] = {}
        for token, logprob in place:
            found.setdefault(self._pieces[token].text, logprob)
        return found

    def usage(self) -> dict[str, int]:
        prompt = len(self.asked.job.prompt)
        written = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
