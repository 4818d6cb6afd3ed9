"""Verifiers for untrusted model output, and running them over groups."""

from groupwise.rewards.arithmetic import Arithmetic, evaluate_expression
from groupwise.rewards.score import RewardFunction, score_group
from groupwise.rewards.tags import final_answer, is_well_formed
from groupwise.rewards.text import length

__all__ = [
    "Arithmetic",
    "RewardFunction",
    "evaluate_expression",
    "final_answer",
    "is_well_formed",
    "length",
    "score_group",
]
