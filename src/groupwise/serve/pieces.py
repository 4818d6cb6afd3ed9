"""What single tokens stand for: text, part of a character, or a mark that is no text at all."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from groupwise.serve.text import BROKEN


class Piece(NamedTuple):
    """A token as clients are told of it."""

    text: str
    """Bytes that are no text are spelled out: `bytes:\\xf0\\x9f`."""
    bytes: list[int] | None
    """None: a mark such as the end of a turn."""

    @property
    def characters(self) -> int:
        """How many begin in it."""
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes or ())


class Pieces:
    """The tokens of a tokenizer, looked up once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._marks = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
        self._known: dict[int, Piece] = {}

    def __getitem__(self, token: int) -> Piece:
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def _look_up(self, token: int) -> Piece:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._marks:
            return Piece(name, None)
        # Some tokenizers drop the space that a text begins with: the second of two has it.
        text = self._decode(token, token)[len(self._decode(token)) :]
        if BROKEN not in text:
            return Piece(text, list(text.encode()))
        raw = _raw_bytes(name)
        return Piece("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw))

    def _decode(self, *tokens: int) -> str:
        text: str = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        return text


def _raw_bytes(name: str) -> bytes:
    """The bytes that a vocabulary's name of a token stands for, in either of the two usual spellings.

    Example: "<0xE2>" -> e2, and "âĢ", a letter for each byte, -> e2 80
    """
    if spelled := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
        return bytes.fromhex(spelled[1])
    return bytes(BYTE_OF_LETTER.get(letter, 0x3F) for letter in name)


def _byte_of_letter() -> dict[str, int]:
    """Bytes that can be seen are their own letters; the others have the letters from U+0100 on, in order."""
    letters = sorted(ByteLevel.alphabet())
    own = [ord(letter) for letter in letters if ord(letter) < 256]
    others = [byte for byte in range(256) if byte not in own]
    return dict(zip(letters, own + others, strict=True))


BYTE_OF_LETTER = _byte_of_letter()
