"""Verifiers for untrusted model output, and running them over groups."""

from groupwise.rewards.arithmetic import Arithmetic, evaluate_expression
from groupwise.rewards.boxed import last_box
from groupwise.rewards.math_answer import score_boxed, verify_boxed
from groupwise.rewards.numbers import stated_number
from groupwise.rewards.reward_call import RewardFunction
from groupwise.rewards.score import score_group
from groupwise.rewards.tags import final_answer, is_well_formed
from groupwise.rewards.text import length
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
