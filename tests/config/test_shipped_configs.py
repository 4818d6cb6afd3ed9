"""The settings in `configs/` are read strictly, so that a renamed setting cannot rot there."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.config import read_config
from groupwise.tasks import TASKS

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_ready_configuration_is_read_and_says_how_to_run_it(path):
    config = read_config(path).resolve()
    assert config.task.name in TASKS
    TASKS[config.task.name](**config.task.options)
    assert path.read_text().splitlines()[0].endswith(f"groupwise train --config configs/{path.name}")


def test_there_is_one_for_every_preset():
    names = {"cpu", "debug", "full", "gpu_optimized", "medium", "quick"}
    tasks = {"math", "math-test", *(f"gsm8k-{name}" for name in names)}
    assert {path.stem for path in CONFIGS} == tasks | {"gpu-24gb", "gpu-80gb", "gpus-8"}
