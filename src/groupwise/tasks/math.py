r"""MATH: problems whose answer stands in `\boxed{…}` and is compared by its meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from groupwise.config.checks import one_of
from groupwise.errors import RolloutError
from groupwise.records import Example, Message, Rollout
from groupwise.rewards import symbolic
from groupwise.rewards.boxed import last_box
from groupwise.rewards.latex.equal import same_answer
from groupwise.rewards.latex.tokens import Unfamiliar
from groupwise.rewards.math_answer import LENIENT, Scores, Verdict, reward_of, truth_of, verify_boxed
from groupwise.rewards.restated import is_restated
from groupwise.rewards.simplest import is_simplest
from groupwise.tasks.columns import Column, text
from groupwise.tasks.latex_problems import LatexProblems, is_generated
from groupwise.tasks.task import Task, same_question

SYSTEM = (
    "You are a mathematical reasoning assistant. Solve problems using step-by-step reasoning with clear "
    r"explanations. Always provide your final answer in \boxed{} format."
)
REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 500
"""Characters beyond which a gold answer is a solution that forgot its box."""
SCORINGS = {"strict": Scores(), "lenient": LENIENT}


def math(
    *,
    scoring: str = "strict",
    right: float | None = None,
    wrong: float | None = None,
    no_answer: float | None = None,
) -> Task:
    r"""Problems answered in `\boxed{}`: `--data FILE` or a dataset with MATH's columns, or generated ones.

    `scoring`: `strict` pays +1 for right, -1 for wrong and -1 for no answer; `lenient` only -0.5 for no
    answer. `right`, `wrong` and `no_answer` set each one.
    """
    one_of("task.options.scoring", scoring, tuple(SCORINGS))
    symbolic.require()
    preset = SCORINGS[scoring]
    scores = Scores(
        right=preset.right if right is None else right,
        wrong=preset.wrong if wrong is None else wrong,
        no_answer=preset.no_answer if no_answer is None else no_answer,
    )

    def answer(rollout: Rollout, example: Example) -> float:
        return reward_of(judge(rollout, example), scores)

    return Task(
        name="math",
        examples=LatexProblems(),
        prompt=math_prompt,
        rewards={"answer": answer, "correct": correct, "boxed": boxed},
        weights={"correct": 0.0, "boxed": 0.0},
        key=same_question,
        accuracy="correct",
        format="boxed",
        columns={
            "question": Column(read=text, names=("question", "problem"), judges=False),
            "answer": Column(read=gold_answer, names=("answer", "ground_truth", "solution")),
        },
        predicted=last_box,
        alike=alike,
        difficulty=difficulty,
        gold=lambda example: rf"\boxed{{{example['answer']}}}",
        perfect=scores.right,
    )


def gold_answer(value: Any) -> str:
    """Read the true answer: alone, in a box or at the end of a solution, or after GSM8K's `####`."""
    whole = text(value)
    answer = truth_of(whole)
    if answer == whole:  # no box
        answer = whole.rpartition("####")[2].strip() or whole
    if len(answer) > LONGEST_ANSWER:
        raise ValueError(r"expected an answer, or a solution that ends in \boxed{answer}")
    return answer


def difficulty(example: Example) -> str | None:
    """The level and the subject, as far as the row has them."""
    named = [str(example[column]) for column in ("level", "subject") if example.get(column) is not None]
    return " ".join(named) or None


def math_prompt(example: Example) -> list[Message]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{example['question']}{REQUEST}"},
    ]


def judge(rollout: Rollout, example: Example) -> Verdict:
    """Judge the answer; one that only repeats the question's expression is wrong.

    Generated problems ask for a worked-out value: there, the right value in another form is wrong too.
    """
    verdict = verify_boxed(rollout.text, str(example["answer"]))
    if verdict.error is not None:
        raise RolloutError(verdict.error)
    question = str(example.get("question", ""))
    predicted, truth = verdict.predicted, verdict.ground_truth
    if not verdict.correct or not predicted:
        return verdict
    unfinished = is_restated(predicted, question=question, truth=truth)
    if unfinished or (is_generated(example) and not is_simplest(predicted)):
        return replace(verdict, correct=False)
    return verdict


def correct(rollout: Rollout, example: Example) -> float:
    return float(judge(rollout, example).correct)


def alike(one: str, other: str) -> bool:
    """Tell whether two answers are the same, as far as our own parser reads them."""
    try:
        return same_answer(one, other)
    except Unfamiliar:
        return one == other


def boxed(rollout: Rollout, example: Example) -> float:
    """1 for any answer in a box."""
    return float(verify_boxed(rollout.text, str(example["answer"])).has_answer)
