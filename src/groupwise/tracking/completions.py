"""The answers with nothing left to improve, as text to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from groupwise.records import Group, Rollout
from groupwise.tracking.files import write_atomically

RULE = "=" * 50


def write_completions(path: Path, groups: Sequence[Group], *, is_perfect: Callable[[Rollout], bool]) -> None:
    """Write every perfect rollout, prompt and completion; no file when there is none."""
    found = [rollout for group in groups for rollout in group.valid if is_perfect(rollout)]
    if found:
        write_atomically(path, "".join(f"{prompt_text(r)}\n{r.transcript}\n{RULE}\n" for r in found))


def prompt_text(rollout: Rollout) -> str:
    """Return what was asked: the prompt, or of a chat all but the system's words."""
    if isinstance(rollout.prompt, str):
        return f"Prompt {rollout.prompt}"
    said = (message["content"] for message in rollout.prompt if message["role"] != "system")
    return f"Prompt {chr(10).join(map(str, said))}"
