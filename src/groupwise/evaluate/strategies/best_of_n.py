"""How a strategy reads and compares answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupwise.evaluate.held_out import states
from groupwise.evaluate.intervals import majority
from groupwise.evaluate.strategies.base import Sampler, Strategy, StrategyAnswer, spent
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.extraction import final_answer, last_box, solution_of
from groupwise.rewards.runner import score_group
from groupwise.tasks.task import Prompt, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScorer:
    """What may be asked about answers without knowing the right one."""

    states: Callable[[Rollout], str | None]
    """The answer that a completion comes to."""
    alike: Callable[[str, str], bool]
    """Whether two of these are the same."""
    score: Callable[[int, Rollout], float]
    """How good an answer to the prompt of this number is."""
    ends_thinking: str | None
    """What the policy writes between thinking and answering. None: nothing, it just ends."""


def task_judge(task: Task, examples: Sequence[Example], *, seconds: float) -> AnswerScorer:
    """Judge as in training: answers are compared as the task does it and scored by its rewards.

    Where the rewards read a gold answer, choosing by them tells what a perfect judge would reach.
    """

    def score(number: int, rollout: Rollout) -> float:
        group = Group(example=examples[number], rollouts=(rollout,))
        (scored,) = score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds).rollouts
        return scored.reward if scored.error is None else float("-inf")

    return AnswerScorer(
        states=lambda rollout: states(task, rollout),
        alike=task.alike,
        score=score,
        ends_thinking=task.ends_thinking,
    )


def plain_judge(*, ends_thinking: str | None = None) -> AnswerScorer:
    """Judge anything: by a box, a tagged answer or the last line, and by how sure the policy was."""
    return AnswerScorer(
        states=stated_anywhere,
        alike=lambda one, other: one.casefold() == other.casefold(),
        score=lambda number, rollout: confidence(rollout),
        ends_thinking=ends_thinking,
    )


def stated_anywhere(rollout: Rollout) -> str | None:
    """Return what stands in a box or in answer tags, else the last line."""
    text = rollout.text
    for find in (last_box, final_answer, solution_of):
        if (found := find(text)) is not None:
            return found
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def confidence(rollout: Rollout) -> float:
    """Return the mean log-probability of the tokens that the policy chose."""
    chosen = [logprob for logprob, own in zip(rollout.logprobs, rollout.trained, strict=True) if own]
    return sum(chosen) / len(chosen) if chosen else float("-inf")


def self_consistency(count: int) -> Strategy:
    """Take the answer that most of `count` completions come to (Wang et al., arXiv 2203.11171)."""

    def answer(prompts: Sequence[Prompt], draws: Sampler, judge: AnswerScorer) -> list[StrategyAnswer]:
        chosen = []
        for rollouts in draws.draw(prompts, count=count, purpose="several"):
            first = majority([judge.states(rollout) for rollout in rollouts], judge.alike)
            chosen.append(StrategyAnswer(rollout=rollouts[first or 0], tokens=spent(rollouts)))
        return chosen

    return answer


def best_of(count: int) -> Strategy:
    """Take the one of `count` completions that scores best, the first of several such."""

    def answer(prompts: Sequence[Prompt], draws: Sampler, judge: AnswerScorer) -> list[StrategyAnswer]:
        chosen = []
        for number, rollouts in enumerate(draws.draw(prompts, count=count, purpose="several")):
            scores = [judge.score(number, rollout) for rollout in rollouts]
            best = rollouts[scores.index(max(scores))]
            chosen.append(StrategyAnswer(rollout=best, tokens=spent(rollouts)))
        return chosen

    return answer
