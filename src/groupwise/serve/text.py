"""From tokens to text while they come: never half a character, never part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.records import Finish

BROKEN = "\ufffd"
"""What bytes that are no character decode to: more of it may be under way."""
REACH = 8
"""So many tokens before the new ones, or some more, are decoded with them: a beginning decodes otherwise."""


class TextStream:
    """The text of one answer. `showable` tells how much of a text may be shown."""

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
        """Tokens whose text is in `_text`."""
        self._start = 0
        """The first of the tokens that are decoded with new ones, and the text of those read already."""
        self._before = ""
        self._text = ""
        self._sent = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All there is so far, up to a stop string."""
        return self._text

    @property
    def sent(self) -> str:
        """What was shown; the rest is kept back."""
        return self._text[: self._sent]

    def push(self, tokens: Sequence[int], finish: Finish | None) -> str:
        """Take tokens in and return the text that can be shown now."""
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
        """Where text that may turn out to be part of a string begins."""
        longest = max(map(len, self._stop), default=0)
        for size in range(min(longest - 1, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(string.startswith(tail) for string in self._stop):
                return len(self._text) - size
        return len(self._text)
