"""Medical questions over a small index: prompt, tool and rewards."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Call, Example, Rollout, Turn
from groupwise.retrieval.documents import Document, RetrievalQuestion
from groupwise.retrieval.index_storage import Manifest, write_questions
from groupwise.retrieval.search_index import Index
from groupwise.rollout.tool_calls import read_calls
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.tasks import load_task
from groupwise.tasks.builtin.medquad import close_enough
from groupwise.tasks.self_test import check
from groupwise.tasks.sft_data import turns_of

DOCUMENTS = [
    Document("fever", "Fever is a high temperature."),
    Document("cough", "A cough clears the throat."),
]
QUESTIONS = (
    RetrievalQuestion("What is fever?", ("fever",), ("Fever is a high temperature.",)),
    RetrievalQuestion("What is a fever?", ("fever",), ("A high temperature.",)),
    RetrievalQuestion("What is a cough?", ("cough",), ("A cough clears the throat.",), held_out=True),
)


@pytest.fixture
def task(tmp_path: Path):
    Index.build(tmp_path / "index", DOCUMENTS, Manifest(store="files"))
    write_questions(tmp_path / "index" / "questions.jsonl", QUESTIONS)
    return load_task(TaskConfig(name="medquad", options={"index": str(tmp_path / "index"), "results": 1}))


def test_the_prompt_asks_to_think_first_and_held_out_questions_stay_apart(task):
    split = task.split(TaskConfig(), seed=0)
    assert [example["question"] for example in split.held_out] == ["What is a cough?"]
    system, user, prefill = task.ask(split.held_out[0])
    assert "once and only once" in system["content"]
    assert user["content"] == "What is a cough?"
    assert prefill == {"role": "assistant", "content": "<think>\n"}


def test_a_search_and_an_answer_are_rewarded(task):
    toolbox = ToolExecutor.of(task.tools, seconds=5.0, characters=1000)
    text = 'Look it up.</think>\n<tool_call>{"name": "search", "arguments": {"query": "fever"}}</tool_call>'
    (call,) = toolbox.answer(read_calls(text), allowed=1)
    assert call.found == ("fever",)
    assert call.result.startswith("[fever] Fever is")
    turns = (Turn(text=text, calls=(call,)), Turn(text="So.</think>\nFever is a high temperature. [fever]"))
    rollout = Rollout(
        prompt="?", text=turns[-1].text, tokens=(1, 2), trained=(False, True), logprobs=(0.0, -1.0),
        entropies=(0.0, 0.0), prompt_length=1, finish="end", turns=turns,
    )  # fmt: skip
    example = Example({"question": "What is fever?", "documents": ["fever"], "answers": QUESTIONS[0].answers})
    values = {name: reward(rollout, example) for name, reward in task.rewards.items()}
    assert [values[name] for name in ("mrr", "recall", "format", "once", "citation", "close")] == [1.0] * 6
    assert values["f1"] == pytest.approx(10 / 11)
    assert values["similarity"] > 0.5
    empty = Rollout(
        prompt="?", text="?", tokens=(1, 2), trained=(False, True), logprobs=(0.0, -1.0),
        entropies=(0.0, 0.0), prompt_length=1, finish="end",
        turns=(Turn(text=text, calls=(Call(name="x"),)),),
    )  # fmt: skip
    assert task.rewards["f1"](empty, example) == 0.0


@pytest.mark.parametrize("think", [True, False])
def test_a_worked_answer_searches_once_and_answers_from_what_was_found(task, tmp_path, think):
    index = str(tmp_path / "index")
    task = load_task(TaskConfig(name="medquad", options={"index": index, "results": 1, "think": think}))
    fever, short = (Example(row) for row in task.examples)
    messages = task.worked(fever, random.Random(0))
    asks, answers = turns_of(messages)
    assert asks.calls[0].result == "[fever] Fever is a high temperature."
    begun = "" if think else "<think>\n"
    assert answers.text == f"{begun}The documents answer this.\n</think>\nFever is a high temperature."
    toolbox = ToolExecutor.of(task.tools, seconds=5.0, characters=1000)
    made = toolbox.answer(read_calls(asks.text), allowed=1)
    scored = check(task, answers.text, fever, seconds=5.0, turns=(replace(asks, calls=made), answers))
    assert [scored.parts[name] for name in ("mrr", "format", "once", "close")] == [1.0] * 4
    # An answer that stands in nothing that was found is not imitated.
    assert task.worked(Example({**short, "answers": ["Something else."]}), random.Random(0)) is None


def test_without_an_index_there_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="groupwise index build"):
        load_task(TaskConfig(name="medquad", options={"index": str(tmp_path)}))


def test_an_index_without_questions_is_to_be_built_with_some(tmp_path):
    Index.build(tmp_path / "index", DOCUMENTS, Manifest(store="files"))
    with pytest.raises(ConfigError, match=r"built without questions: .* index build --data$"):
        load_task(TaskConfig(name="medquad", options={"index": str(tmp_path / "index")}))


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"index": 5}, "task.options.index must be a string; got 5"),
        ({"results": "many"}, "task.options.results must be a whole number (int); got 'many'"),
        ({"results": 0}, "task.options.results must be at least 1; got 0"),
        ({"shown": -1}, "task.options.shown must be at least 1; got -1"),
        ({"think": "maybe"}, "task.options.think must be true or false; got 'maybe'"),
        ({"judge": 5}, "task.options.judge must be a string or null; got 5"),
        ({"judge_model": 5}, "task.options.judge_model must be a string; got 5"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_before_the_index_is_read(option, sentence):
    with pytest.raises(ConfigError) as caught:
        load_task(TaskConfig(name="medquad", options=option))
    assert str(caught.value) == sentence


def test_common_words_alone_are_close_to_no_answer():
    common = "this is the kind of condition that may be found in people who have it"
    golds = [f"{common}: topic{n} affects organ{n} and is treated with drug{n}" for n in range(300)]
    close = close_enough(golds)

    def judged(answer, gold):
        rollout = Rollout(
            prompt="?", text=answer, tokens=(1, 2), trained=(False, True), logprobs=(0.0, -1.0),
            entropies=(0.0, 0.0), prompt_length=1, finish="end",
        )  # fmt: skip
        return close(rollout, Example({"question": "?", "answers": [gold]}))

    assert sum(judged(common, gold) for gold in golds) == 0
    assert sum(judged(golds[0], gold) for gold in golds[1:]) == 0
    assert all(judged(gold, gold) for gold in golds)
    assert judged("topic7 affects organ7", golds[7]) == 1.0
    assert judged("organ7 is hurt by topic7, a kind of condition in people", golds[7]) == 1.0
