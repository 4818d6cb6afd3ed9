"""How far a rollout with tools may go."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.config.checks import between


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsConfig:
    """Conversations of tasks with tools; the others have one turn."""

    max_turns: int = 4
    """Turns of the policy in one rollout; `rollout.max_tokens` bounds each."""
    max_calls: int = 8
    """Tool calls in one rollout; a call past this is answered with an error."""
    max_tokens: int = 640
    """Tokens behind the prompt in all, results included; no turn begins without room for it."""
    seconds: float = 10.0
    """Time limit of one call."""
    result_characters: int = 4000
    """Longest result that the policy is shown; the rest is cut off."""
    overlap: bool | None = None
    """Run tools beside the generator. None: on a GPU, or when one is async; repeatable bits need false."""

    def __post_init__(self) -> None:
        between("tools.max_turns", self.max_turns, 1)
        between("tools.max_calls", self.max_calls, 0)
        between("tools.max_tokens", self.max_tokens, 1)
        between("tools.seconds", self.seconds, 0.001)
        between("tools.result_characters", self.result_characters, 1)
