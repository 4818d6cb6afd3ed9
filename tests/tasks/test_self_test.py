"""`groupwise verify`: the self-test of rewards."""

from __future__ import annotations

import json

import pytest

from groupwise import cli
from groupwise.config.schema import TaskConfig
from groupwise.tasks import TASKS, load_task
from groupwise.tasks.registry import NEEDS_FIRST
from groupwise.tasks.self_test import CASES, Case, check_cases, shorten


def test_every_built_in_task_passes_its_cases_and_accepts_its_golds(capsys):
    tested = [name for name in TASKS if name not in NEEDS_FIRST]
    assert list(CASES) == tested
    assert cli.main(["verify", "--examples", "20"]) == 0
    shown = capsys.readouterr().out
    for name in tested:
        assert f"{name}: {len(CASES[name])} of {len(CASES[name])} as expected" in shown
        assert f"{name}: 20 of 20 gold answers accepted" in shown
    assert "✗" not in shown
    row = next(line for line in shown.splitlines() if r"\boxed{1/2}" in line)
    assert row.split() == ["✓", "The", "answer", "is", r"\boxed{1/2}", "0.5", "1/2", "1", "1"]


def test_a_task_is_named_as_it_is_to_train(capsys):
    assert cli.main(["verify", "countdown", "--examples", "2"]) == 0
    shown = capsys.readouterr().out
    assert "countdown: 2 of 2 gold answers accepted" in shown
    assert "gsm8k" not in shown


def test_a_case_that_fails_is_seen():
    wrong = Case(r"\boxed{41}", {"answer": "42"}, 1.0)
    (check,) = check_cases(load_task(TaskConfig(name="math")), seconds=5, cases=[wrong])
    assert (check.passed, check.reward, check.predicted, check.truth) == (False, -1.0, "41", "42")


TASK_FILE = """
import groupwise as gw

def correct(rollout, example):
    return float(rollout.text.endswith(example["answer"]) and example["country"] != {bad!r})

task = gw.Task(
    name="capitals",
    examples=[{{"country": "Peru", "answer": "Lima"}}, {{"country": "Mali", "answer": "Bamako"}}],
    prompt=lambda example: example["country"],
    rewards={{"correct": correct}},
)
"""


def test_a_task_file_is_tested_against_its_own_golds(tmp_path, capsys):
    path = tmp_path / "capitals.py"
    path.write_text(TASK_FILE.format(bad="nowhere"))
    assert cli.main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.strip() == "capitals: 2 of 2 gold answers accepted"
    path.write_text(TASK_FILE.format(bad="Mali"))
    assert cli.main(["verify", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "capitals: 1 of 2 gold answers accepted" in shown
    assert "✗ Bamako" in shown


def test_a_task_without_golds_says_how_to_give_them(tmp_path, capsys):
    path = tmp_path / "capitals.py"
    path.write_text(TASK_FILE.format(bad="").replace('"answer"', '"capital"'))
    assert cli.main(["verify", str(path)]) == 2
    assert "task capitals has no gold answers: set gold=…" in capsys.readouterr().err


def test_pairs_are_scored_one_json_line_each(tmp_path, capsys):
    rows = [
        {"completion": r"so \boxed{\frac{1}{2}}", "answer": "0.5"},
        {"completion": r"so \boxed{3}", "answer": "0.5"},
        {"completion": "", "answer": 7},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert cli.main(["verify", "--task", "math", "--pairs", str(path), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["reward"] for record in records] == [1.0, -1.0, -1.0]
    assert [record["correct"] for record in records] == [True, False, False]
    assert [record["predicted"] for record in records] == [r"\frac{1}{2}", "3", None]
    assert records[0]["parts"] == {"answer": 1.0, "correct": 1.0, "boxed": 1.0}
    assert all(record.keys() == {"reward", "parts", "predicted", "correct", "seconds"} for record in records)
    assert all(record["seconds"] >= 0 for record in records)
    assert cli.main(["verify", "--task", "math", "--pairs", str(path)]) == 0
    assert r"✓ so \boxed{3}" in capsys.readouterr().out


def test_pairs_that_cannot_be_scored_say_so(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    hostile = {"completion": r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k^3}}", "answer": "1"}
    path.write_text(json.dumps(hostile))
    assert cli.main(["verify", "--task", "math", "--pairs", str(path), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["reward"], record["correct"]) == (None, False)
    assert "took more than" in record["error"]


@pytest.mark.parametrize(
    ("words", "content", "sentence"),
    [
        (["--pairs", "p.jsonl"], "", "name a built-in task or a Python file"),
        (["--data", "p.jsonl"], "", "name a built-in task or a Python file"),
        (["task.options.scoring=lenient"], "", "name a built-in task or a Python file"),
        (["mth"], "", "unknown task 'mth'; did you mean 'math'?"),
        (
            ["--task", "math", "--pairs", "p.jsonl"],
            '{"answer": "1"}',
            "p.jsonl, line 1: no column 'completion'",
        ),
        (["--task", "math", "--pairs", "p.jsonl"], '{"completion": "1"}', "line 1: no column 'answer'"),
        (
            ["--task", "math", "--pairs", "p.jsonl"],
            '{"completion": 1, "answer": "1"}',
            "p.jsonl, line 1, column 'completion': expected text, got int",
        ),
        (["--task", "mth"], "", "unknown task 'mth'; did you mean 'math'?"),
        (["--examples", "0"], "", "--examples must be at least 1"),
    ],
)
def test_a_mistake_is_named(tmp_path, monkeypatch, capsys, words, content, sentence):
    (tmp_path / "p.jsonl").write_text(content)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_long_texts_keep_their_end():
    assert shorten("a\n b", 10) == "a b"
    assert shorten("x" * 50 + "the end", 10) == "xxx…he end"
