"""Streams that pass for a terminal or for a pipe."""

from __future__ import annotations

import io


class FakeTerminal(io.StringIO):
    """Text kept in memory that passes for a terminal, or for a pipe that someone closes."""

    def __init__(self, *, terminal: bool = False) -> None:
        super().__init__()
        self.terminal = terminal
        self.gone: OSError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.gone:
            raise self.gone
        return super().write(text)
