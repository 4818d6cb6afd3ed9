"""Environments: text that replies to each turn, token-exact, one for each rollout, isolated and bounded."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

import groupwise as gw
from groupwise.config.schema import ToolsConfig
from groupwise.errors import ConfigError, RolloutError
from groupwise.model.tokenizer import between_turns, render
from groupwise.records import Completion, Example, Sampling
from groupwise.rewards.runner import score_group
from groupwise.rewards.trl_style import as_trl
from groupwise.rollout.collect import collect
from groupwise.rollout.environment import CoroutineEnvironment, EnvironmentExecutor, HeldOpen, Reply
from groupwise.tasks import Task, isolated
from groupwise.tasks.user_code import code_of
from tests.support.codecs import END
from tests.support.scripted_rollouts import ScriptedEngine, ToolCodec
from tests.support.small_models import tiny_tokenizer
from tests.support.small_runs import KILL, SMALL, SignalAt, deterministic_metrics, run_artifacts, run_command


class Echo:
    """Repeats what it hears, gives a reward for each letter, and ends at "bye"."""

    closed: ClassVar[list[str]] = []

    def reset(self, example: Example) -> str:
        self.heard: list[str] = []
        return f"say {example['q']}"

    def reply(self, text: str) -> str | gw.Reply | None:
        self.heard.append(text)
        if text == "bye":
            return gw.Reply("the end", reward=1.0, done=True)
        if text == "gone":
            return None
        return gw.Reply(" ".join(self.heard), reward=len(text) / 10)

    def close(self) -> None:
        self.closed.append("-".join(self.heard))


def task_with(environment: Any = Echo, **settings: Any) -> Task:
    return Task(name="t", examples=[{"q": "a"}, {"q": "b"}], environment=environment, **settings)


def talked(engine: Any, task: Task, *, size: int = 2, example: Any = None, **limits: Any) -> Any:
    sampling = Sampling(max_tokens=limits.pop("turn_tokens", 20))
    (group,) = collect(
        [Example(example or {"q": "a"})],
        ask=task.ask,
        codec=ToolCodec(),
        engine=engine,
        sampling=sampling,
        group_size=size,
        seed_parts=(0,),
        tools=task.multi_turn(ToolsConfig(**limits)),
    )
    return group


@pytest.mark.parametrize("overlap", [False, True])
def test_replies_are_appended_and_masked_and_rewards_belong_to_turns(overlap):
    task = task_with()
    group = talked(ScriptedEngine("one", "two!", "bye"), task, overlap=overlap)
    rollout = group.rollouts[0]
    text = "".join(map(chr, rollout.tokens)).replace(chr(END), "$")
    assert text == "say aone$|one|two!$|one two!|bye$"
    read = "".join(c for c, trained in zip(text, rollout.trained, strict=True) if not trained)
    assert read == "say a|one||one two!|"
    assert [turn.observation for turn in rollout.turns] == ["one", "one two!", "the end"]
    assert [turn.reward for turn in rollout.turns] == [0.3, 0.4, 1.0]
    scored = score_group(group, rewards=task.rewards, weights={}, seconds=1.0)
    assert [one.reward for one in scored.rollouts] == [pytest.approx(1.7)] * 2
    assert task.is_right(scored.rollouts[0])
    assert rollout.transcript.splitlines()[1] == "[environment] one"


def test_a_completion_in_trl_style_holds_the_environments_replies_as_user_messages():
    rollout = talked(ScriptedEngine("one", "bye"), task_with(Messages)).rollouts[0]
    prompt, completion = as_trl(rollout)
    assert prompt == [{"role": "user", "content": "say a"}]
    assert [(m["role"], m["content"]) for m in completion] == [
        ("assistant", "one"),
        ("user", "one"),
        ("assistant", "bye"),
        ("user", "the end"),
    ]


class Messages(Echo):
    def reset(self, example: Example) -> Any:
        return [{"role": "user", "content": super().reset(example)}]


@pytest.mark.parametrize(
    ("lines", "limits", "finish", "rewards"),
    [
        (("one", "bye"), {"max_turns": 2}, "end", [0.3, 1.0]),
        (("one", "two"), {"max_turns": 2}, "end", [0.3, 0.3]),  # judged, but not continued
        (("four",), {"turn_tokens": 3}, "length", [0.3]),  # cut off: judged as it is
        (("one", "two"), {"turn_tokens": 10, "max_tokens": 15}, "length", [0.3]),
        (("gone",), {}, "end", [0.0]),  # None ends a rollout
    ],
)
def test_the_last_turn_is_judged_and_the_stream_ends_with_the_policys_tokens(lines, limits, finish, rewards):
    (rollout,) = talked(ScriptedEngine(*lines), task_with(), size=1, **limits).rollouts
    assert (rollout.finish, [turn.reward for turn in rollout.turns]) == (finish, rewards)
    assert rollout.trained[-1]


def test_each_rollout_has_an_environment_of_its_own_that_is_closed_once():
    Echo.closed.clear()
    talked(ScriptedEngine("one", "bye"), task_with(), size=3)
    assert Echo.closed == ["", *["one-bye"] * 3]  # the first one was asked for the prompt only


def test_environments_are_closed_when_the_engine_fails():
    class Broken:
        def generate(self, requests: Any, sampling: Any) -> Any:
            raise OSError("no device")

    Echo.closed.clear()
    with pytest.raises(OSError, match="no device"):
        talked(Broken(), task_with())
    assert len(Echo.closed) == 3


def test_tools_and_an_environment_share_a_rollout():
    def look(query: str) -> str:
        """Look something up."""
        return query.upper()

    lines = ('<tool_call>{"name": "look", "arguments": {"query": "x"}}</tool_call>', "one", "bye")
    (rollout,) = talked(ScriptedEngine(*lines), task_with(tools=[look]), size=1, turn_tokens=99).rollouts
    assert [len(turn.calls) for turn in rollout.turns] == [1, 0, 0]
    assert [turn.observation for turn in rollout.turns] == ["", "one", "the end"]
    (rollout,) = talked(ScriptedEngine(lines[0]), task_with(), size=1, turn_tokens=99, max_turns=1).rollouts
    assert rollout.turns[0].observation == lines[0]  # without tools, it is text like any other


@pytest.mark.parametrize("overlap", [False, True, None])
def test_an_asynchronous_environment_keeps_one_event_loop(overlap):
    class Later(Echo):
        async def reset(self, example: Example) -> str:  # type: ignore[override]
            self.loop = asyncio.get_running_loop()
            return super().reset(example)

        async def reply(self, text: str) -> Any:  # type: ignore[override]
            await asyncio.sleep(9 if text == "slow" else 0)
            assert asyncio.get_running_loop() is self.loop
            return super().reply(text)

    group = talked(ScriptedEngine("one", "bye"), task_with(Later), overlap=overlap)
    assert [turn.reward for turn in group.rollouts[1].turns] == [0.3, 1.0]
    group = talked(ScriptedEngine("slow"), task_with(Later), overlap=overlap, seconds=0.05)
    assert [one.error for one in group.rollouts] == ["environment: reply took longer than 0.05 s"] * 2


class EachMember:
    """Member 0 says "one", 1 says "two", 2 says "three", 3 does what the test wants; then all say bye."""

    def __init__(self, last: str) -> None:
        self.lines, self.rounds = ["one", "two", "three", last], 0

    def generate(self, requests: Any, sampling: Sampling) -> list[list[Completion]]:
        self.rounds += 1
        if self.rounds == 2:  # the requests come in any order, each after the turn of a member
            return [[self.said(self.lines[request.continues[1]])] for request in requests]
        return [[self.said("x" if self.rounds == 1 else "bye")] * len(request.seeds) for request in requests]

    def said(self, line: str) -> Completion:
        tokens = (*map(ord, line), END)
        zeros = (0.0,) * len(tokens)
        return Completion(tokens=tokens, logprobs=zeros, entropies=zeros, finish="end")


class Hostile(Echo):
    def reply(self, text: str) -> Any:
        if text == "raise":
            raise ValueError("no such move")
        if text == "exit":
            raise SystemExit(0)
        if text == "sleep":
            time.sleep(60)
        if text == "ignore":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            time.sleep(60)
        if text == "die":
            os._exit(1)
        if text == "number":
            return 7
        if text == "nan":
            return gw.Reply("x", reward=float("nan"))
        return super().reply(text)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ("raise", "reply: ValueError: no such move (test_environment.py, line"),
        ("exit", "reply: SystemExit: 0"),
        ("sleep", "reply took longer than 1 s"),
        ("ignore", "reply took longer than 1 s; its worker process was killed"),
        ("die", "reply terminated its worker process"),
        ("number", "reply: must return a text, a groupwise.Reply or None; got 7"),
        ("nan", "reply: returned nan; a reward must be finite"),
    ],
)
def test_a_hostile_environment_fails_its_own_rollout_alone(last, reason, overlap):
    """A worker that was killed held the others too: they are rebuilt, with what they had heard."""
    with isolated(task_with(Hostile)) as task:
        group = talked(EachMember(last), task, size=4, seconds=1.0, overlap=overlap)
    *good, bad = group.rollouts
    assert bad.error is not None
    assert bad.error.startswith(f"environment: {reason}")
    assert [one.error for one in good] == [None] * 3
    assert [one.turns[1].observation for one in good] == ["x one", "x two", "x three"]
    assert [one.turns[2].reward for one in good] == [1.0] * 3


def test_what_cannot_be_repeated_in_a_new_worker_fails_and_says_so():
    class Clock(Hostile):
        def reply(self, text: str) -> Any:
            super().reply(text)
            return gw.Reply(f"{time.monotonic_ns()}", done=text == "bye")

    with isolated(task_with(Clock)) as task:
        group = talked(EachMember("die"), task, size=4)
    reason = "environment: its worker process was lost, and its turns cannot be repeated"
    assert [one.error for one in group.rollouts[:3]] == [reason] * 3


def test_a_prompt_that_differs_between_rollouts_fails_them():
    class Moody(Echo):
        def reset(self, example: Example) -> str:
            return f"{time.monotonic_ns()}"

    group = talked(ScriptedEngine("one"), task_with(Moody))
    assert all("derive all randomness from the example" in str(one.error) for one in group.rollouts)


def test_a_reset_that_fails_is_tried_again_and_then_names_the_example():
    class Flaky(Echo):
        tries = 0

        def reset(self, example: Example) -> str:
            Flaky.tries += 1
            if Flaky.tries < 3 or example["q"] == "b":
                raise OSError("no connection")
            return super().reset(example)

    task = task_with(Flaky)
    assert task.ask(Example({"q": "a"})) == "say a"
    with pytest.raises(ConfigError, match=r"environment: reset: OSError: no connection .*'q': 'b'"):
        task.ask(Example({"q": "b"}))
    tries = Flaky.tries
    task.ask(Example({"q": "a"}))
    assert tries == Flaky.tries  # a prompt is asked for once


def test_a_reset_that_fails_in_a_rollout_fails_that_rollout():
    class Third(Echo):
        made = 0

        def __init__(self) -> None:
            Third.made += 1
            if Third.made == 3:
                raise OSError("no connection")

    group = talked(ScriptedEngine("one"), task_with(Third), size=3, max_turns=1)
    reason = "environment: reset: OSError: no connection (test_environment.py, line"
    assert [str(one.error).startswith(reason) for one in group.rollouts] == [False, True, False]
    assert [one.error for one in group.rollouts][::2] == [None, None]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails", ["environment", "state"])
def test_a_rollout_that_could_not_begin_calls_no_tool(fails, overlap):
    calls: list[str] = []

    def look(query: str) -> str:
        """Look something up."""
        calls.append(query)
        return query

    class Second(Echo):
        made = 0

        def __init__(self) -> None:
            Second.made += 1
            if Second.made == 2:  # the first one gives the prompt
                raise OSError("no connection")

    def no_state(example: Example) -> Any:
        raise OSError("no connection")

    wrong = {"environment": Second} if fails == "environment" else {"state": no_state}
    line = '<tool_call>{"name": "look", "arguments": {"query": "x"}}</tool_call>'
    (rollout,) = talked(
        ScriptedEngine(line, "bye"), task_with(tools=[look], **wrong), size=1, turn_tokens=99, overlap=overlap
    ).rollouts
    assert f"{fails}: " in str(rollout.error)
    assert (calls, len(rollout.turns)) == ([], 1)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"environment": Echo()}, "environment must be a class"),
        ({"environment": dict}, "needs the methods reset"),
        ({"environment": Echo, "prompt": str}, "leave out `prompt`"),
        ({}, "set prompt to a function"),
    ],
)
def test_what_is_no_environment_is_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        Task(name="t", examples=[{"q": "a"}], rewards={"r": lambda rollout, example: 0.0}, **settings)


def test_own_rewards_stand_beside_the_environments_and_its_code_has_a_fingerprint():
    task = task_with(rewards={"short": lambda rollout, example: 0.5}, weights={"environment": 2.0})
    assert list(task.rewards) == ["environment", "short"]
    assert "environment" in code_of(task)
    with isolated(task) as moved:
        assert code_of(moved) == code_of(task)


@pytest.mark.parametrize("template", [True, False])
def test_a_reply_is_the_text_that_the_chat_template_gives_to_a_user_message(template):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    if not template:
        tokenizer.chat_template = None
        assert between_turns(tokenizer, ["Higher."], role="user") == "\nHigher.\n"
        return
    messages = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "5"}]
    grown = render(tokenizer, messages[:1]) + "5" + tokenizer.eos_token
    grown += between_turns(tokenizer, ["Higher."], role="user")
    assert grown == render(tokenizer, [*messages, {"role": "user", "content": "Higher."}])


LUCKY = """
import zlib
import groupwise as gw

class Luck:
    def reset(self, example):
        self.heard, self.n = "", example["n"]
        return f"{example['n']} + 1"

    def reply(self, text):
        self.heard += text
        luck = zlib.crc32(self.heard.encode())
        if luck % 16 == 5:
            raise RuntimeError("bad luck")
        return gw.Reply(str(luck % 10), reward=float(luck % 4 == 0), done=luck % 3 == 0)

task = gw.Task(
    name="luck",
    examples=[{"n": n} for n in range(24)],
    environment=Luck,
    difficulty=lambda example: str(example["n"] % 2),
)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("environments")
    (folder / "luck.py").write_text(LUCKY)
    return folder


def test_a_run_with_failures_refills_and_a_curriculum_is_resumed_with_the_same_bits(place):
    """Turns, rewards and errors are recorded; evaluation plays the game, greedy and sampled."""
    words = [
        *("train", str(place / "luck.py"), f"run.output_dir={place}", *SMALL, "tools.max_turns=3"),
        *("rollout.refill=2", "rollout.curriculum=2", "tools.max_tokens=60", "run.max_steps=3"),
    ]
    whole, killed = place / "whole", place / "killed"
    ended = run_command(*words, "run.name=whole")
    assert ended.code == 0, ended.err
    at = SignalAt(".step-000002.tmp-", KILL, nth=2)
    assert run_command(*words, "run.name=killed", signals=[at]).code == -KILL
    assert run_command("train", "--resume", str(killed)).code == 0
    assert run_artifacts(killed) == run_artifacts(whole)
    rows = deterministic_metrics(whole)
    assert max(row["rollout/turns"] for row in rows) > 1
    assert any(row["reward/environment/mean"] > 0 for row in rows)
    from groupwise.tracking.rollout_files import read_rollouts

    recorded = [row for path in sorted((whole / "rollouts").glob("*")) for row in read_rollouts(path)]
    assert any("environment: reply: RuntimeError: bad luck" in str(row["error"]) for row in recorded)
    several = [row for row in recorded if len(row["turns"]) > 1]
    assert all(turn["observation"] for row in several for turn in row["turns"][:-1])
    assert not all(all(row["trained"][row["prompt_length"] :]) for row in several)
    assert (whole / "eval" / "before.json").is_file()


ROOT = Path(__file__).parents[2]


def test_the_example_in_the_docs_is_the_file_and_it_runs(tmp_path):
    example = ROOT / "examples" / "guess.py"
    assert example.read_text() in (ROOT / "docs" / "environments.md").read_text()
    assert len(example.read_text().splitlines()) <= 25
    words = ["train", str(example), f"run.output_dir={tmp_path}", "run.name=run", *SMALL, "run.max_steps=1"]
    ended = run_command(*words, "rollout.stop=['1', '2', '3', '4', '5', '6']", "tools.max_tokens=120")
    assert ended.code == 0, ended.err
    assert deterministic_metrics(tmp_path / "run")[0]["rollout/turns"] > 1


class Doubling(CoroutineEnvironment):
    """Asks for twice a number, again and again, until a wrong answer."""

    cancelled = 0

    async def play(self, example: Example) -> Reply:
        number, said = example["number"], "Double it: "
        try:
            while await self.ask(f"{said}{number}") == str(2 * number):
                number, said = 2 * number, "And "
            if example["slow"]:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            Doubling.cancelled += 1
            raise
        return Reply("Wrong.", reward=float(number), done=True)


def test_a_coroutine_asks_for_turns_and_returns_the_last_reply():
    game = EnvironmentExecutor(Doubling, seconds=5.0)
    assert game.asynchronous
    episode = game.start(Example({"number": 3, "slow": False}))
    assert episode.opening == "Double it: 3"
    assert game.reply(episode, "6") == Reply("And 6")
    assert game.reply(episode, "0") == Reply("Wrong.", reward=6.0, done=True)
    game.close(episode)


def test_a_coroutine_ends_at_its_time_limit_and_when_its_rollout_ends():
    Doubling.cancelled = 0
    game = EnvironmentExecutor(Doubling, seconds=0.2)
    late, unfinished = (game.start(Example({"number": 3, "slow": True})) for _ in range(2))
    with pytest.raises(RolloutError, match=r"reply took longer than 0\.2 s"):
        game.reply(late, "0")
    game.close(unfinished)
    time.sleep(0.1)
    assert Doubling.cancelled == 2


class Mute(CoroutineEnvironment):
    async def play(self, example: Example) -> Reply:
        return Reply(done=True)


def test_a_coroutine_that_never_asks_for_a_turn_fails_the_rollout():
    with pytest.raises(RolloutError, match="the episode ended before the first turn of the policy"):
        EnvironmentExecutor(Mute, seconds=5.0).start(Example({"q": 1}))


@asynccontextmanager
async def connection(events: list[str], *, error: Exception | None = None) -> AsyncIterator[str]:
    if error is not None:
        raise error
    yield "session"
    events.append("left")


async def answered(seconds: float, answer: str) -> str:
    await asyncio.sleep(seconds)
    return answer


def test_a_context_is_held_open_until_it_is_closed():
    events: list[str] = []
    held = HeldOpen(connection(events), seconds=5.0)
    assert (held.value, held.run(answered(0.0, "hello"), seconds=5.0)) == ("session", "hello")
    with pytest.raises(ConnectionError, match=r"nothing in 0\.1 s"):
        held.run(answered(60.0, "late"), seconds=0.1)
    assert events == []
    held.close()
    assert events == ["left"]
    with pytest.raises(ConnectionError, match="it has ended"):
        held.run(answered(60.0, "never"), seconds=5.0)


def test_a_context_that_cannot_be_entered_raises_its_own_error():
    with pytest.raises(ValueError, match="no server"):
        HeldOpen(connection([], error=ValueError("no server")), seconds=5.0)


class Session:
    """Holds a session on a server, of which there are two."""

    open_sessions = 0

    async def reset(self, example: Example) -> str:
        if Session.open_sessions == 2:
            raise RuntimeError("the server is at capacity")
        Session.open_sessions += 1
        if example["fails"]:
            raise ValueError("no such game")
        return "Begin."

    async def reply(self, text: str) -> None:
        await asyncio.sleep(60)

    async def close(self) -> None:
        Session.open_sessions -= 1


def test_a_failed_episode_frees_its_session():
    games = EnvironmentExecutor(Session, seconds=0.1)
    for _ in range(3):
        with pytest.raises(RolloutError, match="no such game"):
            games.start(Example({"fails": True}))
        episode = games.start(Example({"fails": False}))
        with pytest.raises(RolloutError, match="took longer"):
            games.reply(episode, "a")
        games.close(episode)
        time.sleep(0.05)
    assert Session.open_sessions == 0
