"""Held-out accuracy: greedy, and of several sampled answers to each prompt, with intervals."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError
from groupwise.evaluate.intervals import (
    Difference,
    Interval,
    ballots,
    majority,
    mean_interval,
    paired_difference,
    pass_at_k,
    wilson,
)
from groupwise.files import write_atomically
from groupwise.records import Example, Group, Rollout, Sampling
from groupwise.rewards.runner import score_group
from groupwise.tasks.self_test import truth_of
from groupwise.tasks.task import Prompt, Task
from groupwise.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from groupwise.parallel.processes import Processes
    from groupwise.rollout.collect import Generate, PromptCodec, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the policy can do on prompts it never trained on."""

    examples: tuple[str, ...]
    """Fingerprints of the examples: what pairs two evaluations."""
    greedy_right: tuple[bool, ...]
    """For each example, whether the greedy answer is right."""
    sampled_right: tuple[int, ...]
    """For each example, how many of its sampled answers are right."""
    samples: int
    """Sampled answers to each example."""
    failed: int
    """Answers that could not be scored; they count as wrong."""
    length: float
    """Mean tokens of a sampled answer."""
    majority_right: tuple[bool, ...] = ()
    """For each example, whether most of its sampled answers agree on the right one."""
    formatted: tuple[int, ...] = ()
    """For each example, how many of its sampled answers have the form asked for; empty: none was."""
    rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Each reward by name: for each example, its mean over the sampled answers that have it, else 0."""
    answers: tuple[Group, ...] = ()
    """The greedy answers, to read; not kept in JSON."""
    questions: tuple[QuestionResult, ...] = ()
    """Everything example by example, to read; not read back from JSON."""

    @property
    def averages(self) -> list[float]:
        """Share of right samples, by example."""
        return [right / self.samples for right in self.sampled_right]

    @property
    def passing(self) -> list[float]:
        """Whether one of the samples is right, by example."""
        return [pass_at_k(self.samples, right, self.samples) for right in self.sampled_right]

    def intervals(self) -> dict[str, Interval]:
        return {
            "greedy": wilson(sum(self.greedy_right), len(self.greedy_right)),
            f"avg@{self.samples}": mean_interval(self.averages),
            f"pass@{self.samples}": mean_interval(self.passing),
        }

    def on(self, examples: Sequence[str]) -> Evaluation:
        """Return the accuracy on some of the examples alone, by fingerprint."""
        wanted = set(examples)
        kept = [index for index, example in enumerate(self.examples) if example in wanted]
        return replace(
            self,
            examples=tuple(self.examples[index] for index in kept),
            greedy_right=tuple(self.greedy_right[index] for index in kept),
            sampled_right=tuple(self.sampled_right[index] for index in kept),
            majority_right=(),
            formatted=(),
            rewards={},
            answers=(),
            questions=(),
        )

    def details(self) -> dict[str, Interval]:
        """Return what is measured besides accuracy: the majority's, and keeping to the form."""
        found: dict[str, Interval] = {}
        if self.majority_right:
            right = sum(self.majority_right)
            found[f"maj@{self.samples}"] = wilson(right, len(self.majority_right))
        if self.formatted:
            found["format"] = mean_interval([count / self.samples for count in self.formatted])
        return found

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, interval in {**self.intervals(), **self.details()}.items():
            values[f"eval/{name}"] = interval.mean
            values[f"eval/{name}_low"] = interval.low
            values[f"eval/{name}_high"] = interval.high
        for name, by_example in self.rewards.items():
            values[f"eval/reward/{name}"] = fmean(by_example)
        return {**values, "eval/failed": float(self.failed), "eval/length": self.length}

    def reward_intervals(self) -> dict[str, Interval]:
        """Of every reward that lies between 0 and 1."""
        return {
            name: mean_interval(values)
            for name, values in self.rewards.items()
            if values and min(values) >= 0 and max(values) <= 1
        }

    def summary(self) -> str:
        return " · ".join(f"{name} {interval}" for name, interval in self.intervals().items())

    def to_json(self) -> dict[str, Any]:
        """Return everything but the answers; `from_json` reads it back."""
        return {
            **self.metrics(),
            "samples": self.samples,
            "examples": list(self.examples),
            "greedy_right": [int(right) for right in self.greedy_right],
            "sampled_right": list(self.sampled_right),
            "majority_right": [int(right) for right in self.majority_right],
            "formatted": list(self.formatted),
            "rewards": {name: list(values) for name, values in self.rewards.items()},
            "questions": [asdict(question) for question in self.questions],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Evaluation:
        return cls(
            examples=tuple(record["examples"]),
            greedy_right=tuple(bool(right) for right in record["greedy_right"]),
            sampled_right=tuple(record["sampled_right"]),
            majority_right=tuple(bool(right) for right in record.get("majority_right", ())),
            formatted=tuple(record.get("formatted", ())),
            samples=record["samples"],
            failed=int(record["eval/failed"]),
            length=record["eval/length"],
            rewards={name: tuple(values) for name, values in record.get("rewards", {}).items()},
        )


def evaluate(
    task: Task,
    examples: Sequence[Example],
    *,
    codec: PromptCodec,
    engine: Generate,
    sampling: Sampling,
    samples: int,
    seed: int,
    seconds: float,
    tools: Tools | None = None,
    processes: Processes | None = None,
) -> Evaluation:
    """Answer every example once greedily and `samples` times as in training, and score the answers.

    The same seed gives the same noise whenever it is called, so two evaluations can be paired. Several
    processes each answer a share of the examples, and all return the whole.
    """
    # Not above: who only reads evaluations need not wait for torch.
    from groupwise.parallel.processes import Processes
    from groupwise.rollout.collect import collect

    processes = processes or Processes()

    def answers(how: Sampling, count: int) -> list[Group]:
        own: list[Group] = []
        with processes.together():
            own = collect(
                examples,
                ask=task.ask,
                codec=codec,
                engine=engine,
                sampling=how,
                group_size=count,
                seed_parts=(seed, "evaluate"),
                tools=tools,
                share=processes.share,
            )
            own = [score_group(g, rewards=task.rewards, weights=task.weights, seconds=seconds) for g in own]
        return processes.joined(own)

    greedy = answers(replace(sampling, temperature=0.0), 1)
    sampled = answers(sampling, samples)
    drawn = [rollout for group in sampled for rollout in group.rollouts]
    questions = question_by_question(task, greedy, sampled)
    return Evaluation(
        examples=tuple(example.fingerprint for example in examples),
        greedy_right=tuple(question.greedy_right for question in questions),
        sampled_right=tuple(question.right for question in questions),
        majority_right=tuple(question.majority_right for question in questions) if task.predicted else (),
        formatted=tuple(question.formatted for question in questions) if task.format else (),
        samples=samples,
        failed=sum(r.error is not None for group in (*greedy, *sampled) for r in group.rollouts),
        length=sum(rollout.length for rollout in drawn) / len(drawn),
        rewards=mean_rewards(sampled),
        answers=tuple(greedy),
        questions=tuple(questions),
    )


def mean_rewards(groups: Sequence[Group]) -> dict[str, tuple[float, ...]]:
    """Return each reward's mean over the members of each group; a failed member counts as 0."""
    names = dict.fromkeys(name for group in groups for rollout in group.rollouts for name in rollout.rewards)
    return {
        name: tuple(fmean(rollout.rewards.get(name, 0.0) for rollout in group.rollouts) for group in groups)
        for name in names
    }


def compare(before: Evaluation, after: Evaluation) -> dict[str, Difference]:
    """Return the change on the examples that both have, greedy and, with equally many samples, sampled.

    Empty when there are too few such examples to say anything.
    """

    def change(earlier: Sequence[float], later: Sequence[float]) -> Difference:
        old = dict(zip(before.examples, earlier, strict=True))
        new = dict(zip(after.examples, later, strict=True))
        shared = [example for example in new if example in old]
        return paired_difference([old[e] for e in shared], [new[e] for e in shared])

    if len(set(before.examples) & set(after.examples)) < 2:
        return {}
    changes = {"greedy": change(before.greedy_right, after.greedy_right)}
    if before.samples == after.samples:
        changes[f"avg@{after.samples}"] = change(before.averages, after.averages)
        changes[f"pass@{after.samples}"] = change(before.passing, after.passing)
        for name in after.rewards:
            if name in before.rewards:
                changes[f"reward/{name}"] = change(before.rewards[name], after.rewards[name])
    return changes


def transcripts(result: Evaluation, *, count: int) -> str:
    """Return the first greedy answers with their prompts and rewards, to read."""
    assert result.answers, "an evaluation read from JSON has no answers"
    pairs = list(zip(result.answers, result.greedy_right, strict=True))[:count]
    return ("=" * 78 + "\n").join(transcript(group.rollouts[0], right=right) for group, right in pairs)


def transcript(rollout: Rollout, *, right: bool) -> str:
    rewards = ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items())
    verdict = "right" if right else f"wrong ({rollout.error})" if rollout.error else "wrong"
    return (
        f"{as_text(rollout)}\n--- answer\n{rollout.transcript}\n"
        f"--- {verdict}; {rewards or 'no reward'}; ended by {rollout.finish}\n"
    )


def as_text(rollout: Rollout) -> str:
    """Return the prompt as one text, with the role before each message of a chat."""
    if isinstance(rollout.prompt, str):
        return rollout.prompt
    return "\n".join(f"[{message['role']}] {message['content']}" for message in rollout.prompt)


TRANSCRIPTS = 10
"""Answers in the text file."""


def make_writable(folder: Path) -> None:
    """Make the folder, and a file in it: what cannot be written is found before hours of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(cannot_save(folder, error)) from error


def cannot_save(folder: Path, error: OSError) -> str:
    return f"cannot save results in {folder}: {error.strerror or error}; name another folder by --output"


def write_evaluation(folder: Path, name: str, result: Evaluation, *, about: Mapping[str, Any]) -> Path:
    """Write both files, the JSON last: where it is, the other is too."""
    write_atomically(folder / f"{name}.txt", transcripts(result, count=TRANSCRIPTS))
    path = folder / f"{name}.json"
    write_atomically(path, json.dumps({**about, **result.to_json()}, indent=1))
    return path


def read_evaluation(run: RunFolder, name: str) -> Evaluation | None:
    """Return an evaluation that was written earlier; None when there is none."""
    path = run.evaluations / f"{name}.json"
    try:
        return Evaluation.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): move it away") from error


def unused_name(folder: Path, stem: str) -> str:
    """Return the stem, numbered when an evaluation of that name exists."""
    name, number = stem, 1
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{stem}-{number}"
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionResult:
    """One held-out example and what became of it."""

    asked: str
    kind: str | None
    """How hard it is, in the task's words."""
    truth: str
    greedy: str | None
    """The answer that the greedy completion states."""
    greedy_right: bool
    right: int
    """Sampled completions that are right."""
    formatted: int
    """Sampled completions in the form that was asked for."""
    majority_right: bool
    """Whether the answer that most of them state is right."""
    votes: Mapping[str, int]
    """How many sampled completions state each answer, the most stated first."""
    error: str | None = None
    """Why a completion could not be scored: of the first such one."""


def question_by_question(
    task: Task, greedy: Sequence[Group], sampled: Sequence[Group]
) -> list[QuestionResult]:
    """Look at each example's greedy answer and at its sampled ones, all of them scored."""
    return [question(task, one, several) for one, several in zip(greedy, sampled, strict=True)]


def question(task: Task, greedy: Group, sampled: Group) -> QuestionResult:
    (best,) = greedy.rollouts
    stated = [states(task, rollout) for rollout in sampled.rollouts]
    chosen = majority(stated, task.alike)
    return QuestionResult(
        asked=question_in(best.prompt),
        kind=task.difficulty(greedy.example) if task.difficulty else None,
        truth=truth_of(task, greedy.example),
        greedy=states(task, best),
        greedy_right=task.is_right(best),
        right=sum(map(task.is_right, sampled.rollouts)),
        formatted=sum(map(task.is_formatted, sampled.rollouts)),
        majority_right=chosen is not None and task.is_right(sampled.rollouts[chosen]),
        votes={str(stated[voters[0]]): len(voters) for voters in ballots(stated, task.alike)},
        error=next((one.error for one in (best, *sampled.rollouts) if one.error is not None), None),
    )


def states(task: Task, rollout: Rollout) -> str | None:
    """Return the answer that a completion states: all of it, where the task does not say how to find it."""
    return task.predicted(rollout.text) if task.predicted else rollout.text.strip()


def question_in(prompt: Prompt) -> str:
    """Return the question alone: the last message that is the user's."""
    if isinstance(prompt, str):
        return prompt
    questions = [str(message["content"]) for message in prompt if message["role"] == "user"]
    return questions[-1] if questions else str(prompt)
