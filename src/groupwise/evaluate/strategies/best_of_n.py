"""Best-of-n and self-consistency, and how a strategy extracts, compares and scores answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupwise.evaluate.held_out import stated_answer
from groupwise.evaluate.intervals import majority
from groupwise.evaluate.strategies.base import Sampler, Strategy, StrategyAnswer, spent
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.extraction import final_answer, last_box, solution_of
from groupwise.rewards.runner import score_group
from groupwise.tasks.task import Prompt, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScorer:
    """Extracts, compares and scores answers for a strategy."""

    states: Callable[[Rollout], str | None]
    """Extracts the answer from a completion."""
    alike: Callable[[str, str], bool]
    """Whether two extracted answers are equal."""
    score: Callable[[int, Rollout], float]
    """Scores an answer to the prompt at this index."""
    ends_thinking: str | None
    """Text between thinking and answer. None: there is none."""


def task_judge(task: Task, examples: Sequence[Example], *, seconds: float) -> AnswerScorer:
    """Compare answers as the task does and score them by its rewards.

    If the rewards read a gold answer, this measures the upper bound of a perfect judge.
    """

    def score(number: int, rollout: Rollout) -> float:
        group = Group(example=examples[number], rollouts=(rollout,))
        (scored,) = score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds).rollouts
        return scored.reward if scored.error is None else float("-inf")

    return AnswerScorer(
        states=lambda rollout: stated_answer(task, rollout),
        alike=task.alike,
        score=score,
        ends_thinking=task.ends_thinking,
    )


def plain_judge(*, ends_thinking: str | None = None) -> AnswerScorer:
    """Compare boxes, tagged answers or last lines; score by the confidence of the policy."""
    return AnswerScorer(
        states=stated_anywhere,
        alike=lambda one, other: one.casefold() == other.casefold(),
        score=lambda number, rollout: confidence(rollout),
        ends_thinking=ends_thinking,
    )


def stated_anywhere(rollout: Rollout) -> str | None:
    """Return the content of a box or of answer tags, else the last line."""
    text = rollout.text
    for find in (last_box, final_answer, solution_of):
        if (answer := find(text)) is not None:
            return answer
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def confidence(rollout: Rollout) -> float:
    """Return the mean log-probability of the sampled tokens."""
    chosen = [logprob for logprob, own in zip(rollout.logprobs, rollout.trained, strict=True) if own]
    return sum(chosen) / len(chosen) if chosen else float("-inf")


def self_consistency(count: int) -> Strategy:
    """Return the most frequent answer of `count` completions (Wang et al., arXiv 2203.11171)."""

    def answer(prompts: Sequence[Prompt], sampler: Sampler, scorer: AnswerScorer) -> list[StrategyAnswer]:
        chosen = []
        for rollouts in sampler.draw(prompts, count=count, purpose="several"):
            first = majority([scorer.states(rollout) for rollout in rollouts], scorer.alike)
            chosen.append(StrategyAnswer(rollout=rollouts[first or 0], tokens=spent(rollouts)))
        return chosen

    return answer


def best_of(count: int) -> Strategy:
    """Return the best-scoring of `count` completions, the first among ties."""

    def answer(prompts: Sequence[Prompt], sampler: Sampler, scorer: AnswerScorer) -> list[StrategyAnswer]:
        chosen = []
        for number, rollouts in enumerate(sampler.draw(prompts, count=count, purpose="several")):
            scores = [scorer.score(number, rollout) for rollout in rollouts]
            best = rollouts[scores.index(max(scores))]
            chosen.append(StrategyAnswer(rollout=best, tokens=spent(rollouts)))
        return chosen

    return answer
