"""Reward functions: verifiers for untrusted model output, and the code that runs them over groups.

Modules in reading order:

    runner        score the rollouts of a group: both styles of reward function, failures, isolation
    trl_style     reward functions in the style of TRL: recognize them, make their arguments
    score_ahead   run the rewards of a batch at the same time: async rewards, several workers
    extraction    extract the answer from a completion: tags, boxes, numbers; exact arithmetic
    text_rewards  exact match, numbers, patterns, length; overlap with a reference; search; unit tests
    llm_judge     LLM-as-a-judge, through an OpenAI-compatible server; reward models by name
    verify/       compare an answer with the ground truth: LaTeX, math-verify

A reward is any function `(rollout, example) -> float`. To add one, name it in a task's `rewards`.
"""

from groupwise.isolation.worker import in_process
from groupwise.rewards.extraction import (
    Arithmetic,
    evaluate_expression,
    final_answer,
    is_well_formed,
    last_box,
    stated_number,
)
from groupwise.rewards.llm_judge import judge, reward_model
from groupwise.rewards.runner import RewardFunction, score_group
from groupwise.rewards.text_rewards import contains, exact_match, length, matches, same_number, unit_tests
from groupwise.rewards.verify.math_answer import score_boxed, verify_boxed

__all__ = [
    "Arithmetic",
    "RewardFunction",
    "contains",
    "evaluate_expression",
    "exact_match",
    "final_answer",
    "in_process",
    "is_well_formed",
    "judge",
    "last_box",
    "length",
    "matches",
    "reward_model",
    "same_number",
    "score_boxed",
    "score_group",
    "stated_number",
    "unit_tests",
    "verify_boxed",
]
