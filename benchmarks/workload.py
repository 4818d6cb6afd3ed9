"""The work that both sides of `against_trl` do: prompts, reward and sizes.

Imported by both sides, so nothing here may be faster for one of them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from groupwise.config.schema import TaskConfig
from groupwise.records import Example
from groupwise.tasks import Split, Task
from groupwise.tasks.builtin.countdown import countdown, countdown_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One side's work, as it is handed to the side's own process."""

    model: str
    """A folder in Hugging Face layout."""
    lora_r: int
    """0 trains every weight."""
    prompts: int
    group_size: int
    max_tokens: int
    fixed_length: bool
    """Every answer has exactly `max_tokens` tokens, whatever the policy would like."""
    warm_up: int
    """Steps that are made and not counted."""
    steps: int
    threads: int
    device: str = "cpu"
    prompt_words: int = 0
    """Prompts of so many random words, each a token, for a random model; 0: Countdown's."""
    micro_batch: int = 0
    """Sequences in one forward and backward pass of TRL."""
    pass_tokens: int | None = None
    """Tokens in one of ours, which are packed; None: as many as the learner chooses."""
    recompute: bool = False
    """Gradient checkpointing, which TRL turns on unless told otherwise."""
    learning_rate: float = 1e-6
    """So small that lengths do not drift during the measurement."""
    seed: int = 0

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one training step took."""

    seconds: float
    cpu_seconds: float
    """Of all threads: what a busy machine does not segment."""
    generating: float
    scoring: float
    """Rewards and advantages, and on TRL's side the padding of the batch."""
    updating: float
    trained_tokens: int
    prompts: str
    """Digest of the prompts' token ids: equal on both sides, or the comparison is void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one side reports."""

    steps: tuple[Step, ...]
    trained_parameters: int
    dtypes: str
    """Of the output layer and of what is trained."""
    prompt_tokens: int
    """Of the longest prompt."""
    start_gb: float
    """Held after loading the model, before the first step."""
    peak_gb: float
    """Of the process, from its start; on a GPU of the updates, since generation takes what is free."""
    versions: dict[str, str]


def read_job(path: Path) -> Job:
    return Job(**json.loads(path.read_text(encoding="utf-8")))


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_result(path: Path) -> Result:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    steps = tuple(Step(**step) for step in values.pop("steps"))
    return Result(steps=steps, **values)


def write_result(path: Path, result: Result) -> None:
    path.write_text(json.dumps(asdict(result)), encoding="utf-8")


def task(job: Job) -> Task:
    """Countdown's prompts or random words, with a reward that tells every answer from every other."""
    rewards = {"digits": digits_reward}
    if not job.prompt_words:
        puzzles = countdown().examples
        return Task(name="countdown", examples=puzzles, prompt=countdown_prompt, rewards=rewards)
    rng = random.Random(job.seed)
    rows = [
        {"words": " ".join(f"w{rng.randrange(500)}" for _ in range(job.prompt_words))}
        for _ in range(job.prompts * (job.warm_up + job.steps))
    ]
    return Task(name="words", examples=rows, prompt=lambda example: str(example["words"]), rewards=rewards)


def split(job: Job) -> Split:
    return task(job).split(TaskConfig(held_out=0), job.seed)


def examples(job: Job) -> list[Example]:
    """The examples of all steps, in order."""
    rows, _ = split(job).take(0, job.prompts * (job.warm_up + job.steps))
    return rows


def digits_reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """The share of digits, and noise too small to matter that keeps any two answers of a group apart.

    No group is then without signal, so neither side may leave one out. Written in TRL's style, which
    both sides take.
    """
    return [digits(as_text(completion), place) for place, completion in enumerate(completions)]


def digits(text: str, place: int) -> float:
    share = sum(character.isdigit() for character in text) / max(1, len(text))
    noise = hashlib.blake2b(f"{place} {text}".encode(), digest_size=4).digest()
    return share + int.from_bytes(noise, "little") / 2**32 * 1e-2


def as_text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """The same for the same token ids in the same order."""
    text = json.dumps([list(prompt) for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
