"""The built-in task `code`: generated problems, rows of MBPP and HumanEval, and runs with them."""

from __future__ import annotations

import json

import pytest

from groupwise.commands.eval import evaluate_command
from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.tasks import load_task
from groupwise.tasks.builtin.code_problems import HIDDEN, SHOWN, TEMPLATES, code, code_prompt, gold_completion
from groupwise.tasks.self_test import check, check_golds
from tests.support.small_runs import SMALL, deterministic_metrics, run_command

MBPP = {
    "task_id": 2,
    "text": "Write a function to find the shared elements from the given two lists.",
    "code": "def similar_elements(a, b):\n    return tuple(set(a) & set(b))",
    "test_list": [
        "assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
        "assert set(similar_elements((1, 2, 3, 4),(5, 4, 3, 7))) == set((3, 4))",
    ],
    "test_setup_code": "",
    "challenge_test_list": [],
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": (
        "from typing import List\n\n\n"
        "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
        '    """Whether two numbers are closer than the threshold."""\n'
    ),
    "entry_point": "has_close_elements",
    "canonical_solution": (
        "    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])\n"
    ),
    "test": (
        "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
        "    assert candidate([1.0, 2.0, 3.9], 0.3) == False\n"
        "    assert candidate([1.0, 2.0, 2.2], 0.3) == True\n"
    ),
}


def test_problems_are_varied_and_the_sides_are_disjoint():
    stream = code().examples
    held_out = stream.held_out(100)
    training = [stream.train(index, seed=0) for index in range(600)]
    assert len(TEMPLATES) >= 15
    assert {example["template"] for example in training} == set(TEMPLATES)
    assert {example["template"] for example in held_out} == set(TEMPLATES)
    asked = {example["text"] for example in held_out}
    assert len(asked) == len(held_out) >= 90
    assert not asked & {example["text"] for example in training}
    assert len({example["text"] for example in training}) > 400
    assert stream.train(5, seed=0) == training[5]
    assert stream.held_out(100) == held_out
    for example in training:
        assert (len(example["shown"]), len(example["tests"])) == (SHOWN, HIDDEN)
        assert not set(example["shown"]) & set(example["tests"])


def test_every_template_accepts_its_solution_and_no_constant():
    task = code()
    for example in task.examples.held_out(2 * len(TEMPLATES)):
        assert check(task, gold_completion(example), example, seconds=20).reward == pytest.approx(2.2)
        constant = example["shown"][0].rpartition(" == ")[2]
        answer = f"```python\ndef {example['entry_point']}(*given):\n    return {constant}\n```"
        assert check(task, answer, example, seconds=20).parts["all_passed"] == 0


def test_the_prompt_shows_some_tests_and_keeps_the_others(tmp_path):
    (example,) = code(templates=["digit_sum"]).examples.held_out(1)
    system, user = code_prompt(example)
    assert "```python" in system["content"]
    assert user["content"].startswith("Write a function ")
    assert example["shown"][0] in user["content"]
    assert not any(test in user["content"] for test in example["tests"])
    with pytest.raises(ConfigError, match=r"task\.options\.templates must be a list of sum_multiples"):
        code(templates=["sums"])


def test_rows_of_mbpp_and_of_human_eval(tmp_path):
    for row, shows in ((MBPP, MBPP["test_list"][0]), (HUMAN_EVAL, "Complete this function:")):
        path = tmp_path / "data.jsonl"
        other = (
            {**row, "text": "Another one."} if "text" in row else {**row, "prompt": f"# v2\n{row['prompt']}"}
        )
        path.write_text("\n".join(map(json.dumps, [row, other])))
        config = TaskConfig(name="code", data=str(path))
        task = load_task(config)
        example = task.examples[0]
        assert shows in task.ask(example)[1]["content"]
        assert [one.passed for one in check_golds(task, count=2, config=config)] == [True, True]
        wrong = "```python\ndef similar_elements(*a): return ()\ndef has_close_elements(*a): return True\n```"
        assert check(task, wrong, example, seconds=20).parts["all_passed"] == 0


@pytest.mark.parametrize(
    ("tests", "problem"),
    [([], "a list of tests"), (["assert ("], "not valid Python"), ([{"args": [1]}], "args and expected")],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path, tests, problem):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({**MBPP, "test_list": tests}))
    with pytest.raises(ConfigError, match=rf"line 1, column 'test_list': .*{problem}"):
        load_task(TaskConfig(name="code", data=str(path)))


def test_a_run_a_warm_start_and_an_evaluation(tmp_path):
    place = (f"run.output_dir={tmp_path}", "task.held_out=2", "run.max_steps=1")
    warm = run_command("sft", "--task", "code", *SMALL, *place, "run.name=warm")
    assert warm.code == 0, warm.err
    ended = run_command("train", "code", *SMALL, *place, "run.name=run")
    assert ended.code == 0, ended.err
    assert "reward/all_passed/mean" in deterministic_metrics(tmp_path / "run")[0]
    report = evaluate_command(str(tmp_path / "run"))[0]
    assert (report["prompts"], report["failed"]) == (2, 0)
