"""Environments that an OpenEnv server hosts, for `Task(environment=…)`.

    make = gw.openenv("http://localhost:8000", action="message")
    task = gw.Task(name="echo", examples=[{"seed": n} for n in range(100)], environment=make)

Each rollout has a session of its own. The columns `seed` and `reset` (a dict) go to the server's reset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from groupwise.errors import ConfigError
from groupwise.records import Example
from groupwise.rollout.environment import EnvironmentFactory, Reply

TEXT_FIELDS = ("prompt", "text", "message", "observation", "output", "result")
HIDDEN_FIELDS = ("done", "reward", "metadata")
"""Fields of every observation that are not shown to the policy."""


def openenv(
    url: str,
    *,
    action: str | Callable[[str], Mapping[str, Any]] = "message",
    observe: Callable[[Mapping[str, Any]], str] | None = None,
    seconds: float = 60.0,
) -> EnvironmentFactory:
    """Return a factory of sessions with an OpenEnv server.

    action: the field of an action that holds the policy's text, or a function that makes an action of it
    observe: returns an observation as text; by default its only text field, else all of it as JSON
    seconds: how long to wait for an answer
    """
    try:
        import openenv.core  # noqa: F401
    except ImportError:
        raise ConfigError("OpenEnv servers require: pip install 'groupwise[openenv]'") from None
    return partial(OpenEnvSession, url, action, observe or shown, seconds)


class OpenEnvSession:
    """One episode on the server."""

    def __init__(
        self,
        url: str,
        action: str | Callable[[str], Mapping[str, Any]],
        observe: Callable[[Mapping[str, Any]], str],
        seconds: float,
    ) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self.client: Any = GenericEnvClient(base_url=url, message_timeout_s=seconds)
        self.action, self.observe = action, observe

    async def reset(self, example: Example) -> str:
        await self.client.connect()
        seed = {"seed": example["seed"]} if "seed" in example else {}
        result = await self.client.reset(**seed, **example.get("reset", {}))
        return self.observe(result.observation)

    async def reply(self, text: str) -> Reply:
        action = {self.action: text} if isinstance(self.action, str) else dict(self.action(text))
        result = await self.client.step(action)
        text = self.observe(result.observation)
        return Reply(text, reward=float(result.reward or 0.0), done=bool(result.done))

    async def close(self) -> None:
        await self.client.close()


def shown(observation: Mapping[str, Any]) -> str:
    """Return an observation as text."""
    fields = {name: value for name, value in observation.items() if name not in HIDDEN_FIELDS}
    texts = [fields[name] for name in TEXT_FIELDS if isinstance(fields.get(name), str)]
    if len(fields) == 1 and all(isinstance(value, str) for value in fields.values()):
        texts = list(fields.values())
    return texts[0] if texts else json.dumps(fields, ensure_ascii=False, default=str)
