"""Spending more tokens on an answer at test time: several answers, longer thinking, self-improvement.

A strategy answers prompts with whatever generates, and says what it spent:

    answer = strategy_named("self-consistency:8")
    draws = Draws(codec=policy, engine=engine, sampling=sampling, seed=0)
    (found,) = answer([prompt], draws, plain_judge())
    found.rollout.text, found.tokens
"""

from groupwise.evaluate.strategies.base import Sampler, Strategy, StrategyAnswer
from groupwise.evaluate.strategies.best_of_n import AnswerScorer, plain_judge, task_judge
from groupwise.evaluate.strategies.strategy_registry import STRATEGIES, strategy_named

__all__ = [
    "STRATEGIES",
    "AnswerScorer",
    "Sampler",
    "Strategy",
    "StrategyAnswer",
    "plain_judge",
    "strategy_named",
    "task_judge",
]
