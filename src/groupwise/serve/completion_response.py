"""Build OpenAI responses from engine output: complete, or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.engine.serving.serving_engine import StreamChunk
from groupwise.records import Finish
from groupwise.serve.completion_request import CompletionRequest
from groupwise.serve.detokenizer import TextStream, TokenTable

Position = tuple[tuple[int, float | None], ...]
"""The sampled token and its log-probability, then the alternatives. The first token of a prompt has None."""

REASONS: dict[Finish, str] = {"end": "stop", "stop": "stop", "length": "length"}


@dataclass(slots=True)
class ChoiceBuilder:
    """One choice of a response while it is generated."""

    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    """Log-probabilities of all its tokens, preceded by those of an echoed prompt."""
    offsets: list[int] = field(default_factory=lambda: [0])
    """Text offsets of the positions reported so far, and of the next one."""
    finish: Finish | None = None
    prompt: tuple[int, ...] = ()
    echo: str = ""
    """The prompt, if its text precedes the answer."""

    def add(self, part: StreamChunk[int]) -> None:
        self.tokens += part.tokens
        sampled = zip(part.tokens, part.logprobs, strict=True)
        likely = part.alternatives or [()] * len(part.tokens)
        self.positions += part.prompt
        self.positions += [(pair, *others) for pair, others in zip(sampled, likely, strict=True)]
        self.finish = part.finish


class ResponseBuilder:
    """Builds the response to one request."""

    def __init__(
        self,
        request: CompletionRequest,
        *,
        model: str,
        decode: Callable[[Sequence[int]], str],
        pieces: TokenTable,
    ) -> None:
        self.request, self.model, self._pieces = request, model, pieces
        prefix = "chatcmpl" if request.chat else "cmpl"
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        showable = request.tools.streamable if request.tools else len
        self.choices = [
            ChoiceBuilder(
                TextStream(decode, stop=job.sampling.stop, showable=showable),
                positions=[((job.prompt[0], None),)] if job.scores_prompt else [],
                prompt=job.prompt,
                echo=echo,
            )
            for job, echo in zip(request.jobs, request.echo, strict=True)
            for _ in job.seeds
        ]

    @property
    def done(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def take(self, chunks: Sequence[StreamChunk[int]]) -> Iterator[dict[str, Any]]:
        """Consume engine output and yield the stream chunks that report it; `member` is a choice's index."""
        for index, choice in enumerate(self.choices):
            mine = [part for part in chunks if part.member == index]
            if self.request.silent:
                nothing: dict[str, Any] = {"tokens": (), "logprobs": (), "alternatives": ()}
                mine = [part._replace(**nothing, finish="length") for part in mine]
            if mine:
                known = len(choice.tokens)
                reported = len(choice.positions) if known else 0
                for part in mine:
                    choice.add(part)
                text = choice.stream.push(choice.tokens[known:], choice.finish)
                text = text if known else choice.echo + text
                yield from self._parts(
                    index, choice, text, self._logprobs(choice, reported), self._token_ids(choice, known)
                )

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the first chunk of every choice of a chat, which carries the role."""
        if self.request.chat:
            for index in range(len(self.choices)):
                part = self._part(index, {"delta": {"role": "assistant", "content": ""}}, None)
                yield {**part, **(self._prompt_ids(self.choices[0]) if index == 0 else {})}

    def _parts(
        self,
        index: int,
        choice: ChoiceBuilder,
        text: str,
        logprobs: Mapping[str, Any] | None,
        ids: Mapping[str, Any],
    ) -> Iterator[dict[str, Any]]:
        calls = self._calls(choice) if choice.finish is not None else []
        if choice.finish is not None and self.request.tools:
            text += self._withheld(choice)
        body = {"delta": {"content": text}} if self.request.chat else {"text": text}
        if text or logprobs or ids or choice.finish is None:
            yield self._part(index, {**body, **ids}, None, logprobs=logprobs)
        for number, call in enumerate(calls):
            yield self._part(index, {"delta": {"tool_calls": [{"index": number, **call}]}}, None)
        if choice.finish is not None:
            empty: dict[str, Any] = {"delta": {}} if self.request.chat else {"text": ""}
            yield self._part(index, empty, self._reason(choice, calls))

    def _withheld(self, choice: ChoiceBuilder) -> str:
        """Return the text not sent yet: it looked like a tool call, or followed one."""
        content, calls = self._read(choice)
        # The content of an answer with calls is stripped.
        return content[len(choice.stream.sent.lstrip() if calls else choice.stream.sent) :]

    def _part(
        self, index: int, body: Mapping[str, Any], reason: str | None, *, logprobs: Any = None
    ) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(kind), "choices": [choice]}

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield the last chunk of a stream, which carries the token counts, if the client wants them."""
        if self.request.usage:
            kind = "chat.completion.chunk" if self.request.chat else "text_completion"
            yield {**self._head(kind), "choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        kind = "chat.completion" if self.request.chat else "text_completion"
        choices = [
            {**self._choice(index, choice), **self._token_ids(choice)}
            for index, choice in enumerate(self.choices)
        ]
        prompt = self._prompt_ids(self.choices[0]) if self.request.chat else {}
        return {**self._head(kind), "choices": choices, "usage": self.usage(), **prompt}

    def _token_ids(self, choice: ChoiceBuilder, start: int = 0) -> dict[str, Any]:
        """Return the ids of the tokens from `start` on; for a plain completion, the prompt's come first."""
        if not self.request.token_ids:
            return {}
        prompt = {} if start or self.request.chat else self._prompt_ids(choice)
        return {**prompt, "token_ids": choice.tokens[start:]}

    def _prompt_ids(self, choice: ChoiceBuilder) -> dict[str, Any]:
        return {"prompt_token_ids": list(choice.prompt)} if self.request.token_ids else {}

    def _choice(self, index: int, choice: ChoiceBuilder) -> dict[str, Any]:
        calls = self._calls(choice)
        logprobs = self._logprobs(choice)
        rest = {"index": index, "logprobs": logprobs, "finish_reason": self._reason(choice, calls)}
        if not self.request.chat:
            return {"text": choice.echo + choice.stream.text, **rest}
        content = self._read(choice)[0]
        message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, **rest}

    def _read(self, choice: ChoiceBuilder) -> tuple[str, list[dict[str, str]]]:
        """Return the text of an answer and its tool calls."""
        if not self.request.tools:
            return choice.stream.text, []
        return self.request.tools.read(choice.stream.text, choice.tokens)

    def _calls(self, choice: ChoiceBuilder) -> list[dict[str, Any]]:
        _, parsed = self._read(choice)
        # The ids derive from the response id and the index, so that streamed chunks and the whole agree.
        return [
            {"id": f"call_{self.id[-12:]}_{number}", "type": "function", "function": call}
            for number, call in enumerate(parsed)
        ]

    def _reason(self, choice: ChoiceBuilder, calls: Sequence[Any]) -> str:
        assert choice.finish is not None
        return "tool_calls" if calls else REASONS[choice.finish]

    def _logprobs(self, choice: ChoiceBuilder, start: int = 0) -> dict[str, Any] | None:
        """Return the log-probabilities of the positions from `start` on."""
        if not self.request.logprobs:
            return None
        positions = choice.positions[start:]
        if self.request.chat:
            content = [
                {**self._token_entry(*own), "top_logprobs": [self._token_entry(*other) for other in others]}
                for own, *others in positions
            ]
            return {"content": content, "refusal": None}
        for (own, _), *_ in choice.positions[len(choice.offsets) - 1 :]:
            choice.offsets.append(choice.offsets[-1] + self._pieces[own].characters)
        return {
            "tokens": [self._pieces[own].text for (own, _), *_ in positions],
            "token_logprobs": [logprob for (_, logprob), *_ in positions],
            "top_logprobs": [
                None if position[0][1] is None else self._by_text(position) for position in positions
            ],
            "text_offset": choice.offsets[start:-1],
        }

    def _token_entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self._pieces[token]
        return {"token": piece.text, "logprob": logprob, "bytes": piece.bytes}

    def _by_text(self, position: Position) -> dict[str, float | None]:
        """Map token text to log-probability; of tokens with the same text, the first counts."""
        logprobs: dict[str, float | None] = {}
        for token, logprob in position:
            logprobs.setdefault(self._pieces[token].text, logprob)
        return logprobs

    def usage(self) -> dict[str, int]:
        prompt = sum(len(job.prompt) for job in self.request.jobs)
        generated = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
