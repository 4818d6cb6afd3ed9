"""Several answers, one chosen: by majority (self-consistency) or by a score (best of n)."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.evaluate.strategies.answer import Answer, Draws, Strategy, spent
from groupwise.evaluate.strategies.judge import Judge
from groupwise.evaluate.votes import majority
from groupwise.tasks.task import Prompt


def self_consistency(count: int) -> Strategy:
    """Take the answer that most of `count` completions come to (Wang et al., arXiv 2203.11171)."""

    def answer(prompts: Sequence[Prompt], draws: Draws, judge: Judge) -> list[Answer]:
        chosen = []
        for rollouts in draws.draw(prompts, count=count, purpose="several"):
            first = majority([judge.states(rollout) for rollout in rollouts], judge.alike)
            chosen.append(Answer(rollout=rollouts[first or 0], tokens=spent(rollouts)))
        return chosen

    return answer


def best_of(count: int) -> Strategy:
    """Take the one of `count` completions that scores best, the first of several such."""

    def answer(prompts: Sequence[Prompt], draws: Draws, judge: Judge) -> list[Answer]:
        chosen = []
        for number, rollouts in enumerate(draws.draw(prompts, count=count, purpose="several")):
            scores = [judge.score(number, rollout) for rollout in rollouts]
            best = rollouts[scores.index(max(scores))]
            chosen.append(Answer(rollout=best, tokens=spent(rollouts)))
        return chosen

    return answer
