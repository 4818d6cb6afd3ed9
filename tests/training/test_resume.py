"""A run that was killed, interrupted or extended ends as if it had never stopped, bit for bit."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
from pathlib import Path

import pytest

from groupwise import cli
from groupwise.errors import ConfigError
from groupwise.learner.checkpoint import seal
from groupwise.tracking.rollout_files import read_rollouts
from groupwise.tracking.run_files import last_step
from groupwise.tracking.run_folder import RunFolder
from groupwise.training import train
from groupwise.training.evaluator import Evaluator
from tests.support.small_runs import (
    INTERRUPT,
    KILL,
    LUCK,
    SMALL,
    TERMINATE,
    SignalAt,
    deterministic_metrics,
    run_artifacts,
    run_command,
    small_config,
    task_file,
)

VARIANTS = {
    "full": ("algo.beta=0.1", "optim.epochs=2", "optim.minibatches=2", "rollout.refill=2"),
    "lora": (
        "lora.r=4",
        "algo.beta=0.1",
        "rollout.refill=1",
        "optim.schedule=linear",
        "rollout.curriculum=2",
        "algo.target_entropy=9",
    ),
}


def words(folder: Path, name: str, *more: str) -> list[str]:
    return ["train", str(folder / "luck.py"), f"run.output_dir={folder}", f"run.name={name}", *SMALL, *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    task_file(folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(place) -> dict[str, Path]:
    for name, settings in VARIANTS.items():
        assert run_command(*words(place, f"whole-{name}", *settings)).code == 0
    return {name: place / f"whole-{name}" for name in VARIANTS}


def assert_same(run: Path, whole: Path) -> None:
    found, expected = run_artifacts(run), run_artifacts(whole)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_any_moment_and_resumed_it_gives_the_same_bits(place, uninterrupted, variant):
    whole = uninterrupted[variant]
    assert any(row["rollout/replaced"] > 0 for row in deterministic_metrics(whole))
    run = place / f"killed-{variant}"
    rng = random.Random(variant)
    signals = [
        SignalAt("rollouts/", KILL, nth=2),  # in step 1 or 2: before the first checkpoint
        SignalAt(".step-000002.tmp-", KILL, nth=rng.randint(2, 6)),  # inside the writing of a checkpoint
        SignalAt(f"{run.name}/", KILL, nth=rng.randint(10, 60)),  # anywhere
        SignalAt(".step-000004.tmp-", KILL, nth=3),  # inside the writing of the last one
    ]
    start = words(place, run.name, *VARIANTS[variant])
    codes = [run_command(*start, signals=[signals[0]]).code]
    codes += [run_command("train", "--resume", str(run), signals=[at]).code for at in signals[1:]]
    assert codes == [-KILL] * len(signals)
    assert run_command("train", "--resume", str(run)).code == 0
    assert_same(run, whole)
    assert not list(run.glob("**/.*tmp*"))


def test_one_interrupt_finishes_the_step_saves_and_exits_with_130(place, uninterrupted):
    run = place / "interrupted"
    ended = run_command(
        *words(place, run.name, *VARIANTS["full"]), signals=[SignalAt("step-000001.parquet", INTERRUPT)]
    )
    assert ended.code == 130
    assert [path.name for path in sorted(run.glob("checkpoints/*"))] == ["step-000001"]
    assert "stopping after this step and saving" in ended.out
    assert "stopped after step 1" in ended.out
    assert f"groupwise train --resume {run}\n" in ended.out
    assert run_command("train", "--resume", str(run)).code == 0
    assert_same(run, uninterrupted["full"])  # its first checkpoint is gone by now, as the oldest of four


def test_an_interrupt_before_the_first_step_says_that_nothing_is_trained_yet(place):
    run = place / "untrained"
    ended = run_command(*words(place, run.name), signals=[SignalAt("before.json", INTERRUPT)])
    assert ended.code == 130
    last = ended.out.partition("stopped ")[2].splitlines()
    assert last[0] == f"before the first step, nothing was trained; the run folder is {run}"
    assert last[-3:] == ["next", f"  groupwise train --resume {run}", "      starts again"]


def test_a_request_to_terminate_is_honoured_after_saving(place):
    run = place / "terminated"
    ended = run_command(*words(place, run.name), signals=[SignalAt("step-000001.parquet", TERMINATE)])
    assert ended.code == -TERMINATE
    assert (run / "checkpoints" / "step-000001" / "checksums.json").is_file()
    assert json.loads((run / "training_stats.json").read_text())["steps"] == 1


def test_a_second_interrupt_stops_at_once_and_leaves_the_last_checkpoint_whole(place, uninterrupted):
    run = place / "twice"
    signals = [SignalAt("step-000004.parquet", INTERRUPT), SignalAt(".step-000004.tmp-", INTERRUPT, nth=3)]
    ended = run_command(*words(place, run.name, *VARIANTS["full"]), signals=signals)
    assert ended.code == 130
    assert f"stopped at once; resume with groupwise train --resume {run}" in ended.out
    assert [path.name for path in sorted(run.glob("checkpoints/step-*"))] == ["step-000002", "step-000003"]
    assert run_command("train", "--resume", str(run)).code == 0
    assert_same(run, uninterrupted["full"])


def everything(run: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"
    }


def test_a_finished_run_says_so_and_changes_nothing(uninterrupted):
    run = uninterrupted["full"]
    before = everything(run)
    ended = run_command("train", "--resume", str(run))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == (
        f"{run} is finished: 4 steps done; to train on, groupwise train --resume {run} run.max_steps=8\n"
    )
    assert everything(run) == before


def test_a_run_killed_in_its_report_writes_it_when_resumed_and_names_lost_metrics(copied):
    (copied / "training_stats.json").unlink()
    leftovers = [copied / ".report.html.tmp-4194305", copied / "eval" / ".after.json.tmp-4194305"]
    for leftover in leftovers:
        leftover.write_text("half")
    leftovers.append(copied / "checkpoints" / ".step-000004.tmp-4194305")
    leftovers[-1].mkdir()
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(lines[:1] + lines[3:]))
    ended = run_command("train", "--resume", str(copied), "track.report=true")
    assert (ended.code, ended.err) == (0, "")
    assert "has no line for steps 2 – 3: they were lost" in ended.out
    assert (copied / "report.html").is_file()
    assert json.loads((copied / "training_stats.json").read_text())["steps"] == 4
    assert [path for path in leftovers if path.exists()] == []


@pytest.fixture
def copied(place, uninterrupted, request, tmp_path) -> Path:
    """A finished run to spoil."""
    shutil.copytree(uninterrupted["lora"], tmp_path / "copy")
    return tmp_path / "copy"


def test_a_damaged_checkpoint_is_refused_and_nothing_is_overwritten(copied):
    weights = copied / "checkpoints" / "step-000004" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    before = everything(copied)
    ended = run_command("train", "--resume", str(copied))
    assert ended.code == 2
    assert "adapter_model.safetensors does not match its checksum; step-000003 is intact" in ended.err
    assert ended.err.count("\n") == 1
    assert everything(copied) == before


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("optim.learning_rate=0.5", "these differ: optim.learning_rate: 0.0001 → 0.5; start a new run"),
        ("run.seed=3", "these differ: run.seed: 0 → 3"),
        ("run.name=other", "these differ: run.name"),
        ("run.max_steps=9", "run.max_steps cannot change where optim.schedule=linear"),
    ],
)
def test_resuming_with_other_settings_names_them(copied, setting, part):
    before = everything(copied)
    ended = run_command("train", "--resume", str(copied), setting)
    assert ended.code == 2
    assert part in ended.err
    assert everything(copied) == before


def config_edited(run: Path, old: str, new: str) -> None:
    path = run / "config.yaml"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("learning_rate: 0.0001\n", "learning_rate: 0.5\n", "optim.learning_rate: 0.0001 → 0.5"),
        ("  seed: 0\n", "  seed: 3\n", "run.seed: 0 → 3"),
        ("group_size: 4\n", "group_size: 8\n", "rollout.group_size: 4 → 8"),
        ("  loss: dapo\n", "  loss: gspo\n", "algo.loss: dapo → gspo"),
    ],
)
def test_settings_that_were_edited_by_hand_are_refused_by_name(copied, old, new, named):
    config_edited(copied, old, new)
    before = everything(copied)
    ended = run_command("train", "--resume", str(copied))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert (
        f"these differ: {named}; put them back in {copied / 'config.yaml'}, or start a new run" in ended.err
    )
    assert everything(copied) == before


def test_a_checkpoint_that_does_not_tell_its_settings_and_code_resumes(copied):
    checkpoint = copied / "checkpoints" / "step-000004"
    path = checkpoint / "state.json"
    state = json.loads(path.read_text())
    assert state.pop("settings")["run"]["max_steps"] == 4
    assert sorted(state.pop("code")) == ["accuracy", "prompt", "reward luck", "weights"]
    path.write_text(json.dumps(state))
    (checkpoint / "checksums.json").unlink()
    seal(checkpoint)
    config_edited(copied, "  seed: 0\n", "  seed: 3\n")
    ended = run_command("train", "--resume", str(copied))
    assert (ended.code, ended.err) == (0, "")
    assert "is finished: 4 steps done" in ended.out


@pytest.mark.parametrize("how", ["removed", "incomplete"])
def test_a_run_that_lost_its_checkpoints_is_not_emptied(copied, how):
    if how == "removed":
        shutil.rmtree(copied / "checkpoints")
    else:
        for path in copied.glob("checkpoints/step-*/adapter_model.safetensors"):
            path.unlink()
    before = everything(copied)
    ended = run_command("train", "--resume", str(copied))
    assert ended.code == 2
    refusal = ended.err.splitlines()[-1]
    assert refusal == (
        f"error: {copied} has records of 4 steps, but no complete checkpoint in {copied / 'checkpoints'} "
        "to resume from: put one back, or start a new run by "
        f"groupwise train --config {copied / 'config.yaml'} run.name=NEW"
    )
    assert everything(copied) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_starts_again(place):
    run = place / "early"
    assert run_command(*words(place, run.name), signals=[SignalAt("step-000002.parquet", KILL)]).code == -KILL
    assert not list(run.glob("checkpoints/*"))
    ended = run_command("train", "--resume", str(run))
    assert ended.code == 0
    assert "the run was stopped before its first checkpoint; starting again" in ended.out


def test_a_reward_that_was_edited_is_refused_and_invents_no_gain(place, tmp_path):
    task_file(tmp_path)
    short = words(tmp_path, "edited", "run.max_steps=2")
    assert run_command(*short).code == 0
    run = tmp_path / "edited"
    before = everything(run)
    task_file(tmp_path, LUCK.replace("% 4 == 0", ">= 0"))
    ended = run_command("train", "--resume", str(run), "run.max_steps=4")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "its code differs in reward luck: put it back, or start a new run" in ended.err
    assert everything(run) == before
    task_file(tmp_path, LUCK.replace("def luck", "# by chance\ndef luck"))
    assert run_command("train", "--resume", str(run), "run.max_steps=4").code == 0


def test_a_run_in_use_is_not_resumed(copied):
    with (copied / ".lock").open("a+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        ended = run_command("train", "--resume", str(copied))
    assert ended.code == 2
    assert "is in use by" in ended.err


def test_a_longer_run_goes_on_and_remembers_how_it_was_before_training(place, uninterrupted, tmp_path):
    short = words(place, "short", *VARIANTS["full"], "run.max_steps=2")
    assert run_command(*short).code == 0
    ended = run_command("train", "--resume", str(place / "short"), "--max-steps", "4")
    assert ended.code == 0
    run, whole = run_artifacts(place / "short"), run_artifacts(uninterrupted["full"])
    weights = "checkpoints/step-000004/model.safetensors"
    assert run[weights] == whole[weights]
    assert run["eval/after.json"] == whole["eval/after.json"]
    assert "evaluation before" in ended.out
    assert ended.out.count("→") == 3  # greedy, avg@2 and pass@2, each before → after


def test_a_mistake_leaves_no_empty_run_behind(place):
    ended = run_command(*words(place, "nothing", "model.name=/no/such/model"))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert not (place / "nothing").exists()


def test_only_weights_lie_beside_the_config_and_checkpoints_of_the_old_layout_resume(copied, uninterrupted):
    """vLLM takes every *.safetensors file of a folder for weights."""
    checkpoint = sorted((copied / "checkpoints").iterdir())[0]
    names = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert len(names) == 1
    assert names[0] in ("model.safetensors", "adapter_model.safetensors")
    for later in sorted((copied / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    for path in list((checkpoint / "training").iterdir()):
        path.rename(checkpoint / path.name)
    (checkpoint / "training").rmdir()
    sums = json.loads((checkpoint / "checksums.json").read_text())
    moved = {name.removeprefix("training/"): entry for name, entry in sums.items()}
    (checkpoint / "checksums.json").write_text(json.dumps(moved))
    assert run_command("train", "--resume", str(copied)).code == 0
    ours, theirs = (sorted((run / "checkpoints").iterdir())[-1] for run in (copied, uninterrupted["lora"]))
    for name in (names[0], "training/optimizer.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def test_a_run_that_is_refused_before_its_first_step_leaves_its_name_free(tmp_path, monkeypatch):
    task_file(tmp_path)
    config = small_config(tmp_path, "run.max_steps=1", "evaluate.samples=1")

    def refuse(self, step, *, learner):
        assert (tmp_path / "run" / "config.yaml").is_file(), "everything is open"
        raise ConfigError("refused")

    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "evaluate", refuse)
        with pytest.raises(ConfigError, match="refused"):
            train(config)
    assert not (tmp_path / "run").exists()
    run = train(config)
    assert last_step(run / "metrics.jsonl") == 1


def test_a_refused_run_keeps_files_of_the_user_and_those_of_earlier_steps(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for path in (folder.config, folder.log, folder.path / ".notes"):
        path.write_text("")
    folder.remove_unstarted()
    assert [path.name for path in folder.path.iterdir()] == [".notes"]
    folder.config.write_text("")
    folder.metrics.write_text("{}")
    folder.remove_unstarted()
    assert folder.config.is_file()


ALWAYS_FAILS = """
import groupwise as gw

def wrong(rollout: gw.Rollout, example: gw.Example) -> float:
    raise ValueError("always")

task = gw.Task(name="wrong", examples=[{"n": n} for n in range(12)], prompt=lambda example: str(example["n"]),
               rewards={"wrong": wrong})
"""


@pytest.mark.parametrize("command", ["train", "evolve"])
def test_a_reward_that_always_fails_leaves_the_rollouts_to_be_read(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    task_file(tmp_path, ALWAYS_FAILS)
    settings = [*SMALL, "evaluate.during=1", "evaluate.samples=1", "lora.r=4"]
    assert cli.main([command, "luck.py", *settings]) == 3
    said = capsys.readouterr().err
    assert "100% of the rollouts failed" in said
    assert "diverged" not in said
    (run,) = (tmp_path / "runs").iterdir()
    rows = read_rollouts(run / "rollouts" / "step-000001.parquet")
    assert {row["error"] for row in rows} == {"reward wrong: ValueError: always (luck.py, line 5)"}
