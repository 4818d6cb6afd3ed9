"""Verifiers for untrusted model output, and running them over groups."""

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
