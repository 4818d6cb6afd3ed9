"""Games of TextArena, text environments of Gymnasium and OpenEnv servers, for `Task(environment=…)`.

    games = [{"seed": n} for n in range(1000)]
    task = gw.Task(name="guess", examples=games, environment=gw.textarena("GuessTheNumber-v0"))
    task = gw.Task(name="lake", examples=games, environment=gw.gymnasium("FrozenLake-v1", render_mode="ansi"))
    task = gw.Task(name="code", examples=games, environment=gw.openenv("http://localhost:8000"))

The column `seed` of an example is the seed of its game. Each rollout has a session of its own on an OpenEnv
server, whose reset also gets the column `reset`, a dict.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from groupwise.errors import ConfigError, requires
from groupwise.records import Example
from groupwise.rollout.environment import EnvironmentFactory, Reply

RAW = "-raw"
"""Suffix of a TextArena game without wrappers: each observation holds only what is new."""
MAX_MOVES = 1000
"""Moves of other players in a row after which a game has no end."""

WHOLE_NUMBER = re.compile(r"(?<!\w)-\d+|\d+", re.ASCII)
"""A hyphen after a letter or digit is no sign: 5-3 are 5 and 3."""

Opponent = Callable[[str], str]


def textarena(
    name: str, *, players: int = 1, opponent: Opponent | None = None, **settings: Any
) -> EnvironmentFactory:
    """Return a factory of TextArena games that the policy plays as player 0.

    players: number of players; the others play as `opponent`
    opponent: returns a move for the text that another player has observed so far
    settings: keyword arguments of the game
    """
    if players > 1 and opponent is None:
        raise ConfigError(
            f"{name} with {players} players requires opponent=…, a function from text to a move"
        )
    with requires("textarena", "TextArena games"):
        import textarena as library
    raw = name.removesuffix(RAW) + RAW
    if raw not in library.envs.registration.ENV_REGISTRY:
        raise ConfigError(f"TextArena has no game {name!r}")
    return partial(TextArenaGame, partial(library.make, raw, **settings), players, opponent)


class TextArenaGame:
    """One game. The reward is what the game gives player 0 at its end."""

    def __init__(self, make: Callable[[], Any], players: int, opponent: Opponent | None) -> None:
        self.make, self.players, self.opponent = make, players, opponent
        self.randomness = random.getstate()

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Give the game a state of the module `random` of its own: many games run in one process."""
        outer = random.getstate()
        random.setstate(self.randomness)
        try:
            yield
        finally:
            self.randomness = random.getstate()
            random.setstate(outer)

    def reset(self, example: Example) -> str:
        with self.own_randomness():
            random.seed(example["seed"])
            self.game = self.make()
            self.game.reset(num_players=self.players, seed=example["seed"])
            self.seen: dict[int, list[str]] = {}
            return self.until_our_turn() or ""

    def reply(self, text: str) -> Reply:
        with self.own_randomness():
            done, _ = self.game.step(action=text)
            observed = None if done else self.until_our_turn()
            if observed is not None:
                return Reply(observed)
            rewards, info = self.game.close()
        reason = (info or {}).get(0, {}).get("reason", "")
        return Reply(str(reason), reward=float((rewards or {}).get(0, 0.0)), done=True)

    def until_our_turn(self) -> str | None:
        """Let the others play; return what player 0 observes, or None if the game has ended."""
        for _ in range(MAX_MOVES):
            player, observations = self.game.get_observation()
            new = [message for sender, message, *_ in observations if sender != player]
            self.seen.setdefault(player, []).extend(new)
            if player == 0:
                return "\n".join(new).strip()
            assert self.opponent is not None
            if self.game.step(action=self.opponent("\n".join(self.seen[player])))[0]:
                return None
        raise RuntimeError(f"player 0 did not get a turn in {MAX_MOVES} moves")


def gymnasium(
    name: str,
    *,
    act: Callable[[str], Any] | None = None,
    observe: Callable[[Any], str] | None = None,
    **settings: Any,
) -> EnvironmentFactory:
    """Return a factory of Gymnasium environments that are played with text.

    act: returns the action that a text means, or raises ValueError; by default the last whole numbers in the
        text, as many as an action has, or the text itself in an environment whose actions are texts
    observe: returns an observation as text; by default the rendered one with `render_mode="ansi"`, else `str`
    settings: keyword arguments of the environment
    """
    with requires("gym", "Gymnasium environments"):
        import gymnasium as library
    try:
        env = library.make(name, **settings)
    except library.error.Error as error:
        raise ConfigError(f"Gymnasium cannot make {name!r}: {error}") from error
    env.close()
    if act is None and not isinstance(env.action_space, library.spaces.Text):
        act = NumbersAction(*bounds_of(name, env.action_space))
    return partial(GymnasiumGame, partial(library.make, name, **settings), act or str.strip, observe)


def bounds_of(name: str, space: Any) -> tuple[Any, Any]:
    """Return the least and the greatest value of each number of an action."""
    import numpy as np
    from gymnasium import spaces

    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, int), np.ones(space.shape, int)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        return np.asarray(space.start), np.asarray(space.start + count - 1)
    raise ConfigError(f"{name} has actions of {space}; give act=…, a function from text to an action")


class NumbersAction:
    """Reads the last whole numbers of a text as an action."""

    def __init__(self, low: Any, high: Any) -> None:
        self.low, self.high = low, high
        ranges = [f"from {a} to {b}" for a, b in zip(low.flat, high.flat, strict=True)]
        wanted = f"a number {ranges[0]}" if low.ndim == 0 else f"{low.size} numbers: {', '.join(ranges)}"
        self.explanation = f"Answer with {wanted}."

    def __call__(self, text: str) -> Any:
        import numpy as np

        numbers = [int(digits) for digits in WHOLE_NUMBER.findall(text)[-self.low.size :]]
        bounds = zip(self.low.flat, numbers, self.high.flat, strict=False)
        if len(numbers) < self.low.size or not all(low <= one <= high for low, one, high in bounds):
            raise ValueError(self.explanation)
        return np.array(numbers, self.low.dtype).reshape(self.low.shape) if self.low.ndim else numbers[0]


class GymnasiumGame:
    """One episode of a Gymnasium environment."""

    def __init__(
        self, make: Callable[[], Any], act: Callable[[str], Any], observe: Callable[[Any], str] | None
    ) -> None:
        self.env = make()
        self.act, self.observe = act, observe or self.shown

    def reset(self, example: Example) -> str:
        observation, _ = self.env.reset(seed=example["seed"])
        return self.observe(observation)

    def reply(self, text: str) -> Reply:
        try:
            action = self.act(text)
        except ValueError as error:
            return Reply(str(error))
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return Reply(self.observe(observation), reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        self.env.close()

    def shown(self, observation: Any) -> str:
        return str(self.env.render() if self.env.render_mode == "ansi" else observation)


TEXT_FIELDS = ("prompt", "text", "message", "observation", "output", "result")
HIDDEN_FIELDS = ("done", "reward", "metadata")
"""Fields of every observation that are not shown to the policy."""


def openenv(
    url: str,
    *,
    action: str | Callable[[str], Mapping[str, Any]] = "message",
    observe: Callable[[Mapping[str, Any]], str] | None = None,
) -> EnvironmentFactory:
    """Return a factory of sessions with an OpenEnv server. `tools.seconds` limits how long it may take.

    action: the field of an action that holds the policy's text, or a function that makes an action of it
    observe: returns an observation as text; by default its only text field, else all of it as JSON
    """
    with requires("openenv", "OpenEnv servers"):
        import openenv.core  # noqa: F401
    return partial(OpenEnvSession, url, action, observe or shown)


class OpenEnvSession:
    """One episode on the server."""

    def __init__(
        self,
        url: str,
        action: str | Callable[[str], Mapping[str, Any]],
        observe: Callable[[Mapping[str, Any]], str],
    ) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self.client: Any = GenericEnvClient(base_url=url, message_timeout_s=None)
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
