"""Test-time strategies: spend more tokens on an answer by sampling several, thinking longer or revising.

    strategy = strategy_named("self-consistency:8")
    sampler = Sampler(codec=policy, engine=engine, sampling=sampling, seed=0)
    (answer,) = strategy([prompt], sampler, plain_judge())
    answer.rollout.text, answer.tokens

Modules in reading order:

    base               Sampler, StrategyAnswer, the type of a strategy, and the greedy baseline
    best_of_n          best-of-n and self-consistency; AnswerScorer, which compares and scores answers
    budget_forcing     longer or shorter thinking (s1)
    tpo                test-time preference optimization
    strategy_registry  strategies by name; accuracy against tokens

To add a strategy, write a function of the type `Strategy` and add it to `strategy_registry.STRATEGIES`.
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
