"""The examples of docs/extending.md run as the page shows them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise.config import read_config
from groupwise.engine.engine import Engine
from tests.support.small_runs import run_command

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
SMALL = (
    *(
        "run.max_steps=2",
        "rollout.prompts=2",
        "rollout.group_size=8",
        "rollout.max_tokens=64",
        "model.device=cpu",
    ),
    *("task.held_out=2", "evaluate.samples=1", "evaluate.every=1", "track.trackers=[]", "track.report=false"),
    *("run.output_dir=runs", "run.name=run"),
)


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the example, as the user's working folder."""
    shutil.copy(ROOT / "examples" / request.param, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / str(request.param)


@pytest.mark.parametrize("name", ["own_loss.py", "own_advantage.py", "stop_at_target.py"])
def test_the_page_shows_the_example_as_it_is_in_at_most_25_lines(name):
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert f"`examples/{name}`:\n\n```python\n{text}```" in PAGE
    assert len(text.splitlines()) <= 25


@pytest.mark.parametrize(
    ("example", "setting", "proof"),
    [
        ("own_loss.py", "algo.loss=own_loss.py:surprise", '"policy/surprise": '),
        ("own_advantage.py", "algo.advantage=own_advantage.py:above_median", '"policy/loss": '),
        ("stop_at_target.py", "run.callbacks=stop_at_target.py:StopAtTarget", '"step": 2'),
    ],
    indirect=["example"],
)
def test_the_example_runs_from_the_shell_as_the_page_shows(example, setting, proof):
    if example.stem != "own_advantage":
        assert f"groupwise train countdown {setting}\n" in PAGE
    ended = run_command("train", "countdown", setting, *SMALL)
    assert (ended.code, ended.err) == (0, "")
    assert proof in Path("runs/run/metrics.jsonl").read_text()


PACKAGES = {"gym_mix.py": "reasoning_gym", "mcp_calculator.py": "mcp", "verifiers_sums.py": "verifiers.v1"}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("example", PACKAGES, indirect=True)
def test_a_task_of_another_package_is_one_file_of_25_lines(example):
    text = example.read_text(encoding="utf-8")
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    assert f"`examples/{example.name}`:\n\n```python\n{text}```" in page
    assert len(text.splitlines()) <= 25
    package = PACKAGES[example.name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    ended = run_command("train", example.name, *SMALL, "run.max_steps=1", "tools.max_tokens=128")
    assert ended.code == 0, ended.err
    assert '"reward/' in Path("runs/run/metrics.jsonl").read_text()


SETTINGS: dict[str, Any] = {
    "batch_size": 2,
    "group_size": 4,
    "max_tokens": 8,
    "no_trackio": True,
    "model": {"device": "cpu"},
    "task.held_out": 2,
    "evaluate": {"samples": 1, "every": 1},
    "track": {"report": False},
}


def test_a_target_that_is_reached_stops_the_run(tmp_path, capfd, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from stop_at_target import StopAtTarget  # type: ignore[import-not-found]

    result = gw.train("countdown", callbacks=[StopAtTarget(0.0)], output_dir=tmp_path, **SETTINGS)
    assert result.steps == 0
    assert "a callback stopped the run: accuracy " in capfd.readouterr().out


class Counting(Engine):
    """The built-in engine, which counts what it is asked."""

    asked = 0

    def generate(self, requests: Any, sampling: Any) -> Any:
        Counting.asked += len(requests)
        return super().generate(requests, sampling)


def test_an_engine_of_the_user_generates(tmp_path):
    settings = {**SETTINGS, "skip_evaluation": True, "rollout": {"refill": 0}}
    result = gw.train("countdown", engine=Counting, max_steps=1, output_dir=tmp_path, **settings)
    assert Counting.asked == 2
    assert read_config(result / "config.yaml").engine.kind == "tests.test_extending:Counting"
    with pytest.raises(
        gw.ConfigError, match=r"returned object, which has no generate, ready, make_room, rel"
    ):
        gw.train("countdown", engine=lambda policy, settings: object(), output_dir=tmp_path, **settings)


PARTS = r"""
import groupwise as gw
from groupwise.engine.engine import Engine

def plain(tokens: gw.Tokens, settings: gw.LossSettings):
    ratio = (tokens.logprobs_N - tokens.old_N).exp()
    return -ratio * tokens.advantages_N, {"policy/own": ratio.detach().sum()}

class Noting(Engine):
    def generate(self, requests, sampling):
        with open("asked", "a") as file:
            file.write(f"{len(requests)}\n")
        return super().generate(requests, sampling)
"""
LOSS, ENGINE = "own.parts:plain", "own.parts:Noting"
YAML = f"""
algo:
  loss: {LOSS}
engine:
  kind: {ENGINE}
"""


@pytest.mark.parametrize(
    "words",
    [
        ("--loss", "own/parts.py:plain", "engine.kind=own/parts.py:Noting"),
        ("--loss", LOSS, f"engine.kind={ENGINE}"),
        (f"algo.loss={LOSS}", f"engine.kind={ENGINE}"),
        ("--config", "settings.yaml"),
    ],
    ids=["files", "flag", "settings", "yaml"],
)
def test_a_loss_and_an_engine_are_named_by_module_and_by_file_on_the_command_line_and_in_yaml(
    words, tmp_path, monkeypatch
):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").touch()
    (tmp_path / "own" / "parts.py").write_text(PARTS)
    (tmp_path / "settings.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    ended = run_command("train", "countdown", *words, *SMALL)
    assert ended.code == 0, ended.err
    assert len(Path("asked").read_text().splitlines()) >= 2
    (first, second) = Path("runs/run/metrics.jsonl").read_text().splitlines()
    assert '"policy/own"' in first
    assert '"policy/own"' in second
    config = read_config(Path("runs/run/config.yaml"))
    named = {config.algo.loss, config.engine.kind}
    by_file = {"own/parts.py:plain", "own/parts.py:Noting"}
    assert named == (by_file if "own/parts.py:plain" in words else {LOSS, ENGINE})
