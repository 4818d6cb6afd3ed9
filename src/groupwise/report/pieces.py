"""Token ids to the text that each stands for, special tokens included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from groupwise.tracking.run_folder import RunFolder

UNFINISHED = "\ufffd"
"""What decoding gives for the first bytes of a character whose other bytes are in the next token."""
LONGEST = 4
"""Bytes of a character: after this many tokens there is nothing to wait for."""


class Pieces:
    """The run's tokenizer, read when first needed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._lock = threading.Lock()

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return each token's text; the texts joined are the whole text."""
        return pieces(tokens, self._decoder())

    def turns(self, tokens: Sequence[int], trained: Sequence[bool]) -> list[dict[str, Any]]:
        """Return the stretches that the policy wrote and those that came from outside, in turn."""
        turns: list[dict[str, Any]] = []
        for piece, chosen in zip(self.of(tokens), trained, strict=True):
            if not turns or turns[-1]["policy"] != chosen:
                turns.append({"policy": chosen, "text": ""})
            turns[-1]["text"] += piece
        return turns

    def _decoder(self) -> Callable[[Sequence[int]], str]:
        with self._lock:
            if self._decode is None:
                path = tokenizer_file(self.folder)
                if path is None:
                    return as_numbers
                from tokenizers import Tokenizer

                try:
                    tokenizer = Tokenizer.from_file(str(path))
                except Exception:  # the library's own; a damaged file must not hide the rest of a run
                    return as_numbers
                self._decode = lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
            return self._decode


def as_numbers(tokens: Sequence[int]) -> str:
    """What stands for the text where no tokenizer can be read."""
    return "".join(f"⟨{token}⟩" for token in tokens)


def tokenizer_file(folder: RunFolder) -> Path | None:
    """Return where the run's tokenizer lies; a checkpoint has it too."""
    candidates = [folder.tokenizer, *sorted(folder.checkpoints.glob("step-*/tokenizer.json"))]
    return next((path for path in candidates if path.is_file()), None)


def pieces(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return each token's text as what it adds to the text of the tokens before it.

    A token is decoded together with the one before: decoded alone, some tokenizers drop its leading
    space. Where characters are spread over several tokens, the last of them gets the text.
    """
    found: list[str] = []
    start = read = 0  # the last token that was told, and the first that was not
    for end in range(1, len(tokens) + 1):
        text = added(tokens, start, read, end, decode)
        if text.endswith(UNFINISHED) and end - read < LONGEST and end < len(tokens):
            found.append("")
            continue
        found.append(text)
        start, read = read, end
    return found


def added(
    tokens: Sequence[int], start: int, read: int, end: int, decode: Callable[[Sequence[int]], str]
) -> str:
    """Return what the tokens from `read` to `end` add to the text of those from `start` to `read`."""
    before, text = decode(tokens[start:read]), decode(tokens[start:end])
    # Broken bytes may read differently in company: then the tokens are taken by themselves.
    return text[len(before) :] if text.startswith(before) else decode(tokens[read:end])
