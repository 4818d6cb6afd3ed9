"""A population from the first step to the last: selected, contained, killed, resumed."""

from __future__ import annotations

import json
import math
import random
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise import cli
from groupwise.config import read_config
from groupwise.errors import ServersGoneError
from groupwise.evaluate.target import find_target
from groupwise.evolution.evolve_run import EvolveRun
from groupwise.evolution.evolve_state import SearchStart, SearchState, summary_of
from groupwise.report.rollout_view import RolloutView
from groupwise.tasks import load_task
from groupwise.tracking.rollout_files import read_rollouts
from groupwise.tracking.run_folder import RunFolder
from tests.support.small_runs import INTERRUPT, KILL, SMALL, SignalAt, run_artifacts, run_command, task_file

POPULATION = (
    *("lora.r=4", "evolve.population=3", "evolve.every=2", "evolve.certain=false", "run.save_every=1"),
    "evolve.method=tournament",
    *("evaluate.during=3", "evaluate.every=0", "evolve.vary={optim.learning_rate: [1e-4, 1e-2]}"),
)


def words(folder: Path, name: str, *more: str) -> list[str]:
    place = [f"run.output_dir={folder}", f"run.name={name}"]
    return ["evolve", str(folder / "luck.py"), *place, *SMALL, *POPULATION, *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("searches")
    task_file(folder)
    return folder


@pytest.fixture(scope="module")
def whole(place) -> Path:
    ended = run_command(*words(place, "whole"))
    assert ended.code == 0, ended.err
    return place / "whole"


def evolution(run: Path) -> dict[str, Any]:
    return json.loads((run / "evolution.json").read_text())


def lasting(run: Path) -> dict[str, Any]:
    """All that must not depend on how often a search was stopped."""
    told = evolution(run)
    elite = {p.name: p.read_bytes() for p in (run / "elite").iterdir() if p.suffix == ".safetensors"}
    return {**run_artifacts(run), "evolution": told, "elite": elite}


def test_a_search_tells_who_came_from_whom_and_keeps_the_best(whole):
    told = evolution(whole)
    assert told["steps"] == 4
    assert [snapshot["step"] for snapshot in told["snapshots"]] == [2, 4]
    assert len(told["members"]) == 3
    assert {event["what"] for event in told["events"]} >= {"born", "copied", "changed"}
    names = {event["name"] for event in told["events"]}
    assert all(member["parent"] is None or member["parent"] in names for member in told["members"])
    best = max(told["members"], key=lambda member: member["fitness"][0])
    assert told["best"]["fitness"] == best["fitness"]
    assert "eval/greedy" in told["judged"]
    for path in (
        "elite/adapter_model.safetensors",
        "plots/lineage.png",
        "plots/values.png",
        "eval/after.json",
    ):
        assert (whole / path).is_file()


def test_members_are_told_the_same_and_differ_in_what_was_asked_for(whole):
    rates = [
        member["values"]["optim.learning_rate"] for member in evolution(whole)["snapshots"][0]["members"]
    ]
    assert len(set(rates)) == 3
    assert rates[0] == pytest.approx(1e-4)
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)


@pytest.mark.parametrize("number", range(3))
def test_killed_at_any_moment_and_resumed_it_is_the_same_population_bit_for_bit(place, whole, number):
    run = place / f"killed-{number}"
    rng = random.Random(number)
    signals = [
        [SignalAt("metrics.jsonl", KILL, nth=2), SignalAt("elite", KILL, nth=1)],  # before and at a selection
        [
            SignalAt(".step-000002.tmp-", KILL, nth=rng.randint(2, 12)),
            SignalAt(".step-000004.tmp-", KILL, nth=9),
        ],
        [SignalAt(f"{run.name}/", KILL, nth=n) for n in (rng.randint(20, 80), rng.randint(10, 50))],
    ][number]
    codes = [run_command(*words(place, run.name), signals=[signals[0]]).code]
    codes += [run_command("evolve", "--resume", str(run), signals=[at]).code for at in signals[1:]]
    assert codes == [-KILL] * len(signals)
    assert run_command("evolve", "--resume", str(run)).code == 0
    assert lasting(run) == lasting(whole)


def test_an_interrupt_finishes_the_step_and_a_finished_search_says_so(place, whole):
    run = place / "interrupted"
    ended = run_command(*words(place, run.name), signals=[SignalAt(".step-000002.tmp-", INTERRUPT)])
    assert ended.code == 130
    assert f"groupwise evolve --resume {run}" in ended.out
    assert run_command("evolve", "--resume", str(run)).code == 0
    assert lasting(run) == lasting(whole)
    other = run_command("evolve", "--resume", str(run), "evaluate.samples=5")
    assert (other.code, "these differ: evaluate.samples" in other.err) == (2, True)
    again = run_command("evolve", "--resume", str(run))
    assert again.out.startswith(f"{run} is finished after 4 steps; to continue, groupwise evolve --resume")


@pytest.mark.parametrize("method", ["tournament", "halving"])
def test_a_finished_search_goes_on_as_one_that_was_longer_from_the_start(place, method):
    def after(run: Path) -> dict[str, Any]:
        # The last step of a search selects nobody: its checkpoint holds the members as they were.
        return {name: value for name, value in lasting(run).items() if "step-000002" not in name}

    settings = [f"evolve.method={method}", "run.max_steps=2"]
    longer, run = place / f"{method}-longer", place / f"{method}-extended"
    assert run_command(*words(place, longer.name, *settings, "run.max_steps=4")).code == 0
    assert run_command(*words(place, run.name, *settings)).code == 0
    more = ["evolve", "--resume", str(run), "run.max_steps=4"]
    assert run_command(*more, signals=[SignalAt(".step-000003.tmp-", KILL)]).code == -KILL
    assert run_command("evolve", "--resume", str(run)).code == 0
    assert after(run) == after(longer)


def test_a_search_that_reached_its_target_is_not_made_longer(place):
    run = place / "reached"
    assert run_command(*words(place, run.name, "evolve.target=0")).code == 0
    assert run_command("evolve", "--resume", str(run)).out == f"{run} is finished after 2 steps\n"
    again = run_command("evolve", "--resume", str(run), "run.max_steps=8")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "reached its target or token budget after 2 steps and cannot be extended" in again.err


def test_the_last_words_of_a_search_name_folders_as_the_shell_reads_them():
    config, folder = read_config(overrides=["task.options.scoring=x y"]), RunFolder(Path("my runs/a b"))

    def said(step: int) -> list[list[str]]:
        summary = summary_of(config, SearchState(step=step), folder=folder, before=None, after=None)
        return [shlex.split(line) for line, _ in summary.next_commands]

    resume, elite = ["groupwise", "evolve", "--resume", "my runs/a b"], "my runs/a b/elite"
    assert said(0) == [resume]  # nothing is trained yet
    assert said(1) == [resume, ["groupwise", "eval", elite], ["groupwise", "chat", elite]]
    config = replace(config, task=replace(config.task, name="mine"))
    assert said(1)[:2] == [
        ["groupwise.evolve(task,", "resume=my runs/a b)"],
        ["groupwise", "eval", elite, "--task", "FILE.py"],
    ]


@pytest.mark.parametrize(("method", "left"), [("pbt", 3), ("halving", 2), ("random", 3)])
def test_every_method_runs_to_the_same_end_killed_after_a_selection_or_not(place, method, left):
    ended = run_command(*words(place, method, f"evolve.method={method}"))
    assert ended.code == 0, ended.err
    told = evolution(place / method)
    assert told["best"] is not None
    assert len(told["members"]) == left
    killed = place / f"{method}-killed"
    at = SignalAt(".step-000003.tmp-", KILL, nth=3)  # the first selection is after step 2
    assert run_command(*words(place, killed.name, f"evolve.method={method}"), signals=[at]).code == -KILL
    assert run_command("evolve", "--resume", str(killed)).code == 0
    assert lasting(killed) == lasting(place / method)


def test_tokens_bound_the_whole_search(place):
    ended = run_command(*words(place, "bounded", "evolve.tokens=200"))
    assert ended.code == 0, ended.err
    told = evolution(place / "bounded")
    assert told["steps"] == 1
    assert told["best"] is not None


def test_a_search_is_measured_talked_to_and_merged_by_its_best_member(whole, tmp_path, capsys):
    found = find_target(str(whole))
    assert (found.trained, found.rank) == (whole / "elite", 4)
    assert found.cursor >= 12
    by_folder = find_target(str(whole / "elite"))
    assert replace(by_folder, name=found.name) == found
    assert cli.main(["eval", str(whole), "--examples", "2", "--output", str(tmp_path / "eval")]) == 0
    assert cli.main(["chat", str(whole), "--prompt", "1 + 1", "--max-tokens", "2"]) == 0
    assert cli.main(["merge", str(whole), "--output-path", str(tmp_path / "merged")]) == 0
    checkpoint = str(whole / "checkpoints" / "step-000004")
    capsys.readouterr()
    for words in (["eval", checkpoint], ["merge", checkpoint, "--output-path", str(tmp_path / "other")]):
        assert cli.main(words) == 2
        assert "is a checkpoint of a whole population; use" in capsys.readouterr().err


def test_a_search_has_no_answers_to_imitate(whole, capsys):
    assert cli.main(["sft", "--from-run", str(whole)]) == 2
    assert "is an evolve run, whose completions come from several members" in capsys.readouterr().err


def search_in(folder: Path, *more: str) -> EvolveRun:
    task_file(folder)
    names = (f"run.output_dir={folder}", "run.name=run", f"task.name={folder / 'luck.py'}", "run.kind=evolve")
    config = read_config(overrides=[*names, *SMALL, *POPULATION, *more]).resolve()
    task = load_task(config.task)
    return EvolveRun(config, task=task, start=SearchStart.new(config, task=task.name))


def test_a_member_that_diverges_is_contained_reported_and_replaced(tmp_path):
    with search_in(tmp_path) as search:
        for step in search.steps():
            if step == 2:
                next(iter(search.population.members[1].weights.values())).fill_(math.nan)
            batches = search.collect(step)
            assert sorted(batches) == ([0, 2] if step == 2 else [0, 1, 2])
            search.track(step, search.learn(step, batches))
            if step == 2:
                assert search.state.at(1).name > 2  # another member took over the slot
    told = evolution(tmp_path / "run")
    trouble = next(event for event in told["events"] if event["what"] == "diverged")
    assert (trouble["step"], trouble["name"]) == (2, 1)
    assert "entropy" in trouble["detail"]
    assert "which diverged" in next(e["detail"] for e in told["events"] if e["what"] == "copied")
    assert len(told["members"]) == 3


def test_a_teacher_that_is_gone_stops_the_search_and_blames_no_member(tmp_path, monkeypatch):
    def gone(*arguments: Any) -> None:
        raise ServersGoneError("no teacher has responded for 600 s")

    with search_in(tmp_path, "evolve.population=2", "run.max_steps=1") as search:
        step = next(iter(search.steps()))
        batches = search.collect(step)
        monkeypatch.setattr(search.population.members[0].learner, "train_on", gone)
        with pytest.raises(ServersGoneError, match="no teacher has responded for 600 s"):
            search.learn(step, batches)
        assert sorted(search.population.members) == [0, 1]


def test_an_update_that_breaks_a_member_leaves_no_gradient_to_the_others(tmp_path):
    with search_in(tmp_path, "evolve.population=2", "run.max_steps=1") as search:
        (step,) = [next(iter(search.steps()))]
        batches = search.collect(step)
        search.population.members[0].learner.algo = gw.Config().algo.__class__(max_gap=0.0)
        reports = search.learn(step, batches)
        assert list(reports) == [1]
        assert all(p.grad is None for p in search.base.policy.trainable().values())
        search.track(step, reports)
    assert evolution(tmp_path / "run")["best"]["place"] == 1


def test_python_and_the_shell_start_the_same_search(place, whole, tmp_path):
    task = load_task(read_config(overrides=[f"task.name={place / 'luck.py'}"]).task)
    settings = {
        "model": {"device": "cpu"},
        "rollout": {"prompts": 3, "group_size": 4, "max_tokens": 6, "temperature": 1.5},
        "lora": {"r": 4},
        "evolve": {
            "method": "tournament",
            "population": 3,
            "every": 2,
            "certain": False,
            "vary": {"optim.learning_rate": [1e-4, 1e-2]},
        },
        "evaluate": {"every": 0, "during": 3, "samples": 2},
        "run": {"max_steps": 4, "save_every": 1, "keep_last": 3},
        "track": {"trackers": (), "report": False},
    }
    run = gw.evolve(task, output_dir=tmp_path, run_name="whole", **settings)
    assert lasting(run)["elite"] == lasting(whole)["elite"]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (["lora.r=0"], "members of a population are adapters: set lora.r"),
        (["task.held_out=0"], "selection needs held-out examples"),
        (["engine.kind=vllm"], "requires groupwise's own engine: set engine.kind=own"),
        (["engine.quantization=fp8"], "do not generate in FP8; leave out engine.quantization=fp8"),
        (["--vary", "beta=1"], "--vary must have the form NAME=LOW:HIGH"),
        (["--vary", "beta=1:2", "--vary", "beta=1:3"], "--vary beta is given twice"),
        (["evolve.vary={algo.clip_low: [0.9, 1.5]}"], "evolve.vary: algo.clip_low must be between 0 and 1"),
    ],
)
def test_what_a_population_cannot_do_is_refused_in_a_sentence(place, given, part):
    ended = run_command(*words(place, "refused", *given))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert part in ended.err
    assert not (place / "refused").exists()


def test_a_search_records_the_answers_of_every_member_for_the_page(whole):
    folder = RunFolder(whole)
    view = RolloutView(folder)
    assert view.steps() == [1, 2, 3, 4]
    rows = read_rollouts(folder.rollouts_at(1))
    members = {row["example"]["population_member"] for row in rows}
    assert members == {0, 1, 2}
    # 3 prompts for each of 3 members, refilled groups besides; 4 answers in each.
    assert len({row["group"] for row in rows}) >= 9
    assert len(rows) == 4 * len({row["group"] for row in rows})
