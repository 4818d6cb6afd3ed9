"""Unit tests as a reward: which code of an answer runs, what it pays, and many answers at the same time."""

from __future__ import annotations

import pytest

import groupwise as gw
from groupwise.errors import ConfigError, RolloutError
from groupwise.evaluate.held_out import score_groups
from groupwise.isolation.sandbox import SandboxError
from groupwise.records import Example, Group
from groupwise.rewards import text_rewards
from groupwise.rewards.text_rewards import answered_code, code_blocks
from groupwise.tasks import Task
from tests.support.scripted_rollouts import answered

TESTS = ["assert twice(2) == 4", "assert twice('a') == 'aa'"]
RIGHT = "```python\ndef twice(x):\n    return 2 * x\n```"


def test_the_code_is_in_closed_python_blocks_after_the_thinking():
    assert code_blocks("```python\na = 1\n```\ntext\n```\nb = 2\n```") == ["a = 1", "b = 2"]
    assert code_blocks("```py\na\n```\n```rust\nb\n```\n```json\n{}\n```") == ["a"]
    assert code_blocks("<think>```python\nx\n```</think>\n```python\ny\n```") == ["y"]
    assert code_blocks("```python\nnever closed") == []
    assert code_blocks("no block") == []
    two = "```python\ndef f(x): return x\n```\nUse it:\n```python\nf(1)\n```"
    assert answered_code(two, defines="f") == "def f(x): return x"
    assert answered_code(two) == "f(1)"
    assert answered_code("") is None
    assert len(code_blocks("```x\n" * 200_000)) == 0  # in linear time


def test_the_share_of_tests_or_all_of_them():
    example = Example({"tests": TESTS})
    half = "```python\ndef twice(x):\n    return 4\n```"
    share, every = gw.rewards.unit_tests(), gw.rewards.unit_tests(partial=False)
    assert [share(answered(text), example) for text in (RIGHT, half, "none")] == [1.0, 0.5, 0.0]
    assert [every(answered(text), example) for text in (RIGHT, half, "none")] == [1.0, 0.0, 0.0]
    calls = Example({"t": [{"args": [3], "expected": 6}], "f": "twice", "s": "import math"})
    assert gw.rewards.unit_tests("t", entry_point="f", setup="s")(answered(RIGHT), calls) == 1.0


def test_equal_answers_run_once(monkeypatch):
    runs: list[str] = []
    run = text_rewards.sandbox.run
    monkeypatch.setattr(text_rewards.sandbox, "run", lambda **job: runs.append(job["code"]) or run(**job))
    example = Example({"tests": [*TESTS, "assert twice(0) == 0"]})
    rewards = {"share": gw.rewards.unit_tests(), "every": gw.rewards.unit_tests(partial=False)}
    task = Task(name="t", examples=[example], prompt=lambda e: "?", rewards=rewards)
    group = Group(example=example, rollouts=tuple(answered(RIGHT) for _ in range(6)))
    (scored,) = score_groups(task, [group], seconds=20.0, concurrency=64)
    assert [rollout.reward for rollout in scored.rollouts] == [2.0] * 6
    assert runs.count(answered_code(RIGHT)) == 1
    assert len(runs) == 2  # one showed which tests call the code


def test_many_answers_run_at_the_same_time_but_not_more_than_there_are_cores(monkeypatch):
    monkeypatch.setattr(text_rewards.sandbox, "workers", 2)
    running, most = [], []
    run = text_rewards.sandbox.run

    def counted(**job):
        running.append(1)
        most.append(len(running))
        try:
            return run(**job)
        finally:
            running.pop()

    monkeypatch.setattr(text_rewards.sandbox, "run", counted)
    example = Example({"tests": TESTS})
    codes = [f"```python\ndef twice(x):\n    return 2 * x if x != {n} else None\n```" for n in range(3, 11)]
    task = Task(
        name="t", examples=[example], prompt=lambda e: "?", rewards={"share": gw.rewards.unit_tests()}
    )
    group = Group(example=example, rollouts=tuple(map(answered, codes)))
    (scored,) = score_groups(task, [group], seconds=20.0, concurrency=64)
    assert [rollout.reward for rollout in scored.rollouts] == [1.0] * 8
    assert max(most) == 2


def test_a_broken_sandbox_fails_the_rollout_and_is_not_a_reward_of_0(monkeypatch):
    def broken(**job):
        raise SandboxError("the process of the sandbox ended")

    monkeypatch.setattr(text_rewards.sandbox, "run", broken)
    example = Example({"tests": ["assert twice(7) == 14"]})
    with pytest.raises(RolloutError, match="sandbox ended"):
        gw.rewards.unit_tests()(answered(RIGHT), example)
    sets = {"tests": [{"args": [{1}], "expected": 1}], "entry_point": "twice"}
    with pytest.raises(RolloutError, match="plain JSON"):
        gw.rewards.unit_tests()(answered(RIGHT), Example(sets))
    with pytest.raises(ConfigError, match="memory_mb must be at least 64"):
        gw.rewards.unit_tests(memory_mb=1)


WRONG = "```python\ndef twice(x):\n    return 3 * x\n```"


@pytest.mark.parametrize(
    "test",
    [
        "def test_two():\n    assert twice(2) == 4",
        "async def test_two():\n    assert twice(2) == 4",
        "class TestTwice:\n    def test_two(self):\n        assert twice(2) == 4",
        "import unittest\nclass Two(unittest.TestCase):\n    def setUp(self):\n        self.two = 2\n"
        "    def test_two(self):\n        self.assertEqual(twice(self.two), 4)",
        "class TestTwice:\n    def setup_class(cls):\n        cls.two = 2\n"
        "    def setup_method(self, method):\n        self.four = 2 * self.two\n"
        "    def teardown_method(self):\n        assert self.four == 4\n"
        "    def test_two(self):\n        assert twice(self.two) == self.four",
        "import unittest\nclass Two(unittest.TestCase):\n"
        "    def test_two(self):\n        self.assertEqual(twice(2), 4)\n"
        "    @unittest.skip('later')\n    def test_later(self):\n        self.fail()\n"
        "@unittest.skip('later')\nclass Later(unittest.TestCase):\n"
        "    def test_later(self):\n        self.fail()",
        "from unittest import TestCase, TestLoader\nclass Two(TestCase):\n"
        "    def test_two(self):\n        self.assertEqual(twice(2), 4)",
        "assert twice(CONSTANT) == 2 * CONSTANT",
    ],
)
def test_every_usual_form_of_a_test_is_run(test):
    example = Example({"tests": [test], "setup": "CONSTANT = 5"})
    assert [gw.rewards.unit_tests()(answered(text), example) for text in (RIGHT, WRONG)] == [1.0, 0.0]


@pytest.mark.parametrize(
    "test",
    [
        "from typing import NamedTuple\nclass TestCase(NamedTuple):\n    test_value: int\n    result: int\n"
        "for case in [TestCase(2, 4)]:\n    assert twice(case.test_value) == case.result",
        "from dataclasses import dataclass\n@dataclass\nclass TestCase:\n    test_value: int = 2\n"
        "assert twice(TestCase().test_value) == 4",
        "class TestRunner:\n    def __init__(self, function):\n        self.function = function\n"
        "    def test_all(self):\n        assert self.function(2) == 4\nTestRunner(twice).test_all()",
        "def test_case(value, result):\n    assert twice(value) == result\ntest_case(2, 4)",
        "class TestTwice:\n    test_values = [2]\n    def test_two(self):\n"
        "        assert [twice(two) for two in self.test_values] == [4]",
    ],
)
def test_what_a_test_defines_for_itself_is_not_run_as_a_test(test):
    example = Example({"tests": [test]})
    assert [gw.rewards.unit_tests()(answered(text), example) for text in (RIGHT, WRONG)] == [1.0, 0.0]


@pytest.mark.parametrize(
    "test",
    [
        "def check(candidate):\n    assert candidate(2) == 4",  # without the column entry_point
        "def two():\n    assert twice(2) == 4\nif __name__ == '__main__':\n    two()",
        "import math",
        "assert callable(twice)",
        "# basic",
        "",
    ],
)
def test_a_test_that_any_code_would_pass_is_left_out_of_the_share(test):
    half = "```python\ndef twice(x):\n    return 4\n```"
    broken = "```python\ndef twice(\n```"
    example = Example({"tests": [test, *TESTS]})
    share = gw.rewards.unit_tests()
    assert [share(answered(text), example) for text in (RIGHT, half, WRONG, broken, "none")] == [
        1,
        0.5,
        0,
        0,
        0,
    ]
    for text in (RIGHT, WRONG, broken, "none"):
        with pytest.raises(ConfigError, match="no test calls the answer's code"):
            share(answered(text), Example({"tests": [test]}))


def test_code_cannot_have_a_test_left_out():
    optional = (
        "try:\n    found = twice\nexcept NameError:\n    found = None\nif found:\n    assert found(2) == 4"
    )
    raises = "try:\n    twice(None)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"
    example = Example({"tests": [optional, raises]})
    answers = (RIGHT, "```python\nx = 1\n```", "```python\ndef twice(x):\n    return 4\n```")
    assert [gw.rewards.unit_tests()(answered(text), example) for text in answers] == [1.0, 0.0, 0.5]


def test_calls_need_the_name_of_the_function():
    calls = Example({"tests": [{"args": [3], "expected": 6}]})
    with pytest.raises(ConfigError, match="tests with args require the column 'entry_point'"):
        gw.rewards.unit_tests()(answered(RIGHT), calls)


@pytest.mark.parametrize(
    "test",
    ["for got in map(twice, [2, 3]):\n    assert got == 4", "assert all(map(lambda n: twice(n) == 4, [2]))"],
)
def test_code_cannot_end_the_loops_of_a_test(test):
    code = "```python\ndef twice(x):\n    raise StopIteration\n```"
    assert gw.rewards.unit_tests()(answered(code), Example({"tests": [test]})) == 0.0
