"""Test-time preference optimization: the policy compares its best and worst answers, and tries again.

After Li et al. (arXiv 2501.12895): a score selects the best and the worst answer so far. The policy
describes the difference in words, turns it into advice, and answers again with the advice in its prompt.
No weights are updated.
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.evaluate.held_out import question_in
from groupwise.evaluate.strategies.base import Sampler, Strategy, StrategyAnswer, spent
from groupwise.evaluate.strategies.best_of_n import AnswerScorer
from groupwise.records import Message, Rollout
from groupwise.tasks.task import Prompt

COMPARE = (
    "Question:\n{question}\n\nA good answer:\n{best}\n\nA worse answer:\n{worst}\n\n"
    "Say briefly what the good answer does better, and what is still wrong with it."
)
ADVISE = "{comparison}\n\nFrom this, give short advice on how to answer the question better."
RETRY = "{question}\n\nAdvice: {advice}"


def preference_optimization(rounds: int, *, count: int = 4) -> Strategy:
    """Draw `count` answers, improve on them for `rounds` rounds, and return the best of all."""

    def answer(prompts: Sequence[Prompt], sampler: Sampler, scorer: AnswerScorer) -> list[StrategyAnswer]:
        pools = [AnswerPool(prompt, number, scorer) for number, prompt in enumerate(prompts)]
        add_answers(pools, sampler.draw(prompts, count=count, purpose="several"))
        for turn in range(rounds):
            compared = comment(sampler, [pool.compare() for pool in pools], purpose=f"compare {turn}")
            advised = comment(sampler, [advise(words) for (words,) in compared], purpose=f"advise {turn}")
            for pool, (words,), (advice,) in zip(pools, compared, advised, strict=True):
                pool.tokens += words.length + advice.length
            retries = [retry(pool.prompt, advice) for pool, (advice,) in zip(pools, advised, strict=True)]
            add_answers(pools, sampler.draw(retries, count=count, purpose=f"retry {turn}"))
        return [StrategyAnswer(rollout=pool.best, tokens=pool.tokens) for pool in pools]

    return answer


class AnswerPool:
    """All answers to one prompt so far, with their scores."""

    def __init__(self, prompt: Prompt, number: int, scorer: AnswerScorer) -> None:
        self.prompt = prompt
        self.number = number
        self.scorer = scorer
        self.scored: list[tuple[float, Rollout]] = []
        self.tokens = 0

    def add(self, rollouts: Sequence[Rollout]) -> None:
        self.scored += [(self.scorer.score(self.number, rollout), rollout) for rollout in rollouts]
        self.tokens += spent(rollouts)

    @property
    def best(self) -> Rollout:
        return max(self.scored, key=lambda one: one[0])[1]

    def compare(self) -> Prompt:
        worst = min(self.scored, key=lambda one: one[0])[1]
        return COMPARE.format(question=question_in(self.prompt), best=self.best.text, worst=worst.text)


def comment(sampler: Sampler, prompts: Sequence[Prompt], *, purpose: str) -> list[list[Rollout]]:
    """Let the policy comment on answers in one turn without tools."""
    return sampler.draw(prompts, count=1, purpose=purpose, call_tools=False)


def add_answers(pools: Sequence[AnswerPool], drawn: Sequence[Sequence[Rollout]]) -> None:
    for pool, rollouts in zip(pools, drawn, strict=True):
        pool.add(rollouts)


def advise(comparison: Rollout) -> Prompt:
    return ADVISE.format(comparison=comparison.text)


def retry(prompt: Prompt, advice: Rollout) -> Prompt:
    """Return the prompt with the advice after the question; everything else, such as a prefill, stays."""
    if isinstance(prompt, str):
        return RETRY.format(question=prompt, advice=advice.text)
    last = max(index for index, message in enumerate(prompt) if message["role"] == "user")
    messages: list[Message] = list(prompt)
    content = RETRY.format(question=messages[last]["content"], advice=advice.text)
    messages[last] = {**messages[last], "content": content}
    return messages
