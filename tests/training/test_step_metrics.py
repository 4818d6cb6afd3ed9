"""Signs of silent failure, counted by hand on rollouts made for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.records import Rollout
from groupwise.training.step_metrics import loops, mask_fault, signs
from tests.support.synthetic_runs import group_of, rollout


def test_shares_are_of_all_completions_that_did_not_fail() -> None:
    first = group_of([rollout("a"), rollout("a"), rollout("b"), rollout("a", error="x")])
    second = group_of([rollout("b", prompt="3?"), rollout("c", prompt="3?")])
    found = signs([first, second])
    assert found["rollout/repeated"] == pytest.approx(1 / 5)  # the second "a"
    assert found["rollout/same_answer"] == pytest.approx(2 / 5)  # "b", to both prompts
    assert found["rollout/looping"] == 0.0
    assert found["rollout/mask_faults"] == 0.0
    assert signs([group_of([rollout("a", error="x")])]) == {}


def test_one_prompt_drawn_twice_in_a_step_is_not_a_prompt_independent_answer() -> None:
    assert signs([group_of([rollout("a")]), group_of([rollout("a")])])["rollout/same_answer"] == 0.0


@pytest.mark.parametrize(
    ("answer", "finish", "looping"),
    [
        ([1, 2, 3] + [7] * 16, "length", True),  # one token, 16 times
        ([1, 2, 3] + [7, 8, 9, 4, 5, 6] * 4, "length", True),  # six tokens, 4 times
        ([1, 2, 3] + [7, 8, 9] * 4, "length", False),  # 12 tokens are too few to tell
        ([1, 2, 3] + [7] * 16, "end", False),  # it ended by itself
        (list(range(30)), "length", False),
        ([7] * 15, "length", False),
    ],
)
def test_a_loop_is_a_stretch_again_and_again_until_the_limit(
    answer: list[int], finish: str, looping: bool
) -> None:
    count = 3 + len(answer)
    made = Rollout(
        prompt="?",
        text="",
        tokens=(5, 6, 7, *answer),
        trained=(False,) * 3 + (True,) * len(answer),
        logprobs=(0.0,) * count,
        entropies=(0.0,) * count,
        prompt_length=3,
        finish=finish,  # type: ignore[arg-type]
    )
    assert loops(made) == looping


def masked(trained: str, sampled: str, *, finish: str = "end") -> Rollout:
    """Return a rollout of three prompt tokens and more, `T` where trained and `s` where sampled."""
    count = len(trained)
    return Rollout(
        prompt="?",
        text="",
        tokens=tuple(range(count)),
        trained=tuple(letter == "T" for letter in trained),
        logprobs=tuple(-0.5 if letter == "s" else 0.0 for letter in sampled),
        entropies=tuple(0.7 if letter == "s" else 0.0 for letter in sampled),
        prompt_length=3,
        finish=finish,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("trained", "sampled", "fault"),
    [
        ("...TTTT", "...ssss", None),
        ("...TT...TT", "...ss...ss", None),  # a tool's tokens between two turns
        ("..TTTT.", "...ssss", "a prompt token is trained"),  # off by one
        ("...TTT.", "...ssss", "the end token is not trained"),
        ("....TTT", "...ssss", "a sampled token is not trained"),
        ("...TT........TT", "...ss........ss", None),
        ("...TTTTTTTTTTTT", "...ss........ss", "tokens that were not sampled are trained"),  # off by a turn
        ("...TTTTTTTT", "...s......s", None),  # six tokens without a choice prove nothing
        ("...TTTTTTTTTT", ".............", None),  # a sampler that tells no entropies
    ],
)
def test_a_mask_that_contradicts_the_sampler_is_a_fault(
    trained: str, sampled: str, fault: str | None
) -> None:
    assert mask_fault(masked(trained, sampled)) == fault


def test_where_choices_are_truncated_a_stretch_without_any_proves_nothing() -> None:
    forced = masked("...TTTTTTTTTTTT", "...ss........ss")
    assert mask_fault(forced, truncated=True) is None
    assert signs([group_of([forced])])["rollout/mask_faults"] == 1.0
    assert signs([group_of([forced])], truncated=True)["rollout/mask_faults"] == 0.0
    assert mask_fault(masked("..TTTT.", "...ssss"), truncated=True) == "a prompt token is trained"


def test_a_failed_rollout_is_not_judged() -> None:
    broken = replace(masked("..TTTTT", "...ssss"), error="lost")
    assert signs([group_of([broken, rollout("a")])])["rollout/mask_faults"] == 0.0
