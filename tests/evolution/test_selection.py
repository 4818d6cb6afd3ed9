"""Who goes on: decisions on paired scores, and values that stay within their bounds."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

import groupwise as gw
from groupwise.config import read_config
from groupwise.config.runtime import EvolveConfig
from groupwise.errors import ConfigError
from groupwise.evolution.search_space import SearchSpace, applied
from groupwise.evolution.selection import Scores, halving, keep_all, pbt, ranked, tournament

GOOD = (1.0,) * 9 + (0.0,)
"""Better than BAD beyond doubt: nine prompts more of ten."""
BAD = (0.0,) * 10
SLIGHTLY = (1.0,) + (0.0,) * 9
"""Better than BAD by one prompt of ten, which may be noise: 0.1 ± 2.26 × 0.316 / √10 = 0.1 ± 0.226."""

TASK = gw.Task(
    name="any",
    examples=[{"n": 1}, {"n": 2}],
    prompt=lambda example: "?",
    rewards={"right": lambda rollout, example: 1.0, "form": lambda rollout, example: 1.0},
    weights={"form": 0.5},
)


def parents(select, scores: Scores, seed: int = 0, **settings) -> dict[int, int | None]:
    fates = select(scores, random.Random(seed), EvolveConfig(**settings))
    return {place: fate.parent for place, fate in fates.items()}


def test_the_best_comes_first_and_of_equals_the_lower_place():
    assert ranked({0: BAD, 1: GOOD, 2: GOOD, 3: None, 4: SLIGHTLY}) == [1, 2, 4, 0]


def test_the_elite_goes_on_as_it_is_and_a_tournament_is_won_by_the_better():
    for seed in range(20):
        fates = tournament({0: BAD, 1: GOOD, 2: BAD}, random.Random(seed), EvolveConfig(tournament=12))
        assert {place: fate.parent for place, fate in fates.items()} == {0: 1, 1: 1, 2: 1}
        assert fates[1].changes == "no"
        assert fates[0].changes == "one"


def test_a_member_is_replaced_only_when_the_difference_is_real_unless_asked_otherwise():
    scores = {0: BAD, 1: SLIGHTLY}
    assert parents(tournament, scores, tournament=20) == {0: 0, 1: 1}
    assert parents(tournament, scores, tournament=20, certain=False) == {0: 1, 1: 1}
    assert parents(halving, scores) == {0: 0, 1: 1}
    assert parents(halving, scores, certain=False) == {0: None, 1: 1}
    assert parents(pbt, scores, share=0.5) == {0: 0, 1: 1}
    assert parents(pbt, scores, share=0.5, certain=False) == {0: 1, 1: 1}


def test_without_elitism_the_best_may_change_its_values():
    fate = tournament({0: BAD, 1: GOOD}, random.Random(0), EvolveConfig(elitism=False))[1]
    assert (fate.parent, fate.changes) == (1, "one")


def test_pbt_copies_from_the_best_share_to_the_worst_and_leaves_the_middle_alone():
    scores = {0: GOOD, 1: BAD, 2: SLIGHTLY, 3: SLIGHTLY}
    fates = pbt(scores, random.Random(0), EvolveConfig(share=0.25))
    assert {place: fate.parent for place, fate in fates.items()} == {0: 0, 1: 0, 2: 2, 3: 3}
    assert [fates[place].changes for place in range(4)] == ["no", "all", "no", "no"]


def test_halving_drops_the_worse_half():
    assert parents(halving, {0: BAD, 1: GOOD, 2: SLIGHTLY, 3: GOOD}) == {0: None, 1: 1, 2: None, 3: 3}
    assert parents(halving, {0: GOOD}) == {0: 0}


@pytest.mark.parametrize("select", [tournament, pbt])
def test_a_broken_member_gives_its_place_to_another(select):
    fates = parents(select, {0: None, 1: SLIGHTLY, 2: BAD})
    assert fates[0] in (1, 2)
    assert fates[1] == 1


@pytest.mark.parametrize("select", [halving, keep_all])
def test_a_broken_member_is_dropped_where_places_are_not_given_on(select):
    assert parents(select, {0: None, 1: BAD}) == {0: None, 1: 1}


def test_first_values_are_spread_over_the_bounds_by_their_logarithm():
    space = SearchSpace({"optim.learning_rate": (1e-6, 1e-2), "weights.form": (0.0, 4.0)})
    drawn = space.spread(4, seed=3)
    # One member in each of 1e-6 … 1e-5 … 1e-4 … 1e-3 … 1e-2, and in each of 0 … 1 … 2 … 3 … 4.
    assert sorted(math.floor(math.log10(values["optim.learning_rate"])) for values in drawn) == [
        -6,
        -5,
        -4,
        -3,
    ]
    assert sorted(math.floor(values["weights.form"]) for values in drawn) == [0, 1, 2, 3]
    assert drawn == space.spread(4, seed=3) != space.spread(4, seed=4)


def test_a_mutation_changes_one_value_by_a_factor_within_the_bounds():
    space = SearchSpace({"optim.learning_rate": (1e-4, 1e-3), "rollout.group_size": (4, 12)})
    values = {"optim.learning_rate": 9e-4, "rollout.group_size": 4.0}
    seen: Counter[tuple[float, float]] = Counter()
    for seed in range(200):
        changed = space.mutate(values, random.Random(seed), (0.8, 1.2))
        seen[changed["optim.learning_rate"], changed["rollout.group_size"]] += 1
    # 9e-4 × 1.2 is cut at 1e-3; 4 × 1.2 rounds to 5; 4 × 0.8 is cut at 4: nothing changes.
    assert set(seen) == {(9e-4 * 0.8, 4.0), (1e-3, 4.0), (9e-4, 5.0), (9e-4, 4.0)}
    assert all(30 < count < 70 for count in seen.values())


def test_values_reach_the_settings_and_the_weights_of_rewards():
    config = read_config(
        overrides=[
            "evolve.vary={learning_rate: [1e-5, 1e-3], rollout.group_size: [4, 8], weights.form: [0, 2]}"
        ]
    ).resolve()
    space = SearchSpace.of(config, TASK)
    start = space.start(config, TASK)
    assert start == {"optim.learning_rate": 1e-4, "rollout.group_size": 8.0, "weights.form": 0.5}
    changed, task = applied({**start, "weights.form": 1.5, "optim.learning_rate": 3e-4}, config, TASK)
    assert (changed.optim.learning_rate, changed.rollout.group_size) == (3e-4, 8)
    assert task.weights == {"form": 1.5}


@pytest.mark.parametrize(
    ("vary", "part"),
    [
        ("{rollout.prompts: [1, 2]}", "cannot vary between members"),
        ("{weights.forms: [0, 1]}", "did you mean 'weights.form'"),
        ("{beta: 3}", r"beta must be \[low, high\]; got 3"),
        ("{beta: [2, 1]}", "is above its upper bound"),
        ("{beta: [a, 1]}", "must be a number"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(vary, part):
    with pytest.raises(ConfigError, match=part):
        SearchSpace.of(read_config(overrides=[f"evolve.vary={vary}"]), TASK)
