"""Between text and tokens: all of a policy that needs no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.model.template import between_turns, render
from groupwise.records import Message
from groupwise.tracking.files import write_atomically


class Codec:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, *, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        """Tokens that the model tells apart, which may be more or fewer than the tokenizer has."""

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: a text has at least as many tokens as it has such stretches."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
    ) -> tuple[int, ...]:
        """Tokens of a prompt: through the chat template when there is one.

        A last message of role assistant is a beginning that the policy continues. `tools`: schemas of the
        functions that it may call. `most`: a text that must have more tokens is refused unread.
        """
        if self.tokenizer.chat_template is None:
            if tools:
                raise ConfigError("the model has no chat template: it cannot be given tools")
            text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
            return self.encode_text(text, most=most)
        messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        return self.encode_text(render(self.tokenizer, messages, tools=tools), special=False, most=most)

    def encode_results(self, results: Sequence[str], *, prefill: str, ended: bool) -> tuple[int, ...]:
        """Tokens from the end of a turn to the beginning of the next: what tools answered, and the glue.

        `ended`: the turn has its end token; one that was stopped gets it here, untrained.
        """
        return self.encode_all_results([results], prefill=prefill, ended=ended)[0]

    def encode_all_results(
        self, turns: Sequence[Sequence[str]], *, prefill: str, ended: bool
    ) -> list[tuple[int, ...]]:
        """The same for the results of several turns: the tokenizer works on them at the same time."""
        before = "" if ended else self.tokenizer.eos_token
        texts = [before + between_turns(self.tokenizer, results, prefill=prefill) for results in turns]
        found = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [self._known(ids) for ids in found]

    def encode_text(self, text: str, *, special: bool = True, most: int | None = None) -> tuple[int, ...]:
        """Tokens of a text as it is; `special`: with those that the tokenizer puts around any text.

        `most`: a text that must have more tokens is refused unread, for reading one takes minutes.
        """
        if most is not None and len(text) > most * self.longest:
            raise ConfigError(f"a prompt of {len(text)} characters cannot fit the context of {most} tokens")
        return self._known(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _known(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Refuse tokens without a row among the model's weights: looking one up ends the process on a GPU."""
        highest = max(ids, default=0)
        if highest >= self.vocabulary:
            raise ConfigError(
                f"the text holds {self.tokenizer.convert_ids_to_tokens(highest)!r}, token {highest} of the "
                f"tokenizer, and the model has only {self.vocabulary} tokens: do the two belong together?"
            )
        return tuple(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def save_tokenizer(self, path: Path) -> None:
        """Write the tokenizer alone, as the `tokenizers` library reads it."""
        if (fast := getattr(self.tokenizer, "backend_tokenizer", None)) is not None:
            write_atomically(path, fast.to_str())
