"""Rewards: verifiers for untrusted model output, and running them over groups.

Modules in reading order:

    runner        score the rollouts of a group: user functions, TRL-style functions, failures
    worker        user functions in a worker process that can be killed
    time_limit    a time limit for code that runs in this process
    extraction    find the answer in a completion: tags, boxes, numbers
    text_rewards  length, overlap with a reference, retrieval rewards
    llm_judge     grades from a language model behind an OpenAI-compatible server
    verify/       compare an answer with the truth: arithmetic, LaTeX, math-verify

A reward is any function `(rollout, example) -> float`; a task names its rewards.
"""

from groupwise.rewards.extraction import final_answer, is_well_formed, last_box, stated_number
from groupwise.rewards.runner import RewardFunction, score_group
from groupwise.rewards.text_rewards import length
from groupwise.rewards.verify.arithmetic import Arithmetic, evaluate_expression
from groupwise.rewards.verify.math_answer import score_boxed, verify_boxed
from groupwise.rewards.worker import in_process

__all__ = [
    "Arithmetic",
    "RewardFunction",
    "evaluate_expression",
    "final_answer",
    "in_process",
    "is_well_formed",
    "last_box",
    "length",
    "score_boxed",
    "score_group",
    "stated_number",
    "verify_boxed",
]
