from __future__ import annotations

import pytest

from groupwise.rewards import final_answer, is_well_formed


@pytest.mark.parametrize(
    ("completion", "answer", "well_formed"),
    [
        ("so</think><answer>1</answer>", "1", True),
        ("so</think> <answer>1</answer>", "1", True),
        ("so</think>\n<answer>1</answer>", "1", True),
        ("so</think>\n\n<answer> 1 </answer>\n", "1", True),
        ("an <answer> goes here</think>\n<answer>1</answer>", "1", True),  # mentioned while thinking
        ("try <answer>2</answer>?</think>\n<answer>1</answer>", "1", True),
        ("</think>\n<answer>1</answer>", "1", False),  # no thinking
        (" \n</think>\n<answer>1</answer>", "1", False),
        ("so</think>\n<answer></answer>", "", False),
        ("so</think>\nThus <answer>1</answer>", "1", False),
        ("so</think>\n<answer>1</answer> done", "1", False),
        ("<think>so</think>\n<answer>1</answer>", "1", False),  # opened twice
        ("so</think>\n<answer><think>1</answer>", "<think>1", False),
        ("a</think>b</think>\n<answer>1</answer>", None, False),
        ("so</think>\n<answer>1</think></answer>", None, False),
        ("so</think>\n<answer>1</answer><answer>2</answer>", None, False),
        ("so</think>\n<answer>1<answer>2</answer></answer>", None, False),
        ("so</think>\n<answer>1<answer>2</answer>", None, False),
        ("so</think>\n<answer>1</answer></answer>", None, False),
        ("so</think>\n</answer>1<answer>", None, False),
        ("so</think>\n<answer>1", None, False),
        ("<answer>1</answer></think>", None, False),  # answered only while thinking
        ("so <answer>1</answer>", "1", False),  # thinking never closed, but one answer in all
        ("<answer>2</answer> or <answer>1</answer>", None, False),
        ("so</think>\n<Answer>1</Answer>", None, False),
        ("", None, False),
    ],
)
def test_answer_and_format_of_a_completion(completion, answer, well_formed):
    assert final_answer(completion) == answer
    assert is_well_formed(completion) is well_formed


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "completion",
    [
        "<answer>" * 300_000,
        "</answer>" * 300_000,
        "</think>" * 300_000,
        "a</think>" + "<answer>" * 300_000 + "</answer>",
        "<" * 2_000_000,
        "a</think>" + " " * 2_000_000 + "<answer>",
        "a</think><answer>" + " " * 2_000_000,
        ("<think>" * 100_000 + "</think>") * 2,
    ],
)
def test_megabytes_of_tags_earn_nothing_in_linear_time(completion):
    assert final_answer(completion) is None
    assert not is_well_formed(completion)
