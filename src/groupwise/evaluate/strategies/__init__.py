"""Spending more tokens on an answer at test time: several answers, longer thinking, self-improvement.

A strategy answers prompts with whatever generates, and says what it spent:

    answer = strategy_named("self-consistency:8")
    draws = Draws(codec=policy, engine=engine, sampling=sampling, seed=0)
    (found,) = answer([prompt], draws, plain_judge())
    found.rollout.text, found.tokens
"""

from groupwise.evaluate.strategies.answer import Answer, Draws, Strategy
from groupwise.evaluate.strategies.judge import Judge, plain_judge, task_judge
from groupwise.evaluate.strategies.named import STRATEGIES, strategy_named

__all__ = [
    "STRATEGIES",
    "Answer",
    "Draws",
    "Judge",
    "Strategy",
    "plain_judge",
    "strategy_named",
    "task_judge",
]
