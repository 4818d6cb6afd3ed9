"""What `import groupwise as gw` offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise.config import read_config
from groupwise.config.algorithm import AlgoConfig
from groupwise.tracking.rollout_files import read_rollouts
from tests.support.small_runs import LUCK, run_artifacts, run_command, task_file


def lucky(rollout: gw.Rollout, example: gw.Example) -> float:
    return sum(map(ord, rollout.text)) % 3 / 2


TASK = gw.Task(
    name="lucky",
    examples=[{"n": n} for n in range(9)],
    prompt=lambda row: f"{row['n']}?",
    rewards={"lucky": lucky},
)
SMALL: dict[str, Any] = {
    "max_tokens": 5,
    "batch_size": 2,
    "group_size": 3,
    "no_trackio": True,
    "skip_evaluation": True,
    "model": {"device": "cpu"},
}


@pytest.mark.parametrize("start", [gw.train, gw.evolve], ids=["train", "evolve"])
def test_the_built_in_model_trains_on_its_own_puzzles_from_python_too(start, tmp_path):
    settings = {**SMALL, "max_steps": 1, "output_dir": tmp_path, "run_name": "a"}
    if start is gw.evolve:
        settings |= {"lora": {"r": 2}, "evolve": {"population": 2, "every": 1}, "skip_evaluation": False}
        settings |= {"task.held_out": 4, "evaluate": {"samples": 2}}
    result = start("countdown", **settings)
    numbers = [row["example"]["numbers"] for row in result.rollouts().to_dict("records")]
    assert numbers
    assert all(len(row) == 3 and max(row) <= 50 for row in numbers)


def test_the_source_runs_without_an_installation(tmp_path):
    """A copy on the path of a Python without site packages has no metadata."""
    source = Path(gw.__file__).parents[1]
    program = (
        f"import sys; sys.path.insert(0, {str(source)!r}); import groupwise; print(groupwise.__version__)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "0+source", done.stderr


def test_every_public_name_exists():
    assert [name for name in gw.__all__ if not hasattr(gw, name)] == []


def test_importing_the_package_does_not_import_torch():
    code = "import groupwise, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_goes_on_from_python_with_its_own_settings(tmp_path):
    whole = gw.train(TASK, max_steps=4, output_dir=tmp_path, run_name="whole", run={"save_every": 2}, **SMALL)
    run = gw.train(TASK, max_steps=2, output_dir=tmp_path, run_name="part", run={"save_every": 2}, **SMALL)
    assert gw.train(TASK, resume=run, max_steps=4) == run
    assert run_artifacts(run) == run_artifacts(whole)
    assert read_config(run / "config.yaml").rollout.max_tokens == 5


def test_a_task_learns_from_the_data_that_is_given_beside_it(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(f'{{"n": {n}}}' for n in range(100, 110)))
    settings = SMALL | {"data": str(data), "task.held_out": 2}
    run = gw.train(TASK, max_steps=1, output_dir=tmp_path, run_name="run", **settings)
    asked = {row["prompt"] for row in read_rollouts(run / "rollouts" / "step-000001.parquet")}
    assert asked <= {f"{n}?" for n in range(100, 110)}
    assert read_config(run / "config.yaml").task.held_out == 2
    data.write_text(data.read_text() + '\n{"n": 110}')
    with pytest.raises(gw.GroupwiseError, match="not those that the run began with: put them back"):
        gw.train(TASK, resume=run, max_steps=2)


def test_a_run_with_a_combination_that_is_refused_now_still_resumes(tmp_path, monkeypatch):
    settings = SMALL | {"algo": {"advantage": "gdpo", "combine": "std"}, "output_dir": tmp_path}
    with pytest.raises(gw.ConfigError, match=r"gdpo requires algo\.combine=sum"):
        gw.train(TASK, max_steps=1, run_name="new", **settings)
    with monkeypatch.context() as patch:  # as in versions that accepted it
        patch.setattr(AlgoConfig, "check_combination", lambda algo: None)
        run = gw.train(TASK, max_steps=1, run_name="old", **settings)
    assert gw.train(TASK, resume=run, max_steps=2) == run


def test_resuming_refuses_other_settings_and_folders_that_are_no_runs(tmp_path):
    run = gw.train(TASK, max_steps=1, output_dir=tmp_path, run_name="run", **SMALL)
    with pytest.raises(gw.ConfigError, match=r"these differ: optim\.epochs: 1 → 2"):
        gw.train(TASK, resume=run, optim={"epochs": 2})
    with pytest.raises(gw.ConfigError, match="there is no run folder"):
        gw.train(TASK, resume=tmp_path / "none")


def test_a_run_of_a_task_from_python_cannot_be_resumed_from_the_shell(tmp_path):
    run = gw.train(TASK, max_steps=1, output_dir=tmp_path, run_name="run", **SMALL)
    ended = run_command("train", "--resume", str(run))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "the task 'lucky' of" in ended.err
    assert "was defined in Python" in ended.err


def test_a_task_is_trained_by_its_name_or_its_file(tmp_path):
    # The file trains itself: read for its task, that line does not start another run.
    file = task_file(tmp_path, f"{LUCK}\ngw.train(__file__)\n")
    for name in ("countdown", str(file)):
        run = gw.train(name, max_steps=1, output_dir=tmp_path, **SMALL)
        assert read_config(run / "config.yaml").task.name == name
    with pytest.raises(gw.ConfigError, match="unknown task 'countdwn'"):
        gw.train("countdwn", output_dir=tmp_path, **SMALL)
    with pytest.raises(gw.ConfigError, match="members of a population are adapters"):
        gw.evolve("countdown", lora_r=0, output_dir=tmp_path, **SMALL)


@pytest.mark.parametrize("wrong", [{"max_step": 1}, {"optim": {"epoch": 2}}, {"learning_rate": "fast"}])
def test_a_wrong_setting_is_a_config_error(wrong):
    with pytest.raises(gw.ConfigError):
        gw.train(TASK, **wrong)


def test_the_old_name_of_a_tools_result_still_works_and_says_the_new_one():
    with pytest.warns(DeprecationWarning, match=r"groupwise\.Found is now groupwise\.ToolResult"):
        assert gw.Found is gw.ToolResult
