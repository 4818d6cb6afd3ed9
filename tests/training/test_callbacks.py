"""Callbacks see every stage of a run, may stop it, and are named when they fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise.config import read_config
from groupwise.training.callbacks import HOOKS, Callbacks, RunControl
from tests.support.process_groups import in_processes
from tests.support.small_runs import LUCK, SMALL, run_artifacts, run_command, small_config, task_file

TASK = gw.Task(
    name="lucky",
    examples=[{"n": n} for n in range(12)],
    prompt=lambda row: f"{row['n']}?",
    rewards={"lucky": lambda rollout, example: sum(map(ord, rollout.text)) % 3 / 2},
)
SMALL_KEYWORDS: dict[str, Any] = {
    "max_tokens": 5,
    "batch_size": 2,
    "group_size": 4,
    "temperature": 1.5,
    "no_trackio": True,
    "model": {"device": "cpu"},
    "track": {"report": False},
    "rollout": {"refill": 0},
    "task.held_out": 2,
    "evaluate": {"every": 2, "samples": 2},
}


class Seen(gw.Callback):
    """Notes each hook with its step and the kind of what came with it."""

    def __init__(self) -> None:
        self.hooks: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in HOOKS:
            return super().__getattribute__(name)
        return lambda run, *given: self.hooks.append((name, run.step))


def train(folder: Path, *callbacks: object, steps: int = 3, **settings: Any) -> Path:
    how = {**SMALL_KEYWORDS, "run": {"save_every": 2}, **settings}
    return Path(
        gw.train(TASK, callbacks=callbacks, max_steps=steps, output_dir=folder, run_name="run", **how)
    )


def steps_of(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines())


def test_every_hook_is_called_at_its_stage(tmp_path):
    seen = Seen()
    train(tmp_path, seen)
    stages = [
        "before_rollout",
        "after_rollout",
        "before_score",
        "after_score",
        "before_update",
        "after_update",
    ]
    measured, saved = ["before_evaluation", "after_evaluation"], ["before_checkpoint", "after_checkpoint"]
    assert seen.hooks == [
        ("on_run_start", 0),
        *((hook, 0) for hook in measured),
        *((hook, 1) for hook in stages),
        *((hook, 2) for hook in (*stages, *measured, *saved)),
        *((hook, 3) for hook in (*stages, *measured, *saved)),
        ("on_run_end", 3),
    ]


def test_a_callback_sees_groups_rewards_metrics_scores_and_checkpoints(tmp_path):
    told: dict[str, Any] = {}

    class Look(gw.Callback):
        def after_rollout(self, run: gw.RunControl, groups: Any) -> None:
            told["unscored"] = {rollout.reward for group in groups for rollout in group.rollouts}

        def after_score(self, run: gw.RunControl, groups: Any) -> None:
            told["scored"] = [rollout.reward for group in groups for rollout in group.rollouts]

        def after_update(self, run: gw.RunControl, metrics: Any) -> None:
            told["reward"] = metrics["reward/mean"]
            told["policy"] = run.policy.encode("1?")

        def after_evaluation(self, run: gw.RunControl, scores: Any) -> None:
            told["scores"] = set(scores)

        def after_checkpoint(self, run: gw.RunControl, path: Path) -> None:
            told["files"] = {file.name for file in path.iterdir()}

    train(tmp_path, Look(), steps=2)
    assert told["unscored"] == {0.0}
    assert told["reward"] == pytest.approx(sum(told["scored"]) / len(told["scored"]))
    assert "eval/greedy" in told["scores"]
    assert "model.safetensors" in told["files"]
    assert told["policy"]


class StopAt(gw.Callback):
    def __init__(self, step: int, how: str) -> None:
        self.at, self.how = step, how

    def after_update(self, run: gw.RunControl, metrics: Any) -> None:
        if run.step == self.at and self.how == "raise":
            raise gw.StopTraining("far enough")
        if run.step == self.at and self.how == "call":
            run.stop("far enough")


@pytest.mark.parametrize("how", ["raise", "call"])
def test_a_callback_stops_the_run_after_the_step_and_it_resumes_to_the_same_bits(tmp_path, capfd, how):
    whole = train(tmp_path / "whole")
    run = train(tmp_path, StopAt(1, how))
    assert "a callback stopped the run: far enough" in capfd.readouterr().out
    assert steps_of(run) == 1
    assert (run / "checkpoints" / "step-000001").is_dir()
    with pytest.raises(gw.ConfigError, match=r"StopAt was defined in Python .* callbacks=…"):
        gw.train(TASK, resume=run)
    gw.train(TASK, resume=run, callbacks=[])
    assert steps_of(run) == 3
    ours, theirs = run_artifacts(run), run_artifacts(whole)
    last = "checkpoints/step-000003/model.safetensors"
    assert ours[last] == theirs[last]


@pytest.mark.parametrize("hook", ["on_run_start", "before_rollout", "after_evaluation", "after_checkpoint"])
def test_a_callback_that_raises_is_named_and_leaves_a_checkpoint(tmp_path, hook):
    def fail(run: gw.RunControl, *given: Any) -> None:
        if hook == "on_run_start" or run.step == 2:
            raise ZeroDivisionError("no luck")

    broken = type("Broken", (gw.Callback,), {hook: staticmethod(fail)})()
    with pytest.raises(gw.CallbackError) as caught:
        train(tmp_path, broken, steps=4)
    sentence = str(caught.value)
    step = 0 if hook == "on_run_start" else 2
    assert sentence.startswith(f"callback Broken ({__file__}, line ")
    assert (
        f"failed in {hook} at step {step}: ZeroDivisionError: no luck; groupwise.train(task, resume="
        in sentence
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    run = tmp_path / "run"
    assert step == 0 or (run / "checkpoints" / f"step-{step:06d}").is_dir()
    assert step == 0 or steps_of(run) == step
    gw.train(TASK, resume=run, callbacks=())
    assert steps_of(run) == 4


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (3, "callback int has no hook; it must define one of on_run_start,"),
        (
            type("Typo", (), {"after_updates": lambda self, run, metrics: None})(),
            "callback Typo: there is no hook 'after_updates'; did you mean 'after_update'?",
        ),
    ],
)
def test_a_callback_that_could_never_be_called_is_refused(tmp_path, callback, sentence):
    with pytest.raises(gw.ConfigError, match=None) as caught:
        train(tmp_path, callback)
    assert sentence in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_any_object_with_a_hook_is_a_callback():
    class Duck:
        def after_update(self, run: gw.RunControl, metrics: Any) -> None:
            run.stop(str(metrics["reward/mean"]))

    control = RunControl(read_config(), Path("run"))
    callbacks = Callbacks([Duck()], control)
    callbacks.call("before_rollout", 1)
    assert not callbacks.stopping
    callbacks.call("after_update", 1, {"reward/mean": 0.5})
    assert (callbacks.stopping, control.stop_reason) == (True, "0.5")


STOPPER = """
import groupwise as gw

class Once(gw.Callback):
    def after_update(self, run, metrics):
        run.stop("once")
"""


def test_a_callback_is_named_in_the_settings(tmp_path):
    (tmp_path / "stopper.py").write_text(STOPPER)
    task = task_file(tmp_path, LUCK)
    place = (f"run.output_dir={tmp_path}", "run.name=run", f"run.callbacks={tmp_path}/stopper.py:Once")
    ended = run_command("train", str(task), *SMALL, *place)
    assert (ended.code, ended.err) == (0, "")
    assert "a callback stopped the run: once" in ended.out
    assert steps_of(tmp_path / "run") == 1
    ended = run_command("train", "--resume", str(tmp_path / "run"), "run.callbacks=[]")
    assert ended.code == 0
    assert steps_of(tmp_path / "run") == 4
    ended = run_command("train", str(task), *SMALL, f"run.callbacks={tmp_path}/stopper.py:Twice")
    assert f"run.callbacks: {tmp_path}/stopper.py has no callback 'Twice'" in ended.err


def two_processes(folder: str) -> list[int]:
    """Train as one of two; return the steps at which this process's callback was called."""
    from groupwise.tasks import UserFunctions
    from groupwise.training import train as run_training

    class Stop(gw.Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def after_update(self, run: gw.RunControl, metrics: Any) -> None:
            self.steps.append(run.step)
            if run.step == 2:
                raise gw.StopTraining

    stop = Stop()
    run_training(small_config(Path(folder)), functions=UserFunctions(callbacks=(stop,)))
    return stop.steps


def test_of_several_processes_the_leader_calls_and_all_stop(tmp_path):
    task_file(tmp_path, LUCK)
    assert in_processes(2, two_processes, str(tmp_path)) == [[1, 2], []]
    state = json.loads((tmp_path / "run" / "training_stats.json").read_text())
    assert state["steps"] == 2
