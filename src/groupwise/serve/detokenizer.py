"""Turn tokens into text: single tokens as shown with log-probabilities, and incremental detokenization.

A token may be text, a part of a multi-byte character, or a special token without text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from groupwise.records import Finish


class ShownToken(NamedTuple):
    """A token as reported to clients."""

    text: str
    """The text, or escaped bytes if they are not valid UTF-8: `bytes:\\xf0\\x9f`."""
    bytes: list[int] | None
    """UTF-8 bytes; None for a special token such as the end of a turn."""

    @property
    def characters(self) -> int:
        """The number of characters that begin in this token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes or ())


class TokenTable:
    """Maps token ids to `ShownToken`, with a cache."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
        self._cache: dict[int, ShownToken] = {}

    def __getitem__(self, token: int) -> ShownToken:
        if token not in self._cache:
            self._cache[token] = self._look_up(token)
        return self._cache[token]

    def _look_up(self, token: int) -> ShownToken:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._special:
            return ShownToken(name, None)
        # Some tokenizers drop a leading space when decoding, so decode the token twice and keep the second.
        text = self._decode(token, token)[len(self._decode(token)) :]
        if BROKEN not in text:
            return ShownToken(text, list(text.encode()))
        raw = _raw_bytes(name)
        return ShownToken("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw))

    def _decode(self, *tokens: int) -> str:
        text: str = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        return text


def _raw_bytes(name: str) -> bytes:
    """Return the bytes of a vocabulary entry, in either of the two common notations.

    Example: "<0xE2>" -> e2, and "âĢ", a letter for each byte, -> e2 80
    """
    if spelled := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
        return bytes.fromhex(spelled[1])
    return bytes(BYTE_OF_LETTER.get(letter, 0x3F) for letter in name)


def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter of the byte-level alphabet.

    Printable bytes map to themselves; the others map to the letters from U+0100 on, in order.
    """
    letters = sorted(ByteLevel.alphabet())
    own = [ord(letter) for letter in letters if ord(letter) < 256]
    others = [byte for byte in range(256) if byte not in own]
    return dict(zip(letters, own + others, strict=True))


BYTE_OF_LETTER = _byte_of_letter()


BROKEN = "\ufffd"
"""What an incomplete UTF-8 sequence decodes to; the next token may complete it."""
REACH = 8
"""Minimum number of earlier tokens decoded together with new ones: tokens decode differently at the start of
a text."""


class TextStream:
    """Incremental detokenization of one answer, with stop strings.

    `showable` returns how many characters of the text so far may be sent.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stop: Sequence[str] = (),
        showable: Callable[[str], int] = len,
    ) -> None:
        self._decode = decode
        self._stop, self._showable = tuple(stop), showable
        self._tokens: list[int] = []
        self._read = 0
        """Number of tokens whose text is in `_text`."""
        self._start = 0
        """Index of the first token that is decoded together with new ones."""
        self._before = ""
        """Text of the tokens from `_start` to `_read`."""
        self._text = ""
        self._sent = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """The text so far, up to a stop string."""
        return self._text

    @property
    def sent(self) -> str:
        """The text returned by `push` so far; the rest is withheld."""
        return self._text[: self._sent]

    def push(self, tokens: Sequence[int], finish: Finish | None) -> str:
        """Add tokens and return the new text that can be sent."""
        self._tokens += tokens
        self._text += self._new_text(last=finish is not None)
        cut = min((at for string in self._stop if (at := self._text.find(string)) >= 0), default=-1)
        if cut >= 0:
            self._text, self.stopped = self._text[:cut], True
        end = len(self._text) if finish is not None or self.stopped else self._safe_end()
        shown = self._text[self._sent : max(self._sent, min(end, self._showable(self._text)))]
        self._sent += len(shown)
        return shown

    def _new_text(self, *, last: bool) -> str:
        if self._read - self._start > 2 * REACH:
            self._start = self._read - REACH
            self._before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start :])
        if after.endswith(BROKEN) and not last:
            return ""
        new, self._before, self._read = after[len(self._before) :], after, len(self._tokens)
        return new

    def _safe_end(self) -> int:
        """Return the end of the text that cannot be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=0)
        for size in range(min(longest - 1, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(string.startswith(tail) for string in self._stop):
                return len(self._text) - size
        return len(self._text)
