"""Containers and launch files stay in step with the project that they are made of."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupwise.commands.serve import ENVIRONMENT, NAME, server_command
from groupwise.config import read_config
from groupwise.config.schema import RunConfig
from groupwise.engine.vllm.vllm_engine import BASE, OLDEST
from groupwise.errors import ConfigError
from groupwise.parallel.processes import as_launched, layout_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def test_the_image_has_a_python_that_the_project_names() -> None:
    (version,) = re.findall(r"FROM python:(\d+\.\d+)", DOCKERFILE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_the_image_installs_extras_that_exist_under_the_projects_constraints() -> None:
    (extras,) = re.findall(r"--constraint constraints\.txt '\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    for name in re.findall(r"COPY ([\w. -]+) \S+\n", DOCKERFILE):
        assert all((ROOT / part).exists() for part in name.split())


def test_the_image_starts_the_projects_command_as_a_plain_user() -> None:
    (entry,) = re.findall(r'ENTRYPOINT \["(\w+)"\]', DOCKERFILE)
    assert entry in PROJECT["scripts"]
    assert DOCKERFILE.index("USER groupwise") < DOCKERFILE.index("ENTRYPOINT")
    assert "HEALTHCHECK" in DOCKERFILE


def test_what_the_build_copies_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {part for name in re.findall(r"COPY (.+) \S+\n", DOCKERFILE) for part in name.split()}
    assert copied == kept


def test_the_compose_file_starts_the_server_that_serve_rollouts_prints() -> None:
    server = SERVICES["server"]
    given = dict(word.split("=", 1) if "=" in word else (word, "") for word in server["command"])
    settings = {name: given[name] for name in ("--host", "--port", "--dtype", "--max-model-len")}
    settings |= {name: given[name] for name in ("--max-num-seqs", "--tensor-parallel-size")}
    words = list(server_command("python3", given["--model"], lora_r=16, settings=settings))
    assert server["entrypoint"] == words[:3]
    printed: dict[str, str] = {}
    for word, after in zip(words[3:], [*words[4:], "--"], strict=True):
        if word.startswith("--"):
            printed[word] = "" if after.startswith("--") else after
    assert given == printed
    assert ENVIRONMENT.items() <= server["environment"].items()
    assert NAME == BASE


def test_the_compose_files_server_is_one_that_training_accepts() -> None:
    (version,) = re.findall(r"vllm-openai:v(\d+)\.(\d+)", SERVICES["server"]["image"])
    assert tuple(map(int, version)) >= OLDEST
    (needed,) = PROJECT["optional-dependencies"]["vllm"]
    assert needed == f"vllm>={OLDEST[0]}.{OLDEST[1]}"


def test_the_compose_files_trainer_gives_settings_that_are_read() -> None:
    words = SERVICES["trainer"]["command"]
    config = read_config(overrides=[word for word in words if not word.startswith("--") and "=" in word])
    assert config.engine.kind == "vllm"
    assert config.engine.servers == ("http://server:8000",)


def test_services_have_health_checks_gpus_and_volumes_and_are_not_root() -> None:
    assert SERVICES["server"]["user"] == "1000:1000"
    assert SERVICES["trainer"]["depends_on"] == {"server": {"condition": "service_healthy"}}
    for name in ("server", "dashboard"):
        assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
    for name in ("server", "trainer"):
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
    mounted = {volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]}
    assert mounted == COMPOSE["volumes"].keys()


def test_docker_compose_accepts_the_file(tmp_path: Path) -> None:
    command = next((name for name in ("docker-compose",) if shutil.which(name)), None)
    if command is None:
        pytest.skip("docker-compose is not installed: the compose file is checked by hand-written rules only")
    done = subprocess.run(
        [command, "-f", str(ROOT / "compose.yaml"), "config", "-q"],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "WATCH_TOKEN": "x" * 16, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda p: p.stem
)
def test_accelerate_reads_its_files(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes % config.num_machines == 0
    assert f"configs/accelerate/{path.name} " in path.read_text()


def test_what_accelerate_was_told_decides_unless_the_run_says_otherwise(monkeypatch: Any) -> None:
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    assert layout_of(RunConfig()) == "ddp"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert layout_of(RunConfig()) == "fsdp"
    assert layout_of(RunConfig(parallel="ddp")) == "ddp"


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"ZERO_STAGE": "0"}, "zero_stage must be 1, 2 or 3; got 0"),
        ({"CONFIG_FILE": "zero.json"}, "deepspeed_config_file is not supported"),
        ({"OFFLOAD_PARAM_DEVICE": "cpu"}, "offload_param_device must be none"),
        ({"OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "offload_optimizer_device must be none or cpu; got nvme"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "".join(value),
)
def test_what_accelerate_says_of_deepspeed_is_done_or_refused(
    said: dict[str, str], refused: str, monkeypatch: Any
) -> None:
    config = read_config(overrides=[])
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    assert layout_of(config.run) == "zero3"
    assert as_launched(config).optim.offload
    own = read_config(overrides=["run.parallel=zero1"])
    assert layout_of(own.run) == "zero1"
    assert as_launched(own) == own
    for name, value in said.items():
        monkeypatch.setenv(f"ACCELERATE_DEEPSPEED_{name}", value)
    with pytest.raises(ConfigError, match=refused):
        as_launched(config)


def test_the_deepspeed_file_of_the_agilerl_tutorial_is_accepted(monkeypatch: Any) -> None:
    """It asks for stage 2 with parameters on the CPU, which DeepSpeed ignores below stage 3."""
    for name, value in {
        "USE_DEEPSPEED": "true",
        "DEEPSPEED_ZERO_STAGE": "2",
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "DEEPSPEED_ZERO3_INIT": "false",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    config = read_config(overrides=[])
    assert layout_of(config.run) == "zero2"
    assert as_launched(config).optim.offload
