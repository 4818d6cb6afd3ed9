"""Rewards of rollouts that search, by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from groupwise.records import Call, Example, Rollout, Turn
from groupwise.rewards.text_rewards import (
    answer_of,
    cites_well,
    lcs_length,
    mrr,
    recall,
    rouge_l,
    searches_once,
    shares_words,
    similar,
    thinks_every_turn,
    token_f1,
    unrelated,
)

NOTHING = Example({"answer": "a red fox"})


def search(*found: str, error: str | None = None) -> Call:
    return Call(name="search", found=found, error=error)


def rollout(*turns: Turn) -> Rollout:
    return Rollout(
        prompt="?", text=turns[-1].text, tokens=(1, 2), trained=(False, True), logprobs=(0.0, -1.0),
        entropies=(0.0, 0.0), prompt_length=1, finish="end", turns=turns,
    )  # fmt: skip


def asking(*calls: Call, text: str = "<think>hm</think>") -> Turn:
    return Turn(text=text, calls=calls)


ANSWER = Turn(text="<think>so</think>\nA fox [d2].")
TWO = rollout(asking(search("d1", "d2")), asking(search("d2", "d3")), ANSWER)


def test_mrr_takes_the_best_search_for_each_thing_needed():
    assert mrr(needed=lambda e: [("d2",)])(TWO, NOTHING) == 1.0
    assert mrr(needed=lambda e: [("d3", "d9")])(TWO, NOTHING) == 0.5
    assert mrr(needed=lambda e: [("d2",), ("d3",), ("d4",)])(TWO, NOTHING) == pytest.approx(0.5)
    assert mrr(needed=lambda e: [("d1",)])(rollout(ANSWER), NOTHING) == 0.0
    assert mrr(needed=lambda e: [("d1",)])(rollout(asking(search("d1", error="x")), ANSWER), NOTHING) == 0.0


def test_recall_counts_what_is_among_the_first_few():
    needed = [("d1",), ("d3",)]
    assert recall(needed=lambda e: needed, at=2)(TWO, NOTHING) == 1.0
    assert recall(needed=lambda e: needed, at=1)(TWO, NOTHING) == 0.5


def test_format_is_the_share_of_turns_that_think_and_nothing_without_a_call():
    careless = rollout(asking(search("d1"), text="let me see"), ANSWER)
    assert thinks_every_turn(careless, NOTHING) == 0.5
    assert thinks_every_turn(TWO, NOTHING) == 1.0
    assert thinks_every_turn(rollout(ANSWER), NOTHING) == 0.0


def test_search_once_pays_most_for_exactly_one_call_that_works():
    assert searches_once(rollout(asking(search("d1")), ANSWER), NOTHING) == 1.0
    assert searches_once(TWO, NOTHING) == 0.5
    assert searches_once(rollout(asking(search(error="x"), search("d1")), ANSWER), NOTHING) == 0.5
    assert searches_once(rollout(asking(search(error="x")), ANSWER), NOTHING) == 0.0
    assert searches_once(rollout(ANSWER), NOTHING) == 0.0


def test_citations_must_have_been_read():
    assert cites_well(TWO, NOTHING) == 1.0
    made_up = rollout(asking(search("d1")), Turn(text="So [d1] and [d7]."))
    assert cites_well(made_up, NOTHING) == 0.5
    assert cites_well(rollout(Turn(text="So.")), NOTHING) is None


def test_the_answer_is_what_follows_the_thinking_and_never_a_call():
    assert answer_of(TWO) == "A fox [d2]."
    assert answer_of(rollout(Turn(text='<think>x</think><tool_call>{"name"'))) == ""
    assert answer_of(rollout(asking(search("d1")))) == ""


def test_overlap_in_words_and_in_order():
    assert token_f1("the red fox", "a red red fox") == pytest.approx(4 / 7)
    assert rouge_l("a b c", "a x c") == pytest.approx(2 / 3)
    assert rouge_l("c b a", "a b c") == pytest.approx(1 / 3)
    assert token_f1("", "x") == rouge_l("", "x") == 0.0
    reward = shares_words(golds=lambda e: ["nothing alike", e["answer"]])
    assert reward(rollout(Turn(text="<think>no</think> A red fox")), NOTHING) == 1.0


def test_words_in_order_are_counted_as_the_table_does():
    rng = random.Random(0)
    for _ in range(200):
        said, wanted = ([rng.choice("abcd") for _ in range(rng.randrange(12))] for _ in range(2))
        table = [[0] * (len(wanted) + 1) for _ in range(len(said) + 1)]
        for i, word in enumerate(said):
            for j, other in enumerate(wanted):
                same = table[i][j] + 1 if word == other else 0
                table[i + 1][j + 1] = max(same, table[i][j + 1], table[i + 1][j])
        assert lcs_length(said, wanted) == table[-1][-1]


def test_similarity_begins_at_the_baseline():
    vectors = {"x": [1.0, 0.0], "a red fox": [0.6, 0.8], "same": [0.6, 0.8], "far": [0.8, -0.6]}

    def embed(texts):
        return np.array([vectors[text] for text in texts])

    reward = similar(golds=lambda e: [e["answer"]], embed=embed, baseline=0.2)
    assert reward(rollout(Turn(text="x")), NOTHING) == pytest.approx((0.6 - 0.2) / 0.8)
    assert reward(rollout(Turn(text="same")), NOTHING) == pytest.approx(1.0)
    assert reward(rollout(Turn(text="far")), NOTHING) == 0.0
    assert unrelated(["x", "same", "far"], embed) == pytest.approx((0.6 + 0.0) / 2)
