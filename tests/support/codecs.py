"""A codec of one token a character, so that tests can read and write tokens as text."""

from __future__ import annotations

from collections.abc import Sequence

END = 0


class CharacterCodec:
    """A codec of one token a letter."""

    end_tokens = frozenset({END})

    def encode(self, prompt: object) -> tuple[int, ...]:
        return tuple(map(ord, str(prompt)))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != END)
