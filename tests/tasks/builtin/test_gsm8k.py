"""The word-problem task: four graded rewards, the strict variant, generated problems and data files."""

from __future__ import annotations

import gzip
import json

import pytest

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example
from groupwise.tasks import load_task
from groupwise.tasks.builtin.gsm8k import gsm8k
from groupwise.tasks.self_test import check

WORKING = "<start_working_out>\n48 / 2 = 24, and 48 + 24 = 72.\n<end_working_out>\n\n"


def score(text, *, answer="72", **options):
    """Return the rewards by name and their sum."""
    task = gsm8k(**options)
    example = Example({"question": "How many clips?", "answer": answer})
    scored = check(task, text, example, seconds=5)
    assert scored.error is None
    return scored.parts, scored.reward, scored.correct


def worked(solution):
    return f"{WORKING}<SOLUTION>\n{solution}\n</SOLUTION>"


@pytest.mark.parametrize(
    ("solution", "gold", "answer", "number"),
    [
        ("72", "72", 3.0, 1.5),
        ("79", "72", 1.5, 0.0),  # 9.7 % off
        ("65", "72", 1.5, 0.0),
        ("86", "72", 0.5, 0.0),  # 19.4 % off
        ("100", "72", -0.5, 0.0),
        ("-72", "72", -0.5, 0.0),
        ("many", "72", -0.5, 0.0),
        # Right however it is written.
        ("1080", "1,080", 3.0, 1.5),
        ("1,080", "1080", 3.0, 1.5),
        ("$72", "72", 3.0, 1.5),
        ("72 clips", "72", 3.0, 1.5),
        ("72.0", "72", 3.0, 1.5),
        ("0.0", "0", 3.0, 1.5),
        ("-5", "-5", 3.0, 1.5),
        ("48 + 24 = 72", "72", 3.0, 1.5),
        # Wrong however it is written.
        ("-5", "5", -0.5, 0.0),
        ("5", "-5", -0.5, 0.0),
        ("7.2", "72", -0.5, 0.0),
        ("1", "0", -0.5, 0.0),  # nothing is nearly 0
        ("72 or 73 or 74", "72", -0.5, 0.0),
        ("72 73", "72", -0.5, 0.0),
        ("72 = 48 + 23", "72", -0.5, 0.0),
    ],
)
def test_the_answer_is_graded_by_its_value(solution, gold, answer, number):
    parts, total, right = score(worked(solution), answer=gold)
    assert parts == {
        "format": 3.0, "tags": 2.0, "answer": answer, "number": number, "correct": float(number > 0),
    }  # fmt: skip
    assert total == 5.0 + answer + number
    assert right == (number > 0)


def test_the_best_total_is_nine_and_a_half_and_no_format_is_minus_two():
    assert score(worked("72"))[1] == gsm8k().perfect == 9.5
    assert score("The answer is 72.")[1] == -2.0
    assert score("")[1] == -2.0


@pytest.mark.parametrize(
    ("text", "exact", "tags", "answer", "number"),
    [
        (f"Sure! {worked('72')}", 0.0, 2.0, 0.0, 1.5),  # text before
        (f"{worked('72')} Done.", 0.0, 2.0, 0.0, 1.5),  # text after
        (f"{WORKING}so <SOLUTION>72</SOLUTION>", 0.0, 2.0, 0.0, 1.5),  # text between
        (f"{WORKING}<SOLUTION>71</SOLUTION><SOLUTION>72</SOLUTION>", 0.0, 0.0, 0.0, 0.0),
        (f"{WORKING}<SOLUTION>I do not know</SOLUTION> 72", 0.0, 2.0, 0.0, 0.0),
        (f"{WORKING}<SOLUTION>72", 0.0, 1.0, 0.0, 0.0),  # never closed
        ("<start_working_out>.<end_working_out><SOLUTION>72</SOLUTION>", 0.0, 2.0, 0.0, 1.5),
        ("<SOLUTION>72</SOLUTION>", 0.0, 0.0, 0.0, 1.5),
        ("</SOLUTION>72<SOLUTION>", 0.0, 0.0, 0.0, 0.0),
        (f"{WORKING}<SOLUTION></SOLUTION>", 0.0, 2.0, 0.0, 0.0),
        (f"{WORKING}<SOLUTION> \n</SOLUTION>", 0.0, 2.0, 0.0, 0.0),
        ("<start_working_out>1 2 3 4 5 6 7 8<end_working_out><SOLUTION>72</SOLUTION>", 3.0, 2.0, 3.0, 1.5),
        ("<start_working_out>1 2 3 4 5 6 7<end_working_out><SOLUTION>72</SOLUTION>", 0.0, 2.0, 0.0, 1.5),
        (f"{WORKING}<end_working_out><SOLUTION>72</SOLUTION>", 0.0, 1.0, 0.0, 0.0),  # ended twice
        # A tag that is only talked about while working out hides no solution.
        (
            "<start_working_out>I will use <SOLUTION> tags.<end_working_out><SOLUTION>72</SOLUTION>",
            0.0, 1.0, 0.0, 1.5,
        ),
    ],
)  # fmt: skip
def test_the_exact_format_is_exact_and_only_the_solution_block_counts(text, exact, tags, answer, number):
    parts = score(text)[0]
    assert [parts[name] for name in ("format", "tags", "answer", "number")] == [exact, tags, answer, number]


def test_strict_scoring_is_one_setting_away():
    def strict(text):
        return score(text, scoring="strict")[1:]

    assert strict(worked("72")) == (1.0, True)
    assert strict(worked("71")) == (0.0, False)
    assert strict("<SOLUTION>72</SOLUTION>") == (0.0, False)
    assert gsm8k(scoring="strict").perfect == 1.0
    with pytest.raises(ConfigError, match="scoring must be one of graded, strict; got 'binary'"):
        gsm8k(scoring="binary")


def test_every_score_can_be_set():
    near = score(worked("79"), within_10=0.0, wrong=-1.0, right=10.0)
    assert near[0]["answer"] == 0.0
    assert score(worked("72"), right=10.0, format=1.0, tag=0.25, number=0.0)[1] == 12.0
    with pytest.raises(ConfigError, match="gsm8k: right must be a number; got 'three'"):
        gsm8k(right="three")


def test_the_prompt_is_the_system_prompt_and_the_question():
    system, user = gsm8k().ask(Example({"question": "How many?", "answer": "1"}))
    assert system["content"].startswith("You are a mathematical reasoning assistant.\nWhen given")
    assert "between <SOLUTION> and </SOLUTION>\n3. Be precise" in system["content"]
    assert user == {"role": "user", "content": "How many?"}


def test_generated_problems_are_right_repeatable_and_never_on_both_sides():
    task = gsm8k()
    split = task.split(TaskConfig(held_out=50), seed=1)
    train, _ = split.take(0, 300)
    assert train == task.split(TaskConfig(held_out=50), seed=1).take(0, 300)[0]
    asked = {example["question"] for example in split.held_out}
    assert len(asked) == 50
    assert not asked & {example["question"] for example in train}
    for example in (*train, *split.held_out):
        left, _, right = example["solution"].splitlines()[-2].partition(" = ")
        assert right == example["answer"]
        assert eval(left) == int(right) > 0
        assert score(task.gold(example), answer=example["answer"])[1] == 9.5


def test_more_held_out_problems_than_there_are_is_one_sentence():
    few = {"steps": 1, "largest": 4}
    assert len(gsm8k(**few).split(TaskConfig(held_out=300), seed=0).held_out) == 300
    with pytest.raises(ConfigError, match=r"about 375 held-out problems, not 3000; lower task.held_out"):
        gsm8k(**few).split(TaskConfig(held_out=3000), seed=0)


def test_the_length_of_generated_problems_is_an_option():
    (example,) = gsm8k(steps=1).split(TaskConfig(held_out=1), seed=0).held_out
    assert len(example["solution"].splitlines()) == 2
    for bad in (0, [3, 2], "2", [1, 2, 3]):
        with pytest.raises(ConfigError, match="gsm8k: steps must be integers from 1 to 12"):
            gsm8k(steps=bad)
    with pytest.raises(ConfigError, match="gsm8k: largest must be an integer"):
        gsm8k(largest="many")


ROWS = [
    {"question": "Natalia …?", "answer": "She sold 24.\n#### 72"},
    {"question": "Weng …?", "answer": "#### 1,080"},
]


def test_gsm8k_files_are_read_with_their_golds(tmp_path):
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    task = load_task(TaskConfig(name="gsm8k", data=str(path)))
    assert [example["answer"] for example in task.examples] == ["72", "1,080"]


def test_columns_are_mapped_by_the_configuration(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"frage": "Wie viele?", "zahl": 5, "answer": "not this"}]))
    config = TaskConfig(name="gsm8k", data=str(path), columns={"question": "frage", "answer": "zahl"})
    (example,) = load_task(config).examples
    assert (example["question"], example["answer"]) == ("Wie viele?", "5")


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (
            {"question": "q"},
            {},
            "line 2: no column 'answer' or 'ground_truth' or 'solution'; it has question",
        ),
        ({"question": "q", "answer": "many"}, {}, "line 2, column 'answer': expected one number"),
        ({"question": "", "answer": "1"}, {}, "line 2, column 'question': expected non-empty text"),
        ({"question": None, "answer": "1"}, {}, "line 2, column 'question': expected text, got NoneType"),
        ({"question": "q", "answer": "1"}, {"answer": "gold"}, "line 1: no column 'gold'"),
        ({"question": "q", "answer": "1"}, {"anser": "gold"}, "gsm8k has no column 'anser'; it has question"),
        ({"question": "q", "answer": "1"}, {"answer": 3}, "task.columns.answer must be the name of a column"),
    ],
)
def test_a_bad_row_names_its_file_line_and_column(tmp_path, row, columns, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n{json.dumps(row)}\n")
    with pytest.raises(ConfigError) as error:
        load_task(TaskConfig(name="gsm8k", data=str(path), columns=columns))
    assert message in str(error.value)


def test_columns_without_data_and_test_data_beside_data(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.columns requires task\.data"):
        load_task(TaskConfig(name="gsm8k", columns={"answer": "gold"}))
    for name, rows in (("train", ROWS), ("test", ROWS[:1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    config = TaskConfig(
        name="gsm8k", data=str(tmp_path / "train.json"), test_data=str(tmp_path / "test.json")
    )
    split = load_task(config).split(config, seed=0)
    assert [example["answer"] for example in split.held_out] == ["72"]
    assert [example["answer"] for example in split.train] == ["1,080"]  # a test row is never trained on
