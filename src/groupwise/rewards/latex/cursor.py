"""A place in a list of tokens, and what was met on the way there."""

from __future__ import annotations

from groupwise.rewards.latex.tokens import Malformed, Token


class Cursor:
    """Looks at the next token and takes it when it is the right one."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.said: list[str] = []
        """Words and units met on the way."""
        self.either_sign = False
        """Whether a ± was met."""

    @property
    def next(self) -> Token | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def sees(self, *texts: str) -> bool:
        token = self.next
        return token is not None and token.kind != "words" and token.text in texts

    def take(self, *texts: str) -> str | None:
        if not self.sees(*texts):
            return None
        self.position += 1
        return self.tokens[self.position - 1].text

    def need(self, text: str) -> None:
        if not self.take(text):
            raise Malformed(f"{text!r} is missing")
