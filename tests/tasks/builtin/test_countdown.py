from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example
from groupwise.rewards import evaluate_expression
from groupwise.tasks import load_task
from groupwise.tasks.builtin.countdown import (
    Puzzle,
    PuzzleStream,
    SolutionStep,
    countdown,
    draw_puzzle,
    is_held_out,
    render,
    solutions,
    solves,
)
from groupwise.tasks.self_test import check

GIVEN = {"numbers": [1, 2, 8], "target": 24}


def reward(text, **columns):
    scored = check(countdown(), text, Example(columns or GIVEN), seconds=5)
    assert scored.error is None
    assert scored.reward == sum(scored.parts.values())
    return int(scored.parts["format"]), int(scored.parts["equation"])


@pytest.mark.parametrize(
    ("answer", "equation"),
    [
        ("(1 + 2) * 8", 1),
        ("8 * (2 + 1)", 1),
        ("(1+2)*8", 1),
        ("\n (1 + 2) * 8 \n", 1),
        ("(1 + 2) × 8", 1),
        ("(1 + 2) · 8", 1),
        ("(1 + 2) * 8 = 24", 1),
        ("(1 + 2) * 8 =24\n", 1),
        ("(1 + 2) * 8 = 25", 0),
        ("(1 + 2) * 8 = 24 = 24", 0),
        ("(1 + 2) * 8 = 3 * 8", 0),
        ("24 = (1 + 2) * 8", 0),
        ("= 24", 0),
        ("24", 0),  # not the numbers
        ("3 * 8", 0),
        ("(1 + 2) * 8 * 1", 0),  # one of them twice
        ("8 * 2 + 8", 0),
        ("1 + 2 + 8", 0),  # not the target
        ("1 * 2 ** 8", 0),
        ("(1 + 2) * 8 # yes", 0),
        ("the answer is (1 + 2) * 8", 0),
        ("12 * 8 / 4", 0),
        ("", 0),
    ],
)
def test_the_equation_reward_row_by_row(answer, equation):
    assert reward(f"1 + 2 is 3.</think>\n<answer>{answer}</answer>") == (int(bool(answer.strip())), equation)


@pytest.mark.parametrize(
    ("numbers", "target", "answer", "right"),
    [
        ([2, 3], 8, "2**3", False),
        ([7, 2], 3, "7//2", False),
        ([1, 5, 2], 3, "1.5*2", False),
        ([1, 5], 15, "15", False),
        ([9, 9, 9], 1, "9**9**9", False),
        ([3, 3, 8, 8], 24, "8 / (3 - 8 / 3)", True),
        ([50, 2], 25, "50 ÷ 2", True),
        ([50, 2], 48, "50 − 2", True),
        ([7, 7, 3], 17, "7 + 7 + 3", True),  # repeated numbers count as often as given
        ([7, 7, 3], 10, "7 + 3", False),
        ([1, 3], 0, "1 / 3", False),  # no rounding
        ([3, 27], 24, "-3 + 27", True),
    ],
)
def test_answers_that_eval_judges_wrongly(numbers, target, answer, right):
    assert solves(answer, numbers=numbers, target=target) is right
    assert reward(f"so</think>\n<answer>{answer}</answer>", nums=numbers, target=target) == (1, int(right))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so</think> <answer>(1 + 2) * 8</answer>", (1, 1)),
        ("so</think>\n\n<answer>(1 + 2) * 8</answer>", (1, 1)),
        ("so</think><answer>(1 + 2) * 8</answer>\n", (1, 1)),
        ("I must write <answer>.</think>\n<answer>(1 + 2) * 8</answer>", (1, 1)),
        ("<answer>8 + 2</answer>? No.</think>\n<answer>(1 + 2) * 8</answer>", (1, 1)),
        ("</think>\n<answer>(1 + 2) * 8</answer>", (0, 1)),  # empty thinking
        ("so</think>\n<answer>(1 + 2) * 8</answer><answer>8</answer>", (0, 0)),
        ("so</think>\n<answer>8</answer></think>\n<answer>(1 + 2) * 8</answer>", (0, 0)),
        ("so <think>deeper</think>\n<answer>(1 + 2) * 8</answer>", (0, 1)),
        ("so</think>\n<answer><answer>(1 + 2) * 8</answer></answer>", (0, 0)),
        ("<answer>(1 + 2) * 8</answer> found</think>", (0, 0)),
        ("so</think>\n(1 + 2) * 8", (0, 0)),
        ("so</think>\n<answer>" + "9**" * 400_000 + "9</answer>", (1, 0)),
        ("so</think>\n<answer>" + "(" * 10_000 + ")" * 10_000 + "</answer>", (1, 0)),
    ],
)
def test_the_two_rewards_of_a_whole_completion(text, expected):
    assert reward(text) == expected


def test_the_prompt_asks_in_three_messages_and_ends_inside_the_thinking():
    system, user, assistant = countdown().ask(Example({"nums": [44, 19, 35], "target": 98}))
    assert [m["role"] for m in (system, user, assistant)] == ["system", "user", "assistant"]
    start = (
        "Using each number in this list only once (44, 19, 35), create an equation that equals 98. You can"
    )
    assert user["content"].startswith(start)
    assert user["content"].endswith("tags, for example <answer>(1 + 2) / 3</answer>.")
    assert assistant["content"] == "Let me solve this step by step.\n<think>"


@pytest.mark.parametrize(
    "columns", [{"target": 3}, {"nums": [1]}, {"nums": 5, "target": 3}, {"nums": ["x"], "target": 3}]
)
def test_a_row_that_is_no_puzzle_is_refused(columns):
    with pytest.raises(ConfigError, match="a countdown example requires integers"):
        countdown().ask(Example(columns))


@pytest.mark.parametrize(
    "options", [{}, {"numbers": 3, "largest": 20}, {"numbers": [2, 5], "targets": [1, 30]}]
)
def test_every_puzzle_keeps_to_the_settings_and_its_solution_is_right(options):
    numbers, largest = options.get("numbers", (3, 4)), options.get("largest", 99)
    counts = range(numbers, numbers + 1) if isinstance(numbers, int) else range(numbers[0], numbers[1] + 1)
    low, high = options.get("targets", (10, 100))
    split = countdown(**options).split(TaskConfig(held_out=100), seed=0)
    examples = [*split.take(0, 200)[0], *split.held_out]
    assert {len(example["numbers"]) for example in examples} == set(counts)
    for example in examples:
        assert all(1 <= number <= largest for number in example["numbers"])
        assert low <= example["target"] <= high
        assert solves(example["solution"], numbers=example["numbers"], target=example["target"])


def test_the_solver_finds_a_whole_solution_of_every_generated_puzzle():
    for example in countdown().split(TaskConfig(held_out=0), seed=1).take(0, 20)[0]:
        assert any(solution.whole for solution in solutions(example["numbers"], example["target"]))


def test_no_training_puzzle_is_a_held_out_one_in_any_order_of_its_numbers():
    split = countdown(numbers=3, largest=9).split(TaskConfig(held_out=100), seed=0)

    def keys(examples):
        return {(*sorted(example["numbers"]), example["target"]) for example in examples}

    training = keys(split.take(0, 1000)[0])
    assert len(keys(split.held_out)) == len(split.held_out) == 100
    assert len(training) > 300
    assert not training & keys(split.held_out)
    for order in itertools.permutations((3, 7, 9)):
        assert is_held_out(Puzzle(order, 30, "")) == is_held_out(Puzzle((3, 7, 9), 30, ""))


def test_the_stream_is_the_same_for_a_seed_and_its_held_out_part_for_all():
    split = countdown().split(TaskConfig(held_out=20), seed=4)
    again = countdown().split(TaskConfig(held_out=20), seed=4)
    other = countdown().split(TaskConfig(held_out=10), seed=5)
    assert split.take(7, 30) == again.take(7, 30)
    assert split.take(7, 30)[0][3] == again.take(10, 1)[0][0]
    assert split.take(0, 30)[0] != other.take(0, 30)[0]
    assert split.held_out[:10] == other.held_out


def test_settings_that_allow_few_puzzles_hold_out_all_there_are():
    possible = {
        (pair, target)
        for pair in itertools.combinations_with_replacement(range(1, 6), 2)
        for target in range(1, 26)
        if any(solution.whole for solution in solutions(pair, target))
        and is_held_out(Puzzle(pair, target, ""))
    }
    held_out = PuzzleStream(counts=(2, 2), largest=5, targets=(1, 25)).held_out(50)
    assert len(held_out) == len(possible) > 0
    assert {(tuple(sorted(e["numbers"])), e["target"]) for e in held_out} == possible


@pytest.mark.parametrize(
    "options",
    [
        {"numbers": 1},
        {"numbers": [4, 3]},
        {"numbers": "34"},
        {"numbers": [3, 4, 5]},
        {"largest": 0},
        {"largest": 9.5},
        {"targets": [0, 10]},
        {"targets": 24},
    ],
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError, match=f"countdown: {next(iter(options))} must be integers from"):
        countdown(**options)


def test_settings_that_allow_no_puzzle_are_refused():
    with pytest.raises(ConfigError, match="no puzzle found with"):
        countdown(numbers=2, largest=3, targets=(50, 60))


def test_the_solver_gives_the_hand_worked_solution_with_its_steps():
    (only,) = solutions([2, 3, 4], 20)
    assert only.expression == "4 * (2 + 3)"
    assert only.steps == (SolutionStep(2, "+", 3, 5), SolutionStep(4, "*", 5, 20))
    assert only.whole


def test_the_solver_finds_the_solution_that_needs_fractions():
    found = list(solutions([3, 3, 8, 8], 24))
    assert found
    assert {solution.expression for solution in found} == {"8 / (3 - 8 / 3)"}
    assert SolutionStep(8, "/", 3, Fraction(8, 3)) in found[0].steps
    assert not found[0].whole


def naive_values(numbers):
    """Every value of three numbers: both shapes of tree, all orders and operators."""

    def apply(a, operator, b):
        if operator == "/":
            return None if not b else a / b
        return {"+": a + b, "-": a - b, "*": a * b}[operator]

    values = set()
    for a, b, c in itertools.permutations(map(Fraction, numbers)):
        for first, second in itertools.product("+-*/", repeat=2):
            left = apply(a, first, b)
            if left is not None:
                values.add(apply(left, second, c))
            right = apply(b, second, c)
            if right is not None:
                values.add(apply(a, first, right))
    return values - {None}


def test_the_solver_agrees_with_a_naive_search():
    rng = random.Random(0)
    for _ in range(10):
        numbers = [rng.randint(1, 12) for _ in range(3)]
        reachable = naive_values(numbers)
        for target in range(-5, 40):
            found = list(solutions(numbers, target))
            assert bool(found) == (target in reachable), (numbers, target)
            assert all(solves(s.expression, numbers=numbers, target=target) for s in found)


def test_the_steps_of_a_solution_are_true_and_end_in_the_target():
    found = list(solutions([5, 6, 7, 8], 24))
    assert {solution.whole for solution in found} == {True, False}
    for solution in found:
        for left, operator, right, result in solution.steps:
            checked = evaluate_expression(f"({left}) {operator} ({right})")
            assert checked is not None
            assert checked.value == result
        assert len(solution.steps) == 3
        assert solution.steps[-1].result == 24


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (("+", 1, ("+", 2, 3)), "1 + 2 + 3"),
        (("-", 1, ("+", 2, 3)), "1 - (2 + 3)"),
        (("-", ("-", 1, 2), 3), "1 - 2 - 3"),
        (("*", ("+", 1, 2), 3), "(1 + 2) * 3"),
        (("/", 8, ("*", 2, 4)), "8 / (2 * 4)"),
        (("*", 8, ("/", 4, 2)), "8 * 4 / 2"),
        (("+", ("*", 2, 3), 4), "2 * 3 + 4"),
    ],
)
def test_an_expression_has_the_parentheses_it_needs_and_no_others(tree, text):
    assert render(tree) == text


def test_drawing_gives_none_rather_than_a_target_out_of_range():
    rng = random.Random(0)
    drawn = [draw_puzzle(rng, count=3, largest=99, targets=(50, 51)) for _ in range(300)]
    assert None in drawn
    assert {puzzle.target for puzzle in drawn if puzzle} == {50, 51}


@pytest.mark.parametrize(("level", "count"), [(1, 3), (2, 4), (3, 5), (4, 6)])
def test_a_level_is_a_number_of_numbers_and_every_puzzle_has_a_solution(level, count):
    task = countdown(level=level)
    split = task.split(TaskConfig(held_out=20), seed=0)
    for example in (*split.take(0, 20)[0], *split.held_out):
        assert len(example["numbers"]) == count
        assert solves(example["solution"], numbers=example["numbers"], target=example["target"])
        assert reward(task.gold(example), **example) == (1, 1)


def test_a_level_that_is_none_or_beside_numbers_is_refused():
    for bad in (0, 5, "2"):
        with pytest.raises(ConfigError, match="countdown: level must be integers from 1 to 4"):
            countdown(level=bad)
    with pytest.raises(ConfigError, match="level and numbers exclude each other"):
        countdown(level=1, numbers=3)


def test_rows_of_the_public_data_are_checked(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"nums": [44, 19, 35], "target": 98}\n{"nums": [1, "2"], "target": 3}\n')
    with pytest.raises(ConfigError, match="line 2, column 'nums': expected an integer"):
        load_task(TaskConfig(data=str(path)))
    path.write_text('{"nums": [44, 19, 35], "target": 98}\n')
    task = load_task(TaskConfig(data=str(path)))
    (example,) = task.examples
    assert example["numbers"] == [44, 19, 35]
    assert reward(task.gold(example), **example) == (1, 1)  # solved by search
