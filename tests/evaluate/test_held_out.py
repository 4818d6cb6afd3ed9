"""Held-out accuracy: hand-worked numbers, pairing, and what `groupwise eval` measures and saves."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise import cli
from groupwise.commands.eval import evaluate_command as evaluate_reports
from groupwise.commands.eval import report_lines
from groupwise.config import read_config
from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.errors import CheckpointError, ConfigError
from groupwise.evaluate.held_out import (
    Evaluation,
    compare,
    evaluate,
    read_evaluation,
    transcripts,
    unused_name,
    write_evaluation,
)
from groupwise.evaluate.target import find_target
from groupwise.model.load import load_policy
from groupwise.records import Completion, Example, Request, Rollout, Sampling
from groupwise.tasks import Task
from groupwise.tracking.run_folder import RunFolder
from groupwise.training import train
from tests.support.small_runs import LUCK, run_command, small_config, task_file

TINY = Path(str(groupwise.__file__)).parent / "model" / "tiny"


def evaluate_command(target: str, **options: Any) -> dict[str, Any]:
    (report,) = evaluate_reports(target, **options)
    return report


def made(greedy: str, sampled: Sequence[int], *, samples: int = 4, examples: str = "abcd") -> Evaluation:
    return Evaluation(
        examples=tuple(examples),
        greedy_right=tuple(digit == "1" for digit in greedy),
        sampled_right=tuple(sampled),
        samples=samples,
        failed=0,
        length=3.0,
    )


def test_accuracy_is_counted_by_example():
    intervals = made("1100", (4, 2, 0, 0)).intervals()
    assert intervals["greedy"].mean == 0.5
    assert intervals["avg@4"].mean == (1 + 0.5) / 4
    assert intervals["pass@4"].mean == 0.5  # two of the four examples have a right answer among their four


def test_a_comparison_pairs_the_same_examples_whatever_their_order():
    before, after = made("1000", (1, 0, 0, 0)), made("0111", (0, 4, 0, 1), examples="dcba")
    change = compare(before, after)
    # a: 1 → 1, b: 0 → 1, c: 0 → 1, d: 0 → 0
    assert (change["greedy"].mean, change["greedy"].improved, change["greedy"].worsened) == (0.5, 2, 0)
    # quarters: a 1 → 1, b 0 → 0, c 0 → 4, d 0 → 0
    assert change["avg@4"].mean == pytest.approx(0.25)


def test_an_evaluation_on_some_of_its_examples_counts_those_alone():
    part = made("1100", (4, 2, 0, 0)).on(("b", "a", "x"))
    assert part.examples == ("a", "b")
    assert (part.intervals()["greedy"].mean, part.intervals()["avg@4"].mean) == (1.0, 0.75)


def test_a_comparison_has_pass_at_k():
    change = compare(made("1111", (4, 1, 1, 1)), made("1111", (4, 4, 0, 0)))["pass@4"]
    assert (change.mean, change.improved, change.worsened) == (-0.5, 0, 2)


def test_what_cannot_be_paired_is_not_compared():
    four = made("1000", (1, 0, 0, 0))
    assert compare(four, made("1000", (1, 0, 0, 0), samples=8)).keys() == {"greedy"}
    assert compare(four, made("1000", (1, 0, 0, 0), examples="wxyz")) == {}
    assert compare(four, made("1000", (1, 0, 0, 0), examples="axyz")) == {}


def test_an_evaluation_reads_back_from_json(tmp_path):
    result, run = parroted(), RunFolder(tmp_path)
    assert read_evaluation(run, "before") is None
    path = write_evaluation(run.evaluations, "before", result, about={"step": 0})
    assert json.loads(path.read_text())["step"] == 0
    assert read_evaluation(run, "before") == replace(result, answers=(), questions=())
    assert [unused_name(run.evaluations, "again"), unused_name(run.evaluations, "before")] == [
        "again",
        "before-2",
    ]
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"before\.json is damaged"):
        read_evaluation(run, "before")


class Parrot:
    """Codec and Generate in one: greedily says "right", else what the seed decides."""

    end_tokens = frozenset({0})

    def encode(self, prompt: Any) -> tuple[int, ...]:
        return tuple(str(prompt).encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token).decode()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        def complete(seed: int) -> Completion:
            text = b"right\0" if sampling.greedy or seed % 2 else b"bad\0"
            zeros = (0.0,) * len(text)
            return Completion(tokens=tuple(text), logprobs=zeros, entropies=zeros, finish="end")

        return [[complete(seed) for seed in request.seeds] for request in requests]


def correct(rollout: Rollout, example: Example) -> float:
    if example["q"] == "broken":
        raise ValueError("no gold")
    return float(rollout.text == "right")


def parroted(seed: int = 0) -> Evaluation:
    task = Task(name="q", examples=[{"q": "x"}], prompt=lambda row: [
        {"role": "user", "content": row["q"]}], rewards={"correct": correct})  # fmt: skip
    examples = [Example({"q": q}) for q in ("one", "two", "broken")]
    parrot = Parrot()
    return evaluate(
        task, examples, codec=parrot, engine=parrot, sampling=Sampling(), samples=16, seed=seed, seconds=1.0
    )


def test_every_example_is_answered_greedily_and_sampled():
    result = parroted()
    assert result.greedy_right == (True, True, False)
    assert 0 < sum(result.sampled_right[:2]) < 32
    assert (result.sampled_right[2], result.failed) == (0, 17)


def test_the_noise_is_the_same_whenever_it_is_called_and_depends_on_the_seed():
    assert parroted() == parroted()
    assert parroted().sampled_right != parroted(seed=1).sampled_right


def test_transcripts_show_prompt_answer_and_verdict():
    first, _, third = transcripts(parroted(), count=3).split("=" * 78 + "\n")
    assert first == "[user] one\n--- answer\nright\n--- right; correct 1; ended by end\n"
    line = correct.__code__.co_firstlineno + 2
    error = f"reward correct: ValueError: no gold ({Path(__file__).name}, line {line})"
    assert third.endswith(f"--- wrong ({error}); no reward; ended by end\n")
    assert transcripts(parroted(), count=1) == first


# The command, on a real run.


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    task_file(folder)
    short = ("run.max_steps=2", "evaluate.every=0")
    return {
        name: train(small_config(folder, *short, f"run.name={name}", *more))
        for name, more in {"full": (), "lora": ("lora.r=4",)}.items()
    }


@pytest.mark.parametrize("name", ["full", "lora"])
def test_measuring_a_run_again_gives_what_it_measured_and_saves_beside_it(runs, name):
    run = runs[name]
    report = evaluate_command(str(run))
    after = json.loads((run / "eval" / "after.json").read_text())
    assert report["model"] == str(run / "checkpoints" / "step-000002")
    assert [report[key]["mean"] for key in ("greedy", "avg@2")] == [after["eval/greedy"], after["eval/avg@2"]]
    assert report["change"] == after["change"]
    saved = Path(report["saved"])
    assert saved == run.resolve() / "eval" / "again-step-000002.json"
    assert json.loads(saved.read_text())["sampled_right"] == after["sampled_right"]
    assert saved.with_suffix(".txt").read_text() == (run / "eval" / "after.txt").read_text()
    assert evaluate_command(str(run))["saved"].endswith("again-step-000002-2.json")


def test_a_checkpoint_its_adapter_and_its_copy_elsewhere_measure_the_same(runs, tmp_path):
    task = str(runs["lora"].parent / "luck.py")
    checkpoint = runs["lora"] / "checkpoints" / "step-000002"
    copy = shutil.copytree(checkpoint, tmp_path / "adapter")
    assert find_target(str(copy)).rank == 4
    settings = ["rollout.max_tokens=6", "rollout.temperature=1.5", "model.device=cpu"]
    reports = [
        evaluate_command(str(checkpoint)),
        evaluate_command(str(copy), task=task, samples=2, overrides=settings),
    ]
    assert reports[0]["avg@2"] == reports[1]["avg@2"]
    assert "saved" not in reports[1]


def test_the_built_in_model_is_measured_by_name_and_by_folder_on_given_data(runs, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    task = str(runs["full"].parent / "luck.py")
    settings = ["rollout.max_tokens=4", "model.device=cpu"]
    by_name, by_folder = (
        evaluate_command(target, task=task, data=str(data), samples=3, examples=4, seed=5, overrides=settings)
        for target in ("tiny", str(TINY))
    )
    assert (by_name["prompts"], by_name["samples"], by_name["seed"]) == (4, 3, 5)
    assert {k: v for k, v in by_name.items() if k not in ("target", "model")} == {
        k: v for k, v in by_folder.items() if k not in ("target", "model")
    }


def test_a_target_that_means_nothing_gets_one_sentence(runs, tmp_path):
    (tmp_path / "config.yaml").write_text("run: {seed: 1}")
    with pytest.raises(ConfigError, match="has no checkpoint yet: resume it by groupwise train --resume"):
        find_target(str(tmp_path))
    with pytest.raises(
        ConfigError, match="is neither a folder with a run or a model nor the name of a model"
    ):
        find_target("/no/such/place")
    with pytest.raises(ConfigError, match="neither a folder"):
        find_target(str(tmp_path / "config.yaml"))
    spoiled = shutil.copytree(runs["full"], tmp_path / "spoiled")
    (spoiled / "checkpoints" / "step-000002" / "state.json").write_text("{}")
    with pytest.raises((CheckpointError, ConfigError)):
        find_target(str(spoiled))


def test_a_path_that_is_not_there_is_not_looked_for_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        find_target("runs/nosuch")
    assert str(error.value) == "there is no folder runs/nosuch; runs contains first"
    assert find_target("owner/nosuch").base == "owner/nosuch"


def test_a_place_that_cannot_hold_results_is_refused_before_a_model_loads(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr("groupwise.commands.eval.load_target", None)
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ConfigError, match=f"cannot save results in {place}: .*; choose another folder"):
            evaluate_command("tiny", task="countdown", output=str(place))
    assert (tmp_path / "file").read_text() == "mine"


def test_figures_that_cannot_be_saved_are_printed_all_the_same(runs, tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("groupwise.evaluate.held_out.write_atomically", full)
    assert cli.main(["eval", str(runs["full"]), "--output", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "  greedy " in said.out
    assert "saved in" not in said.out
    assert said.err.startswith(f"error: cannot save results in {tmp_path}: No space left on device; ")
    assert said.err.count("\n") == 1


def test_a_run_whose_task_was_defined_in_python_asks_for_its_file(runs, tmp_path):
    copy = shutil.copytree(runs["full"], tmp_path / "copy")
    config = copy / "config.yaml"
    name = read_config(config).task.name
    config.write_text(config.read_text().replace(name, "luck"))
    with pytest.raises(ConfigError, match=r"a task named 'luck' that was defined in Python; pass the file"):
        evaluate_command(str(copy))
    assert evaluate_command(str(copy), task=name)["task"] == "luck"


def test_what_an_edited_reward_gives_is_not_compared_with_what_it_gave_before(tmp_path):
    task_file(tmp_path)
    run = train(small_config(tmp_path, "run.max_steps=1", "run.save_every=1"))
    assert "change" in evaluate_command(str(run))
    task_file(tmp_path, LUCK.replace("% 4 == 0", ">= 0"))
    report = evaluate_command(str(run))
    assert report["greedy"]["mean"] == 1.0
    assert "change" not in report
    assert report["edited"] == ["reward luck"]
    line = "  the task's code has changed since training (reward luck): no comparison with before training"
    assert line in report_lines(report)


def test_greedy_answers_do_not_depend_on_the_seed(tmp_path):
    task_file(tmp_path)
    policy = load_policy(ModelConfig(device="cpu"), LoraConfig(r=0))
    task = Task(
        name="n", examples=[{"n": 1}], prompt=lambda row: str(row["n"]), rewards={"c": lambda r, e: 0.0}
    )

    def texts(seed: int) -> list[str]:
        result = evaluate(
            task,
            [Example({"n": n}) for n in range(3)],
            codec=policy,
            engine=Engine(policy, EngineConfig()),
            sampling=Sampling(max_tokens=4),
            samples=1,
            seed=seed,
            seconds=1.0,
        )
        return [group.rollouts[0].text for group in result.answers]

    assert texts(0) == texts(1)


NOTES = r"""
import os, time
from pathlib import Path
import groupwise as gw

NOTES, running = Path(__file__).with_name("notes"), []

def slow(rollout, example):
    time.sleep(0.05)
    with NOTES.open("a") as file:
        file.write(f"worker {os.getpid()}\n")
    return 1.0

async def judge(rollout, example):
    import asyncio
    running.append(1)
    with NOTES.open("a") as file:
        file.write(f"running {len(running)}\n")
    await asyncio.sleep(0.02)
    running.pop()
    return 0.0

task = gw.Task(
    name="notes", examples=[{"n": n} for n in range(24)], prompt=lambda e: f"{e['n']} + 1",
    rewards={"slow": slow, "judge": judge}, worked=lambda e, rng: "1",
)
"""
LIMITS = ("task.reward_workers=2", "task.reward_concurrency=3", "task.held_out=8", "model.device=cpu")


@pytest.mark.parametrize("command", ["eval", "sft"])
def test_the_workers_and_the_concurrency_of_rewards_are_those_of_the_settings(tmp_path, command):
    task = task_file(tmp_path, NOTES)
    words = {
        "eval": ("eval", "tiny", "--task", str(task), "--samples", "1", "rollout.max_tokens=4"),
        "sft": ("sft", str(task), "--max-steps", "1", f"run.output_dir={tmp_path}", "rollout.max_tokens=4"),
    }[command]
    more = () if command == "eval" else ("track.trackers=[]", "track.report=false", "evaluate.samples=1")
    ended = run_command(*words, *LIMITS, *more)
    assert ended.code == 0, ended.err
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert len({value for kind, value in notes if kind == "worker"}) == 2
    assert max(int(value) for kind, value in notes if kind == "running") == 3
