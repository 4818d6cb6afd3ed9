"""What `gw.train` returns, also in a notebook: inside an event loop, interrupted, resumed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import groupwise as gw
from groupwise import cli
from groupwise.model import load
from groupwise.tracking.terminal import NotebookDisplay, open_display


async def lucky(rollout: gw.Rollout, example: gw.Example) -> float:
    await asyncio.sleep(0)
    return sum(map(ord, rollout.text)) % 3 / 2


TASK = gw.Task(
    name="lucky",
    examples=[{"n": n} for n in range(12)],
    prompt=lambda row: f"{row['n']}?",
    rewards={"lucky": lucky},
)
SMALL: dict[str, Any] = {
    "max_tokens": 5,
    "batch_size": 2,
    "group_size": 3,
    "temperature": 1.5,
    "no_trackio": True,
    "model": {"device": "cpu"},
    "track": {"report": False},
    "task.held_out": 2,
    "evaluate": {"every": 0, "samples": 2},
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> gw.RunResult:
    """A run of two steps, made inside a running event loop as a notebook's cell is."""
    folder = tmp_path_factory.mktemp("result")

    async def cell() -> gw.RunResult:
        return gw.train(TASK, max_steps=2, output_dir=folder, run_name="run", **SMALL)

    return asyncio.run(cell())


def test_the_result_has_the_metrics_evaluations_and_rollouts_as_tables(result):
    assert list(result.metrics.index) == [1, 2]
    assert result.metrics["reward/mean"].between(0, 1).all()
    evaluations = result.evaluations
    assert set(evaluations["score"]) == {"greedy", "avg@2", "pass@2"}
    assert list(evaluations[evaluations["score"] == "greedy"]["step"]) == [0, 2]
    assert (evaluations["low"] <= evaluations["mean"]).all()
    assert (evaluations["mean"] <= evaluations["high"]).all()
    assert len(result.rollouts(2)) >= 6
    assert set(result.rollouts()["step"]) == {1, 2}
    with pytest.raises(gw.ConfigError, match="has no rollouts of step 9"):
        result.rollouts(9)
    assert (result.steps, result.finished, result.stats["steps"]) == (2, True, 2)


def test_the_policy_of_the_result_answers_text_with_text(result):
    answer = result.generate("1?")
    assert isinstance(answer, str)
    assert result.generate(["1?", "2?"])[0] == answer
    assert result.generate([{"role": "user", "content": "1?"}]) is not None
    drawn = result.generate(["1?", "2?"], samples=3, temperature=1.5, seed=1)
    assert [len(group) for group in drawn] == [3, 3]
    assert result.generate(["1?", "2?"], samples=3, temperature=1.5, seed=1) == drawn
    assert len(result.policy.encode_text(result.generate("1?", max_tokens=1), special=False)) <= 1


def test_the_policy_is_loaded_on_the_device_of_the_run_also_with_a_sampling_rule(
    result, tmp_path, monkeypatch
):
    folder = shutil.copytree(result.folder, tmp_path / "run")
    settings = (folder / "config.yaml").read_text()
    settings = settings.replace("device: cpu", "device: cuda:1")
    settings = settings.replace("logits_processor: null", "logits_processor: rule.py:rule")
    (folder / "config.yaml").write_text(settings)
    devices: list[str | None] = []
    monkeypatch.setattr(load, "load_for_generation", lambda model, **_: devices.append(model.device))
    assert gw.RunResult(folder).policy is None
    assert devices == ["cuda:1"]


def test_the_result_stands_for_its_folder(result):
    assert os.fspath(result) == str(result) == str(result.folder)
    assert Path(result) == result.folder
    assert result == result.folder
    assert (result / "config.yaml").is_file()
    assert result.name == "run"
    assert gw.RunResult(result) == result
    with pytest.raises(AttributeError, match="no_such_thing"):
        result.no_such_thing  # noqa: B018
    with pytest.raises(gw.ConfigError, match="there is no run folder"):
        gw.RunResult("nowhere")


def test_the_result_is_short_to_read(result):
    assert repr(result).startswith(f"RunResult('{result.folder}': 2 of 2 steps · lucky · tiny; greedy ")
    shown = result._repr_html_()
    assert "<th>held-out</th>" in shown
    assert "Resume" not in shown


def test_a_run_is_resumed_by_its_result_without_naming_its_task_again(tmp_path):
    first = gw.train("countdown", max_steps=1, output_dir=tmp_path, run_name="run", skip_evaluation=True, **{
        key: value for key, value in SMALL.items() if key != "task.held_out"})  # fmt: skip
    again = gw.train(resume=first, max_steps=2)
    assert (again, again.steps) == (first, 2)


def test_a_task_from_python_must_be_given_again(result):
    with pytest.raises(
        gw.ConfigError, match=r"the task 'lucky' of .* was defined in Python: give it to train"
    ):
        gw.train(resume=result, max_steps=3)


def test_an_interrupted_cell_leaves_a_checkpoint_and_says_how_to_resume(tmp_path, capfd):
    class Interrupt(gw.Callback):
        def after_score(self, run: gw.RunControl, groups: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    settings = {**SMALL, "skip_evaluation": True}
    with pytest.raises(KeyboardInterrupt):
        gw.train(TASK, callbacks=[Interrupt()], max_steps=3, output_dir=tmp_path, run_name="run", **settings)
    run = gw.RunResult(tmp_path / "run")
    assert f"groupwise.train(task, resume='{run}')" in capfd.readouterr().out
    assert (run.steps, run.finished) == (1, False)
    assert f"gw.train(task, resume=&#x27;{run}&#x27;)" in run._repr_html_()
    assert gw.train(TASK, resume=run, callbacks=[]).finished


class Handle:
    """What IPython's display returns."""

    def __init__(self, shown: list[str]) -> None:
        self.shown = shown

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.shown.append(bundle["text/plain"])


def test_a_notebook_shows_one_panel_that_changes(monkeypatch, capsys):
    shown: list[str] = []

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert bundle["text/html"].startswith("<pre>")
        shown.append(bundle["text/plain"])
        return Handle(shown)

    ipython, shows = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    shows.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shows)
    panel = open_display()
    assert isinstance(panel, NotebookDisplay)
    panel.start(3, "lucky · tiny")
    panel.update(1, {"reward/mean": 0.25, "reward/std": 0.1})
    panel.message("a message")
    panel.close()
    panel.update(2, {"reward/mean": 0.5})
    assert len(shown) == 2
    assert "step 1/3" in shown[1]
    assert "0.250 ± 0.100" in shown[1]
    assert capsys.readouterr().out == "a message\n"


def test_a_run_that_was_trained_in_fp8_generates_as_it_is_saved_on_any_machine(result, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(result.folder, run)
    config = run / "config.yaml"
    settings = config.read_text()
    for setting in ("quantization", "kv_cache_dtype"):
        settings = re.sub(rf"(engine:(?:\n .*)*?\n  {setting}: )null", r"\1fp8", settings)
    config.write_text(settings)
    assert gw.RunResult(run).config.engine.fp8 == ("engine.quantization=fp8", "engine.kv_cache_dtype=fp8")
    assert gw.RunResult(run).generate("1?", max_tokens=2)
    chat = ["chat", str(run), "--prompt", "1?", "--max-tokens", "2", "--strategy", "best-of:2"]
    assert cli.main([*chat, "model.device=cpu"]) == 0
    evaluate = [
        "eval",
        str(run),
        "--task",
        "countdown",
        "--examples",
        "2",
        "--samples",
        "1",
        "model.device=cpu",
    ]
    assert cli.main(evaluate) == 0
    capsys.readouterr()
    assert cli.main([*evaluate, "engine.quantization=fp8"]) == 2
    assert "FP8 requires Triton and an NVIDIA GPU" in capsys.readouterr().err
