"""Held-out accuracy of greedy and sampled answers with confidence intervals, stored as JSON and text."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError
from groupwise.evaluate.intervals import (
    Difference,
    Interval,
    MeanReward,
    ballots,
    exact_interval,
    majority,
    mean_interval,
    paired_difference,
    pass_at_k,
    reward_interval,
)
from groupwise.files import write_atomically
from groupwise.isolation.time_limit import TimeLimits
from groupwise.records import Example, Group, Rollout, Sampling
from groupwise.rewards.runner import RewardContext, score_within
from groupwise.rewards.score_ahead import score_ahead
from groupwise.tasks.self_test import truth_of
from groupwise.tasks.task import Prompt, Task
from groupwise.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from groupwise.parallel.processes import Processes
    from groupwise.rollout.agent_rollouts import AgentRollouts
    from groupwise.rollout.collect import Generate, PromptCodec
    from groupwise.rollout.tool_rollouts import Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The accuracy of a policy on held-out examples."""

    examples: tuple[str, ...]
    """Fingerprints of the examples, by which two evaluations are paired."""
    greedy_right: tuple[bool, ...]
    """Whether the greedy answer to each example is right."""
    sampled_right: tuple[int, ...]
    """Number of right sampled answers to each example."""
    samples: int
    """Number of sampled answers per example."""
    failed: int
    """Number of answers whose scoring failed; they count as wrong."""
    length: float
    """Mean length of a sampled answer, in tokens."""
    majority_right: tuple[bool, ...] = ()
    """Whether the majority vote over the sampled answers to each example is right."""
    formatted: tuple[int, ...] = ()
    """Number of sampled answers to each example in the requested format; empty if none is requested."""
    rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Mean of each reward over the sampled answers to each example; a missing value counts as 0."""
    totals: tuple[float, ...] = ()
    """Mean weighted sum of the rewards over the sampled answers to each example; a failed answer counts as
    0."""
    spreads: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of each reward, and of their sum (""), over all sampled answers."""
    kinds: tuple[str | None, ...] = ()
    """The difficulty class of each example, such as the dataset that it is from."""
    answers: tuple[Group, ...] = ()
    """The greedy answers; not stored in JSON."""
    questions: tuple[QuestionResult, ...] = ()
    """Results per example; not read back from JSON."""

    @property
    def averages(self) -> list[float]:
        """Share of right samples for each example."""
        return [right / self.samples for right in self.sampled_right]

    @property
    def passing(self) -> list[float]:
        """pass@k for each example, with k the number of samples."""
        return [pass_at_k(self.samples, right, self.samples) for right in self.sampled_right]

    def intervals(self) -> dict[str, Interval]:
        return {
            "greedy": exact_interval(sum(self.greedy_right), len(self.greedy_right)),
            f"avg@{self.samples}": mean_interval(self.averages),
            f"pass@{self.samples}": mean_interval(self.passing),
        }

    def scores(self) -> dict[str, Interval | MeanReward]:
        """Return accuracy, and the mean reward unless it is the accuracy itself."""
        reward = self.mean_reward()
        return {**self.intervals(), **({"reward": reward} if reward else {})}

    def mean_reward(self) -> MeanReward | None:
        """Return the mean weighted sum of the rewards; None if it equals the accuracy or is unknown."""
        if not self.totals or list(self.totals) == self.averages:
            return None
        return reward_interval(self.totals, std=self.spreads.get("", 0.0))

    def on(self, examples: Sequence[str]) -> Evaluation:
        """Return the evaluation restricted to some examples, by fingerprint."""
        selected = set(examples)
        indices = [index for index, example in enumerate(self.examples) if example in selected]
        return replace(
            self,
            examples=tuple(self.examples[index] for index in indices),
            greedy_right=tuple(self.greedy_right[index] for index in indices),
            sampled_right=tuple(self.sampled_right[index] for index in indices),
            majority_right=(),
            formatted=(),
            rewards={},
            totals=tuple(self.totals[index] for index in indices) if self.totals else (),
            kinds=tuple(self.kinds[index] for index in indices) if self.kinds else (),
            answers=(),
            questions=(),
        )

    def by_kind(self) -> dict[str, Evaluation]:
        """Return the evaluation of each difficulty class, the easiest first; empty if there are none."""
        examples: dict[str, list[str]] = {}
        for example, kind in zip(self.examples, self.kinds, strict=False):
            if kind is not None:
                examples.setdefault(kind, []).append(example)
        parts = {kind: self.on(some) for kind, some in examples.items()}
        return dict(sorted(parts.items(), key=lambda part: -fmean(part[1].averages)))

    def details(self) -> dict[str, Interval]:
        """Return the accuracy of majority votes, and the share of answers in the requested format."""
        intervals: dict[str, Interval] = {}
        if self.majority_right:
            right = sum(self.majority_right)
            intervals[f"maj@{self.samples}"] = exact_interval(right, len(self.majority_right))
        if self.formatted:
            intervals["format"] = mean_interval([count / self.samples for count in self.formatted])
        return intervals

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, interval in {**self.intervals(), **self.details()}.items():
            values[f"eval/{name}"] = interval.mean
            values[f"eval/{name}_low"] = interval.low
            values[f"eval/{name}_high"] = interval.high
        for name, by_example in self.rewards.items():
            values[f"eval/reward/{name}"] = fmean(by_example)
        if (reward := self.mean_reward()) is not None:
            values |= {
                "eval/reward": reward.mean,
                "eval/reward_low": reward.low,
                "eval/reward_high": reward.high,
            }
        return {**values, "eval/failed": float(self.failed), "eval/length": self.length}

    def reward_intervals(self) -> dict[str, MeanReward]:
        """Return the mean, its interval and the spread of every reward."""
        return {
            name: reward_interval(values, std=self.spreads.get(name, 0.0))
            for name, values in self.rewards.items()
            if values
        }

    def summary(self) -> str:
        return " · ".join(f"{name} {score}" for name, score in self.scores().items())

    def to_json(self) -> dict[str, Any]:
        """Return everything except the answers; `from_json` is the inverse."""
        return {
            **self.metrics(),
            "samples": self.samples,
            "examples": list(self.examples),
            "greedy_right": [int(right) for right in self.greedy_right],
            "sampled_right": list(self.sampled_right),
            "majority_right": [int(right) for right in self.majority_right],
            "formatted": list(self.formatted),
            "rewards": {name: list(values) for name, values in self.rewards.items()},
            "totals": list(self.totals),
            "spreads": dict(self.spreads),
            "questions": [asdict(question_result) for question_result in self.questions],
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
            totals=tuple(record.get("totals", ())),
            spreads=record.get("spreads", {}),
            kinds=tuple(question.get("kind") for question in record.get("questions", ())),
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
    tools: Tools | AgentRollouts | None = None,
    processes: Processes | None = None,
    concurrency: int = 64,
) -> Evaluation:
    """Answer every example once greedily and `samples` times by sampling, and score the answers.

    The same seed gives the same sampling noise in every call, so two evaluations can be paired. With several
    processes, each answers a share of the examples, and all return the complete evaluation. Asynchronous
    rewards, judges and unit tests run `concurrency` calls at a time.
    """
    # Imported here, because reading evaluations should not import torch.
    from groupwise.parallel.processes import Processes
    from groupwise.rollout.collect import collect

    processes = processes or Processes()

    def answers(sampling: Sampling, count: int) -> list[Group]:
        own: list[Group] = []
        with processes.together():
            own = collect(
                examples,
                ask=task.ask,
                codec=codec,
                engine=engine,
                sampling=sampling,
                group_size=count,
                seed_parts=(seed, "evaluate"),
                tools=tools,
                share=processes.share,
            )
            own = score_groups(task, own, seconds=seconds, concurrency=concurrency)
        return processes.joined(own)

    greedy = answers(replace(sampling, temperature=0.0), 1)
    sampled = answers(sampling, samples)
    rollouts = [rollout for group in sampled for rollout in group.rollouts]
    questions = question_results(task, greedy, sampled)
    return Evaluation(
        examples=tuple(example.fingerprint for example in examples),
        greedy_right=tuple(question_result.greedy_right for question_result in questions),
        sampled_right=tuple(question_result.right for question_result in questions),
        majority_right=tuple(question_result.majority_right for question_result in questions)
        if task.predicted
        else (),
        formatted=tuple(question_result.formatted for question_result in questions) if task.format else (),
        samples=samples,
        failed=sum(r.error is not None for group in (*greedy, *sampled) for r in group.rollouts),
        length=sum(rollout.length for rollout in rollouts) / len(rollouts),
        rewards=mean_rewards(sampled),
        totals=tuple(fmean(total_reward(rollout) for rollout in group.rollouts) for group in sampled),
        spreads=reward_spreads(rollouts),
        kinds=tuple(question_result.kind for question_result in questions),
        answers=tuple(greedy),
        questions=tuple(questions),
    )


def score_groups(task: Task, groups: Sequence[Group], *, seconds: float, concurrency: int) -> list[Group]:
    """Score all groups; rewards that can run at the same time do."""
    context = RewardContext()
    score_ahead(groups, rewards=task.rewards, seconds=seconds, concurrency=concurrency, context=context)
    with TimeLimits(seconds) as limit:
        return [
            score_within(limit, group, rewards=task.rewards, weights=task.weights, context=context)
            for group in groups
        ]


def mean_rewards(groups: Sequence[Group]) -> dict[str, tuple[float, ...]]:
    """Return the mean of each reward over the rollouts of each group; a failed rollout counts as 0."""
    names = dict.fromkeys(name for group in groups for rollout in group.rollouts for name in rollout.rewards)
    return {
        name: tuple(fmean(rollout.rewards.get(name, 0.0) for rollout in group.rollouts) for group in groups)
        for name in names
    }


def total_reward(rollout: Rollout) -> float:
    """Return the weighted sum of a rollout's rewards; 0 for one that could not be scored."""
    return rollout.reward if rollout.error is None and math.isfinite(rollout.reward) else 0.0


def reward_spreads(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the standard deviation of each reward, and of their sum (""), over scored rollouts."""
    scored = [rollout for rollout in rollouts if rollout.error is None]
    names = dict.fromkeys(name for rollout in scored for name in rollout.rewards)
    spreads = {name: pstdev(r.rewards[name] for r in scored if name in r.rewards) for name in names}
    return {**spreads, "": pstdev(map(total_reward, scored))} if scored else {}


def compare(before: Evaluation, after: Evaluation) -> dict[str, Difference]:
    """Return the paired differences on the examples that both evaluations share.

    Sampled metrics require equal numbers of samples. Empty if there are fewer than two shared examples.
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


def kind_summary(before: Evaluation | None, result: Evaluation) -> dict[str, dict[str, Any]]:
    """Return accuracy, prompts and change since `before` of each difficulty class, the easiest first."""
    metric = f"avg@{result.samples}"
    earlier = before.by_kind() if before else {}
    summary: dict[str, dict[str, Any]] = {}
    for kind, part in result.by_kind().items():
        changes = compare(earlier[kind], part) if kind in earlier else {}
        summary[kind] = {
            metric: asdict(part.intervals()[metric]),
            "prompts": len(part.examples),
            **({"change": asdict(changes[metric])} if metric in changes else {}),
        }
    return summary


def transcripts(result: Evaluation, *, count: int) -> str:
    """Return the first greedy answers with their prompts and rewards, as text."""
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
    """Return the prompt as text, with the role before each message of a chat."""
    if isinstance(rollout.prompt, str):
        return rollout.prompt
    return "\n".join(f"[{message['role']}] {message['content']}" for message in rollout.prompt)


TRANSCRIPTS = 10
"""Number of answers in the text file."""


def make_writable(folder: Path) -> None:
    """Create the folder and a file in it, to fail before hours of evaluation rather than after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(cannot_save(folder, error)) from error


def cannot_save(folder: Path, error: OSError) -> str:
    return f"cannot save results in {folder}: {error.strerror or error}; choose another folder by --output"


def write_evaluation(folder: Path, name: str, result: Evaluation, *, about: Mapping[str, Any]) -> Path:
    """Write the text file, then the JSON file: if the JSON exists, so does the text."""
    write_atomically(folder / f"{name}.txt", transcripts(result, count=TRANSCRIPTS))
    path = folder / f"{name}.json"
    write_atomically(path, json.dumps({**about, **result.to_json()}, indent=1))
    return path


def read_evaluation(run: RunFolder, name: str) -> Evaluation | None:
    """Return a stored evaluation, or None if there is none."""
    path = run.evaluations / f"{name}.json"
    try:
        return Evaluation.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): move or delete it") from error


def unused_name(folder: Path, stem: str) -> str:
    """Return the stem, with a number if an evaluation of that name exists."""
    name, number = stem, 1
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{stem}-{number}"
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionResult:
    """The results of one held-out example."""

    asked: str
    kind: str | None
    """The task's difficulty class of the example."""
    truth: str
    greedy: str | None
    """The answer extracted from the greedy completion."""
    greedy_right: bool
    right: int
    """Number of right sampled completions."""
    formatted: int
    """Number of sampled completions in the requested format."""
    majority_right: bool
    """Whether the majority vote is right."""
    votes: Mapping[str, int]
    """Number of sampled completions for each extracted answer, the most frequent first."""
    error: str | None = None
    """The first scoring error, if any."""


def question_results(task: Task, greedy: Sequence[Group], sampled: Sequence[Group]) -> list[QuestionResult]:
    """Combine the scored greedy and sampled answers to each example."""
    return [question_result(task, one, several) for one, several in zip(greedy, sampled, strict=True)]


def question_result(task: Task, greedy: Group, sampled: Group) -> QuestionResult:
    (best,) = greedy.rollouts
    stated = [stated_answer(task, rollout) for rollout in sampled.rollouts]
    chosen = majority(stated, task.alike)
    return QuestionResult(
        asked=question_in(best.prompt),
        kind=task.difficulty(greedy.example) if task.difficulty else None,
        truth=truth_of(task, greedy.example),
        greedy=stated_answer(task, best),
        greedy_right=task.is_right(best),
        right=sum(map(task.is_right, sampled.rollouts)),
        formatted=sum(map(task.is_formatted, sampled.rollouts)),
        majority_right=chosen is not None and task.is_right(sampled.rollouts[chosen]),
        votes={str(stated[voters[0]]): len(voters) for voters in ballots(stated, task.alike)},
        error=next((one.error for one in (best, *sampled.rollouts) if one.error is not None), None),
    )


def stated_answer(task: Task, rollout: Rollout) -> str | None:
    """Return the answer that a completion states; the whole text if the task has no `predicted`."""
    return task.predicted(rollout.text) if task.predicted else rollout.text.strip()


def question_in(prompt: Prompt) -> str:
    """Return the question of a prompt: its last user message."""
    if isinstance(prompt, str):
        return prompt
    questions = [str(message["content"]) for message in prompt if message["role"] == "user"]
    return questions[-1] if questions else str(prompt)
