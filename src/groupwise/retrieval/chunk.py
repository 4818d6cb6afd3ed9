"""Documents to chunks: sentence by sentence, within a budget of tokens, nothing lost.

The text is cut, never rewritten: the chunks of a document, put together, are its text. Each is shown and
indexed as `context`, a blank line, and the chunk. One pass over the tokens, whatever tokenizer counts them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from groupwise.errors import ConfigError
from groupwise.retrieval.documents import Document

Spans = Callable[[str], Sequence[tuple[int, int]]]
"""A tokenizer: where in a text each token begins and ends."""

TOKEN = re.compile(r"\w+|[^\w\s]")
SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+|\n+")
LEAST = 16
"""Tokens that the context must leave to the text; a longer context is cut."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document, as it is indexed."""

    id: str
    document: str
    text: str
    """With the context before it."""


def plain_spans(text: str) -> list[tuple[int, int]]:
    """Words and marks: about what a subword tokenizer counts in English."""
    return [match.span() for match in TOKEN.finditer(text)]


def chunks_of(document: Document, *, budget: int = 256, spans: Spans = plain_spans) -> Iterator[Chunk]:
    """Yield the chunks of a document, none of more than `budget` tokens, context included."""
    if budget < 2 * LEAST:
        raise ConfigError(f"a chunk needs a budget of at least {2 * LEAST} tokens; got {budget}")
    context = shortened(document.context, budget - LEAST, spans)
    room = budget - len(spans(context))
    for number, piece in enumerate(pieces(document.text, room=room, spans=spans)):
        text = f"{context}\n\n{piece}" if context else piece
        yield Chunk(f"{document.id}_chunk_{number}", document.id, text)


def shortened(text: str, budget: int, spans: Spans) -> str:
    found = spans(text)
    return text if len(found) <= budget else text[: found[budget - 1][1]]


def pieces(text: str, *, room: int, spans: Spans) -> Iterator[str]:
    """Yield parts of the text that end at the furthest sentence end within `room` tokens, or else hard there.

    Joined, they are the text.
    """
    tokens = spans(text)
    starts = [start for start, _ in tokens]
    ends = [bisect_right(starts, match.end() - 1) for match in SENTENCE_END.finditer(text)]
    """After how many tokens each sentence has ended."""
    first, at = 0, 0
    while first < len(tokens):
        last = min(first + room, len(tokens))
        if last < len(tokens):
            place = bisect_right(ends, last) - 1
            if place >= 0 and ends[place] > first:
                last = ends[place]
        cut = starts[last] if last < len(tokens) else len(text)
        yield text[at:cut]
        first, at = last, cut
