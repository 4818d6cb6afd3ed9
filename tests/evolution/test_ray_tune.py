"""Runs as trials of Ray Tune, on a Ray that the test starts and stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray import tune  # noqa: E402

from groupwise.config import read_config  # noqa: E402
from groupwise.errors import ConfigError  # noqa: E402
from groupwise.evolution.ray_tune import trainable  # noqa: E402
from tests.support.small_runs import task_file  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "model": {"device": "cpu"},
    "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 6, "temperature": 1.5},
    "lora": {"r": 4},
    "max_steps": 4,
    "skip_evaluation": True,
    "track": {"trackers": (), "report": False},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def luck(folder: Path) -> str:
    return str(task_file(folder))


def test_every_trial_is_a_run_with_its_own_folder_and_values(cluster, tmp_path):
    tuner = tune.Tuner(
        trainable(luck(tmp_path), output_dir=tmp_path / "runs", **SETTINGS),
        param_space={"optim.learning_rate": tune.grid_search([1e-4, 1e-3])},
        tune_config=tune.TuneConfig(metric="reward", mode="max"),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    rates = set()
    for result in results:
        assert result.metrics["step"] == 4
        run = Path(result.metrics["run"])
        config = read_config(run / "config.yaml")
        assert config.optim.learning_rate == result.config["optim.learning_rate"]
        assert (run / "checkpoints" / "step-000004" / "adapter_model.safetensors").is_file()
        rates.add(config.optim.learning_rate)
    assert rates == {1e-4, 1e-3}
    assert len(list((tmp_path / "runs").iterdir())) == 2


def adapter_in(folder: Path) -> bytes:
    (file,) = folder.rglob("adapter_model.safetensors")
    return file.read_bytes()


def test_a_trial_goes_on_from_anothers_checkpoint_with_its_own_values(tmp_path):
    kinds = [trainable(luck(tmp_path), output_dir=tmp_path / name, **SETTINGS) for name in ("one", "two")]
    teacher = kinds[0](config={"optim.learning_rate": 1e-3})
    for _ in range(2):
        teacher.train()
    saved = tmp_path / "saved"
    saved.mkdir()
    teacher.save_checkpoint(str(saved))
    pupil = kinds[1](config={"optim.learning_rate": 1e-4})
    fresh, taken = tmp_path / "fresh", tmp_path / "taken"
    for folder in (fresh, taken):
        folder.mkdir()
    pupil.save_checkpoint(str(fresh))
    pupil.load_checkpoint(str(saved))
    pupil.save_checkpoint(str(taken))
    assert adapter_in(taken) == adapter_in(saved) != adapter_in(fresh)
    result = pupil.train()
    assert result["step"] == 3
    last = (Path(result["run"]) / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["optim/learning_rate"] == 1e-4
    teacher.stop()
    pupil.stop()


def test_a_parameter_that_is_unknown_is_refused(tmp_path):
    kind = trainable(luck(tmp_path), output_dir=tmp_path, **SETTINGS)
    with pytest.raises(ConfigError, match=r"unknown parameter 'optim\.learning_rat'; use one of"):
        kind(config={"optim.learning_rat": 1e-3})
