"""Search and answer: the generated world, the task, and a whole small run with the built-in model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from groupwise.config import read_config
from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Call, Example, Rollout, Turn
from groupwise.rollout.tool_calls import read_calls
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.tasks import load_task
from groupwise.tasks.builtin.search_qa import QUESTIONS, QuestionStream, make_world, search_qa
from groupwise.tasks.self_test import check
from groupwise.tasks.sft_data import turns_of
from groupwise.tracking.rollout_files import read_rollouts
from groupwise.training.prompt_selection import check_kinds, kind_of
from tests.support.small_runs import run_command


def test_every_answer_follows_from_the_documents_that_the_question_needs():
    world = make_world(0, people=480)
    for example in search_qa().examples.held_out(100):
        *_, last = example["documents"]
        assert example["answer"] in world.documents[last]
        for document, following in zip(example["documents"], example["documents"][1:], strict=False):
            assert following in world.documents[document]


def test_the_held_out_part_shares_no_document_with_the_other():
    stream = search_qa().examples
    trained = {name for i in range(400) for name in stream.train(i, seed=0)["documents"]}
    held_out = {name for example in stream.held_out(200) for name in example["documents"]}
    assert not trained & held_out
    assert stream.train(7, seed=1) == stream.train(7, seed=1) != stream.train(7, seed=2)


def test_worlds_differ_and_a_search_for_a_name_mostly_finds_it():
    one, other = make_world(0, people=100), make_world(1, people=100)
    assert one.facts != other.facts
    found = sum(name in one.search(name, 3) for name in one.facts)
    assert found > 0.8 * len(one.facts)  # the mayor of three towns is hidden behind them


def test_rewards_of_a_conversation_by_hand():
    task = search_qa()
    example = Example({"answer": "flute", "documents": ["Ada Abel", "Tolm"], "question": "?"})
    turns = (
        Turn(text="<think> x</think>", calls=(Call(name="search", found=("Tolm", "Ada Abel")),)),
        Turn(text="<answer> Flute</answer>"),
    )
    rollout = Rollout(
        prompt="?", text=turns[-1].text, tokens=(1, 2), trained=(False, True), logprobs=(0.0, -1.0),
        entropies=(0.0, 0.0), prompt_length=1, finish="end", turns=turns,
    )  # fmt: skip
    values = {name: reward(rollout, example) for name, reward in task.rewards.items()}
    assert values == {"answer": 1.0, "mrr": (0.5 + 1.0) / 2, "format": 0.5}


def test_a_worked_answer_searches_for_every_hop_and_earns_every_reward():
    task = search_qa()
    toolbox = ToolExecutor.of(task.tools, seconds=5.0, characters=4000)
    hops = set()
    for index in range(40):
        example = task.examples.train(index, seed=0)  # type: ignore[union-attr]
        messages = task.worked(example, random.Random(index))  # type: ignore[misc]
        if messages is None:
            continue
        turns = []
        for turn in turns_of(messages):
            calls = toolbox.answer(read_calls(turn.text), allowed=1)
            assert [call.result for call in calls] == [call.result for call in turn.calls]
            turns.append(Turn(text=turn.text, calls=calls))
        hops.add(len(turns) - 1)
        scored = check(task, turns[-1].text, example, seconds=5.0, turns=tuple(turns))
        assert (scored.parts["answer"], scored.parts["format"]) == (1.0, 1.0)
        assert scored.parts["mrr"] >= 1 / 3
    assert hops == {1, 2, 3}


def test_a_warm_start_on_worked_answers_does_not_unlearn_to_search(tmp_path):
    ended = run_command(
        "sft", "--task", "search_qa", "--model", "tiny-search", "--max-steps", "6", "--output-dir",
        str(tmp_path), "--no-trackio", "task.held_out=16", "evaluate.samples=1", "evaluate.every=0",
        "sft.batch=8", "model.device=cpu", "run.name=run",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    results = (tmp_path / "run" / "eval" / f"{when}.json" for when in ("before", "after"))
    before, after = (json.loads(result.read_text())["eval/greedy"] for result in results)
    assert before > 0.3
    assert after > before - 0.2


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("people=3", "task.options.people must be between 40 and 2304; got 3"),
        ("people=many", "task.options.people must be a whole number (int); got 'many'"),
        ("people=50.5", "task.options.people must be a whole number (int); got 50.5"),
        ("world=x", "task.options.world must be a whole number (int); got 'x'"),
        ("hops=4", "search_qa: hops must be one or more of 1, 2 and 3; got 4"),
        ("hops=[1, 4]", "search_qa: hops must be one or more of 1, 2 and 3; got [1, 4]"),
        ("hops=[]", "search_qa: hops must be one or more of 1, 2 and 3; got []"),
        ("hops=a", "search_qa: hops must be one or more of 1, 2 and 3; got 'a'"),
        ("hops=true", "search_qa: hops must be one or more of 1, 2 and 3; got True"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_with_one_sentence(option, sentence):
    config = read_config(overrides=["task.name=search_qa", f"task.options.{option}"])
    with pytest.raises(ConfigError) as caught:
        load_task(config.task)
    assert str(caught.value) == sentence


def test_a_curriculum_tells_questions_apart_by_their_hops():
    task = search_qa()
    split = task.split(TaskConfig(name="search_qa", held_out=4), 0)
    check_kinds(task, split)
    assert {kind_of(task, split.at(n)) for n in range(40)} == {"hops 1", "hops 2", "hops 3"}
    assert task.difficulty(Example({"question": "?"})) is None  # type: ignore[misc]


def test_questions_take_as_many_hops_as_the_options_say():
    assert {len(path) for path in search_qa(hops=[1]).examples.paths} == {1}
    assert {len(path) for path in search_qa(hops=(1, 3)).examples.paths} == {1, 3}
    assert {len(path) for path in search_qa(hops=2).examples.paths} == {2}  # a plain number is one count
    assert isinstance(search_qa().examples, QuestionStream)
    assert len(QUESTIONS) == 6


SMALL = (
    *("task.name=search_qa", "run.max_steps=2", "run.save_every=1", "track.trackers=[]", "model.device=cpu"),
    *("rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=40", "tools.max_tokens=400"),
    *("evaluate.samples=2", "task.held_out=4", "task.options={people: 60}"),
)


def test_the_built_in_model_searches_reads_and_is_trained_on_what_it_wrote(tmp_path: Path):
    from groupwise.training import train

    config = read_config(overrides=[*SMALL, f"run.output_dir={tmp_path}", "run.name=run"]).resolve()
    assert config.model.name == "tiny-search"
    train(config)
    rows = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    assert any(call["found"] for row in rows for turn in row["turns"] for call in turn["calls"])
    for row in rows:
        read = len(row["tokens"]) - row["prompt_length"] - sum(row["trained"])
        assert (read > 0) == (len(row["turns"]) > 1)
        assert row["trained"][-1]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["rollout/calls"] > 0
    assert "eval/reward/mrr" in metrics[-1]
