r"""The `math` task: boxes, scores, the worker process, generated problems and data files."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import pytest

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.isolation.time_limit import TimeLimitReached, time_limit
from groupwise.records import Example
from groupwise.rewards.extraction import last_box
from groupwise.rewards.verify import math_verify_process
from groupwise.rewards.verify.math_answer import (
    LENIENT,
    MathScores,
    score_boxed,
    score_boxed_batch,
    verify_boxed,
)
from groupwise.rewards.verify.math_verify_process import SECONDS, MathVerifyPool
from groupwise.tasks import load_task
from groupwise.tasks.builtin.boxed_math import math
from groupwise.tasks.self_test import check


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"The answer is \boxed{42}", "42"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed 42", "42"),
        (r"$\boxed 42.$", "42"),
        (r"\fbox{42}", "42"),
        (r"\boxed {42}", "42"),
        (r"\boxed{42} and then \boxed{4", "42"),  # cut off: the balanced one counts
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{1 \boxed{2}}", r"1 \boxed{2}"),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed{42", None),
        (r"\boxedx{42}", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text, content):
    assert last_box(text) == content


def test_hostile_boxes_are_read_in_one_pass():
    # Quadratic time would run into the time limit of the tests.
    assert last_box(r"\boxed{" * 200_000) is None
    assert last_box(r"\boxed{" * 20_000 + "}" * 20_000) is None
    assert last_box(r"\boxed{{" * 200_000 + "}" * 200_000 + r"\boxed{1}") == "1"


@pytest.mark.parametrize(
    ("text", "truth", "reward", "predicted", "correct"),
    [
        (r"The answer is \boxed{42}", "42", 1.0, "42", True),
        (r"\boxed{3.14}", "3.14", 1.0, "3.14", True),
        (r"\boxed{1/2}", "0.5", 1.0, "1/2", True),
        (r"\boxed{100}", "200", -1.0, "100", False),
        ("I do not know.", "42", -0.5, None, False),
        (r"\boxed{42}", r"\boxed{42}", 1.0, "42", True),  # the truth may be boxed too
        (r"\boxed{\sqrt{9**9**9}}", "3", -1.0, r"\sqrt{9**9**9}", False),
        (r"\boxed{0.0005}", "0", -1.0, "0.0005", False),
    ],
)
def test_a_completion_is_scored_with_what_was_found(text, truth, reward, predicted, correct):
    scored, info = score_boxed(text, truth, LENIENT)
    assert scored == reward
    assert info["predicted"] == predicted
    assert info["correct"] is correct
    assert info["has_answer"] is (predicted is not None)
    assert info["ground_truth"] == truth.removeprefix(r"\boxed{").removesuffix("}")


def test_by_default_silence_never_pays():
    assert MathScores().no_answer <= MathScores().wrong < MathScores().right
    assert score_boxed("no idea", "42")[0] == -1.0


def test_a_batch_needs_as_many_answers():
    assert [reward for reward, _ in score_boxed_batch([r"\boxed{1}", "2"], ["1", "2"])] == [1.0, -1.0]
    with pytest.raises(ConfigError, match="2 completions but 1 answers"):
        score_boxed_batch(["a", "b"], ["1"])


def judged(text, *, question="How many?", answer="2484", **options):
    task = math(**options)
    example = Example({"question": question, "answer": answer})
    return check(task, text, example, seconds=5)


def test_scores_and_presets_are_settings():
    assert judged(r"\boxed{2484}").reward == 1.0
    assert judged("nothing").reward == -1.0
    assert judged("nothing", scoring="lenient").reward == -0.5
    assert judged("nothing", no_answer=-2).reward == -2.0
    assert judged(r"\boxed{1}", wrong=0).reward == 0.0
    scored = judged(r"\boxed{2484}", right=5)
    assert (scored.reward, scored.correct, math(right=5).perfect) == (5.0, True, 5)
    with pytest.raises(ConfigError, match="scoring must be one of strict, lenient"):
        math(scoring="kind")
    with pytest.raises(ConfigError, match="math: wrong must be a number; got 'much'"):
        math(wrong="much")


def test_repeating_the_question_is_no_answer():
    question = r"Compute $54 \cdot 46$, given that $\frac{1}{2} < 1$."
    assert judged(r"\boxed{54\cdot46}", question=question).reward == -1.0
    assert judged(r"\boxed{54 \cdot 46}", question="How many?").reward == 1.0
    assert judged(r"\boxed{1/2}", question="Is it $1/2$?", answer=r"\frac{1}{2}").reward == 1.0
    # The truth may stand in the question.
    assert judged(r"\boxed{x + 1}", question="Which is it, $x+1$ or $x$?", answer="x+1").reward == 1.0


def test_what_cannot_be_compared_in_time_is_a_failure_and_no_reward():
    scored = judged(r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k^2}}", answer="6")
    assert scored.error is not None
    assert "the comparison took more than 0.5 s" in scored.error
    assert (scored.correct, scored.reward) == (False, None)


def test_math_verify_reads_what_we_do_not():
    assert verify_boxed(r"\boxed{\sum_{k=1}^{3} k}", "6").correct
    assert not verify_boxed(r"\boxed{\sum_{k=1}^{4} k}", "6").correct


def test_the_worker_survives_being_killed():
    comparer = MathVerifyPool()
    try:
        assert comparer.equal(r"\lfloor 3.5 \rfloor", "3")
        first = comparer.process.pid
        os.kill(first, signal.SIGKILL)
        comparer.process.wait()
        assert comparer.equal(r"\lfloor 3.5 \rfloor", "3")
        assert comparer.process.pid != first
    finally:
        comparer.stop()


def test_a_comparison_that_hangs_costs_its_time_limit_and_the_next_one_works():
    comparer = MathVerifyPool()
    try:
        assert comparer.equal(r"\lfloor 3.5 \rfloor", "3")
        worker = comparer.process.pid
        for hostile in (r"\lfloor 9^{9^{9}} \rfloor", r"\sum_{k=1}^{10^9} \frac{1}{k^2}"):
            with pytest.raises(Exception, match="took more than"):
                comparer.equal(hostile, "3")
            assert comparer.equal(r"\lfloor 4.5 \rfloor", "4")
        assert comparer.process.pid == worker
        assert SECONDS <= 1.0
    finally:
        comparer.stop()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_time_in_which_others_compute_does_not_count(monkeypatch):
    monkeypatch.setattr(math_verify_process, "compare", lambda *_: True)
    child = math_verify_process.WorkerFork(0.2)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        threading.Timer(0.4, os.kill, (child.pid, signal.SIGCONT)).start()
        assert child.request('{"predicted": "1", "truth": "1"}\n') == '{"equal": true}\n'
    finally:
        child.kill()


def test_an_interrupted_question_does_not_leave_its_reply_to_the_next():
    comparer = MathVerifyPool()
    try:
        assert comparer.equal(r"\lfloor 3.5 \rfloor", "3")
        with pytest.raises(TimeLimitReached), time_limit(0.1):
            comparer.equal(r"\sum_{k=1}^{10^9} \frac{1}{k^2}", "3")
        assert comparer.equal(r"\lfloor 4.5 \rfloor", "4")
        assert not comparer.equal(r"\lfloor 4.5 \rfloor", "5")
    finally:
        comparer.stop()


def test_math_verify_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr("groupwise.rewards.verify.math_verify_process.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'groupwise\[math\]'"):
        math()


def test_sympy_is_not_imported_here():
    verify_boxed(r"\boxed{\frac{1}{2}}", "0.5")
    assert "math_verify" not in sys.modules


def test_generated_problems_accept_their_golds_and_are_never_on_both_sides():
    task = math()
    split = task.split(TaskConfig(held_out=60), seed=0)
    train, _ = split.take(0, 300)
    asked = {example["question"] for example in split.held_out}
    assert len(asked) == 60
    assert not asked & {example["question"] for example in train}
    for example in (*train, *split.held_out):
        scored = judged(task.gold(example), question=example["question"], answer=example["answer"])
        assert scored.reward == 1.0, example


def test_the_prompt_asks_for_a_box():
    system, user = math().ask(Example({"question": "What is $1+1$?", "answer": "2"}))
    assert system["content"].endswith(r"Always provide your final answer in \boxed{} format.")
    assert user["content"] == (
        "What is $1+1$?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_the_columns_of_math_and_of_graded_rows_are_read(tmp_path):
    rows = [
        {"problem": "What?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 1"},
        {"question": "What?", "ground_truth": "7", "predicted_answer": "8", "correct": False},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    task = load_task(TaskConfig(name="math", data=str(path)))
    assert [example["answer"] for example in task.examples] == [r"\frac{1}{2}", "7"]
    assert [example["question"] for example in task.examples] == ["What?", "What?"]


def test_a_solution_without_a_box_is_no_gold(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "What?", "solution": "It follows. " * 60}))
    with pytest.raises(ConfigError, match=r"line 1, column 'solution': expected an answer, or a solution"):
        load_task(TaskConfig(name="math", data=str(path)))
