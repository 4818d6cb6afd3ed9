"""An OpenEnv server with sessions for many rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import groupwise as gw
from groupwise.config.schema import ToolsConfig
from groupwise.records import Example, Sampling
from groupwise.rollout.collect import collect
from groupwise.tasks import isolated
from tests.support.scripted_rollouts import ScriptedEngine, ToolCodec
from tests.support.serving import script_server

pytest.importorskip("openenv.core", reason="openenv is not installed")

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    message: str

class Heard(Observation):
    text: str

class Count(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.left = seed
        return Heard(text=f"Say {seed} words.")

    def step(self, action, timeout_s=None, **more):
        if action.message == "oops":
            raise ValueError("no such word")
        self.left -= 1
        return Heard(text=f"{self.left} left", reward=0.5, done=self.left == 0)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Count, Said, Heard, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    script: Path = tmp_path_factory.mktemp("openenv") / "server.py"
    script.write_text(SERVER)
    with script_server(script) as (port, _):
        yield f"http://127.0.0.1:{port}"


def played(url: str, *lines: str):
    task = gw.Task(name="count", examples=[{"seed": 2}], environment=gw.openenv(url))
    with isolated(task) as task:
        (group,) = collect(
            [Example({"seed": 2})],
            ask=task.ask,
            codec=ToolCodec(),
            engine=ScriptedEngine(*lines),
            sampling=Sampling(max_tokens=20),
            group_size=3,
            seed_parts=(0,),
            tools=task.multi_turn(ToolsConfig()),
        )
    return group.rollouts


def test_each_rollout_has_a_session_of_its_own(url):
    for rollout in played(url, "one", "two"):
        assert rollout.error is None
        assert rollout.prompt == "Say 2 words."
        assert [(turn.observation, turn.reward) for turn in rollout.turns] == [
            ("1 left", 0.5),
            ("0 left", 0.5),
        ]


def test_an_error_of_the_server_fails_the_rollout(url):
    assert all("environment: reply" in str(rollout.error) for rollout in played(url, "oops"))
