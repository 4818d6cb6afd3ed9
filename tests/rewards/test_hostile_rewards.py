"""Rewards and tools that hang, leave, crash or lie: none of them hangs, ends or fools a run."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import itertools
import logging
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import groupwise as gw
from groupwise.isolation import worker as workers
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.runner import score_group
from groupwise.rollout.tool_calls import ParsedToolCall
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.tasks import isolated
from groupwise.tracking.rollout_files import read_rollouts
from tests.support.small_runs import SMALL, deterministic_metrics, run_command, task_file

SECONDS = 0.2
LATE = "took longer than 0.2 s"
ENDED = "terminated its worker process"
SCORES = None
"""A hostile reward whose value stands all the same."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.3)
    crashes_told = faulthandler.is_enabled()
    faulthandler.disable()  # workers crash on purpose
    yield
    if crashes_told:
        faulthandler.enable()


def rollouts(*texts: str) -> tuple[Rollout, ...]:
    return tuple(
        Rollout(
            prompt="q",
            text=text,
            tokens=(5, 7),
            trained=(False, True),
            logprobs=(0.0, -1.0),
            entropies=(0.0, 1.0),
            prompt_length=1,
            finish="end",
            member=member,
        )
        for member, text in enumerate(texts)
    )


def task_of(reward=lambda rollout, example: 1.0, **parts) -> gw.Task:
    return gw.Task(
        name="hostile", examples=[{"n": 1}], prompt=lambda row: "q", rewards={"it": reward}, **parts
    )


def scored(task: gw.Task, *texts: str, seconds: float = SECONDS) -> tuple[Rollout, ...]:
    group = Group(example=Example({"n": 1}), rollouts=rollouts(*texts))
    return score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds).rollouts


class Odd:
    """A value whose conversion does what it is told to."""

    def __init__(self, act):
        self.act = act

    def __float__(self):
        return self.act()


class BadText(Exception):
    def __str__(self):
        raise ValueError("no text either")


class BadPickle:
    def __reduce__(self):
        raise TypeError("stays here")


def swallow_forever():
    while True:
        try:
            time.sleep(0.05)
        except BaseException:
            continue


def busy_forever():
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue


def no_alarm():
    signal.alarm(0)
    time.sleep(60)


def ignored_alarm():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(60)


def blocked_alarm():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)


def own_timer():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    swallow_forever()


def ignores_every_signal():
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    swallow_forever()


def forked_crowd():
    for _ in range(30):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    time.sleep(60)


def child_takes_over():
    if os.fork():
        os._exit(0)
    time.sleep(600)


def raises(error):
    raise error


def starts_a_program():
    return subprocess.run(["sleep", "600"], check=False).returncode


def waits_for_a_thread():
    threading.Thread(target=lambda: time.sleep(600), daemon=False).start()
    return 1.0


def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def recursion():
    return recursion()


def fills_memory():
    data = []
    while True:
        data.append(bytearray(1 << 24))


def closes_every_file():
    os.closerange(3, 200)
    return 1.0


def no_more_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    open(os.devnull).close()


def swallowing_generator():
    try:
        while True:
            yield time.sleep(0.05)
    except BaseException:
        while True:
            try:
                time.sleep(0.05)
            except BaseException:
                continue


async def slow_coroutine():
    await asyncio.sleep(60)


async def cancelled():
    raise asyncio.CancelledError


async def cancels_itself():
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def swallowing_coroutine():
    while True:
        try:
            await asyncio.sleep(60)
        except BaseException:
            continue


def break_the_logger():
    logging.disable(logging.CRITICAL)
    logging.getLogger("groupwise").handlers.clear()
    return 1.0


def spoil(module, name):
    setattr(module, name, None)
    return 1.0


# Each acts when the completion says "bad"; any other completion is worth 1.
EACH: dict[str, tuple[Any, str | None]] = {
    # hang
    "sleep": (lambda: time.sleep(60), LATE),
    "swallow for ever": (swallow_forever, LATE),
    "busy for ever": (busy_forever, LATE),
    "alarm(0)": (no_alarm, LATE),
    "SIGALRM ignored": (ignored_alarm, LATE),
    "SIGALRM blocked": (blocked_alarm, LATE),
    "a timer of its own": (own_timer, LATE),
    "every signal ignored": (ignores_every_signal, LATE),
    "a deadlock": (deadlock, LATE),
    "a program that runs on": (starts_a_program, LATE),
    "a pattern that explodes": (lambda: re.match(r"(a+)+$", "a" * 40 + "b"), LATE),
    "a sum without an end": (lambda: sum(itertools.count()), LATE),
    "a conversion that hangs": (lambda: Odd(swallow_forever), LATE),
    "many children": (forked_crowd, LATE),
    "SIGSTOP": (lambda: os.kill(os.getpid(), signal.SIGSTOP), LATE),
    "input()": (input, "EOFError"),
    "a read of the terminal": (lambda: float(len(sys.stdin.read())), SCORES),
    # leave
    "sys.exit(0)": (lambda: sys.exit(0), "SystemExit: 0"),
    "sys.exit()": (sys.exit, "SystemExit"),
    "raise SystemExit": (lambda: raises(SystemExit("bye")), "SystemExit: bye"),
    "os._exit(0)": (lambda: os._exit(0), ENDED),
    "os._exit(1)": (lambda: os._exit(1), ENDED),
    "os.abort()": (os.abort, ENDED),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), ENDED),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), ENDED),
    "SIGINT": (lambda: os.kill(os.getpid(), signal.SIGINT) or 1.0, SCORES),
    "a segmentation fault": (lambda: ctypes.string_at(0), ENDED),
    "a child that takes over": (child_takes_over, LATE),
    "exec": (lambda: os.execvp("true", ["true"]), ENDED),
    "KeyboardInterrupt": (lambda: raises(KeyboardInterrupt()), ENDED),
    "GeneratorExit": (lambda: raises(GeneratorExit()), "GeneratorExit"),
    "CancelledError": (lambda: raises(asyncio.CancelledError()), "CancelledError"),
    "StopIteration": (lambda: raises(StopIteration()), "StopIteration"),
    # take what others need
    "endless memory": (fills_memory, "MemoryError"),
    "one huge array": (lambda: bytearray(1 << 50), "MemoryError"),
    "recursion": (recursion, "RecursionError"),
    "every file closed": (closes_every_file, ENDED),
    "no more files": (no_more_files, "OSError"),
    "chdir": (lambda: os.chdir("/") or 1.0, SCORES),
    "umask": (lambda: os.umask(0o777) and 1.0, SCORES),
    "a thread that stays": (waits_for_a_thread, SCORES),
    "the seed": (lambda: random.seed(0) or 1.0, SCORES),
    "garbage collection off": (lambda: gc.disable() or 1.0, SCORES),
    "logging off": (break_the_logger, SCORES),
    "math.isfinite gone": (lambda: spoil(math, "isfinite"), SCORES),
    "warnings": (lambda: warnings.warn("look", stacklevel=1) or 1.0, "UserWarning"),
    # lie
    "nan": (lambda: math.nan, "returned nan"),
    "inf": (lambda: math.inf, "returned inf"),
    "1e308": (lambda: 1e308, "returned 1e+308; a reward must lie between"),
    "-1e308": (lambda: -1e308, "returned -1e+308"),
    "an int that no float holds": (lambda: 10**400, "cannot be converted to a float"),
    "text": (lambda: "1.0", "returned str"),
    "a list": (lambda: [1.0], "returned list"),
    "complex": (lambda: 1j, "returned complex"),
    "a function": (lambda: time.sleep, "returned builtin_function_or_method"),
    "a conversion that leaves": (lambda: Odd(sys.exit), "SystemExit"),
    "a conversion that raises": (
        lambda: Odd(lambda: 1 / 0),
        "cannot be converted to a float: division by zero",
    ),
    "a conversion to nan": (lambda: Odd(lambda: math.nan), "returned nan"),
    # fail in ways that are hard to tell
    "half a surrogate": (lambda: raises(ValueError("\ud83d!")), "ValueError: ?!"),
    "an error without text": (lambda: raises(ValueError()), "ValueError (test_hostile_rewards.py, line"),
    "an error whose text raises": (lambda: raises(BadText()), "BadText"),
    "an endless message": (lambda: raises(ValueError("x" * 10**7)), "ValueError: xxx"),
    "NUL and escapes": (lambda: raises(ValueError("a\x00\x1b[2J")), "ValueError: a"),
    # async
    "a slow coroutine": (slow_coroutine, LATE),
    "a cancelled coroutine": (cancelled, "CancelledError"),
    "a coroutine that cancels itself": (cancels_itself, "CancelledError"),
    "a coroutine that swallows": (swallowing_coroutine, LATE),
}


WORKING = ("endless memory", "recursion")
"""What needs time of its own until it fails, on a busy machine more than the limit."""


@pytest.mark.parametrize("name", EACH)
def test_a_hostile_reward_fails_its_own_rollout_alone(name, monkeypatch):
    act, message = EACH[name]
    monkeypatch.setattr(workers, "MEMORY_SHARE", 0.002)

    def reward(rollout: Rollout, example: Example) -> Any:
        return act() if rollout.text == "bad" else 1.0

    here = os.getcwd()
    seconds = 20 * SECONDS if name in WORKING else SECONDS
    with isolated(task_of(reward)) as task:
        before, bad, after = scored(task, "good", "bad", "good", seconds=seconds)
        again = scored(task, "good")
    assert (before.reward, after.reward, again[0].reward) == (1.0, 1.0, 1.0)
    assert (before.error, after.error) == (None, None)
    if message is SCORES:
        assert bad.error is None
    else:
        assert bad.error is not None
        assert message in bad.error
        assert len(bad.error) < 1200
        bad.error.encode()
    assert os.getcwd() == here


def endless_values(completions, **columns):
    return itertools.count()


def generator_that_swallows(completions, **columns):
    return swallowing_generator()


TOGETHER: dict[str, tuple[Any, str]] = {
    "a generator without an end": (endless_values, "returned too many values for 2 completions"),
    "a generator that swallows": (generator_that_swallows, LATE),
    "swallow for ever": (lambda completions, **columns: swallow_forever(), LATE),
    "os._exit": (lambda completions, **columns: os._exit(0), ENDED),
    "sys.exit": (lambda completions, **columns: sys.exit(0), "SystemExit: 0"),
    "one value too few": (lambda completions, **columns: [1.0], "returned 1 values for 2 completions"),
    "no list": (lambda completions, **columns: 1.0, "returned float, not a list of numbers"),
    "text for a list": (lambda completions, **columns: "ab", "returned str, not a number"),
    "one nan": (lambda completions, **columns: [1.0, math.nan], "returned nan"),
    "messages of a text prompt": (
        lambda completions, **columns: [completion[0]["content"] for completion in completions],
        "completions are strings because the task's prompt is a string",
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_hostile_reward_in_trl_style_fails_its_group_alone(name):
    act, message = TOGETHER[name]

    def reward(completions, **columns):
        return act(completions=completions, **columns) if "bad" in completions else [1.0] * len(completions)

    with isolated(task_of(reward)) as task:
        bad = scored(task, "good", "bad")
        good = scored(task, "good", "good")
    assert all(message in (rollout.error or "") for rollout in bad)
    assert [rollout.reward for rollout in good] == [1.0, 1.0]


def tool_that(act):
    def hostile(text: str) -> Any:
        """Do what hostile tools do."""
        return act() if text == "bad" else text

    return hostile


TOOLS: dict[str, tuple[Any, str]] = {
    "sleep": (lambda: time.sleep(60), f"hostile {LATE}"),
    "swallow for ever": (swallow_forever, f"hostile {LATE}"),
    "alarm(0)": (no_alarm, f"hostile {LATE}"),
    "SIGALRM ignored": (ignored_alarm, f"hostile {LATE}"),
    "sys.exit": (lambda: sys.exit(0), "hostile: 0"),
    "CancelledError": (lambda: raises(asyncio.CancelledError()), "hostile: CancelledError"),
    "os._exit": (lambda: os._exit(0), f"hostile {ENDED}"),
    "a segmentation fault": (lambda: ctypes.string_at(0), f"hostile {ENDED}"),
    "a huge error": (lambda: raises(ValueError("x" * 10**6)), "hostile: xxx"),
    "half a surrogate": (lambda: raises(ValueError("\ud83d!")), "hostile: ?!"),
    "an error whose text raises": (lambda: raises(BadText()), "hostile: BadText"),
    "a value that JSON cannot write": (lambda: {(1, 2): 3}, "hostile: keys must be str"),
    "a value that contains itself": (lambda: itself(), "hostile: Circular reference detected"),
    "recursion": (recursion, "hostile: maximum recursion depth exceeded"),
    "a value whose text hangs": (lambda: HangingText(), f"hostile {LATE}"),
}


class HangingText:
    def __str__(self):
        swallow_forever()


def itself():
    values: list[Any] = []
    values.append(values)
    return values


@pytest.mark.parametrize("name", TOOLS)
def test_a_hostile_tool_is_answered_with_an_error_and_the_next_call_works(name):
    act, message = TOOLS[name]
    with isolated(task_of(tools=[tool_that(act)])) as task:
        box = ToolExecutor.of(task.tools, seconds=SECONDS, characters=200)
        (bad,) = box.answer([ParsedToolCall("hostile", {"text": "bad"})], allowed=1)
        (good,) = box.answer([ParsedToolCall("hostile", {"text": "good"})], allowed=1)
    assert (good.result, good.error) == ("good", None)
    assert (bad.error or "").startswith(message)
    assert len(bad.result) < 230, "an error obeys tools.result_characters, as a result does"


def test_state_between_calls_lives_in_the_worker_and_is_shared_by_rewards_and_tools():
    seen: list[str] = []

    def remember(text: str) -> str:
        """Remember a text."""
        seen.append(text)
        return str(len(seen))

    with isolated(task_of(lambda rollout, example: len(seen), tools=[remember])) as task:
        box = ToolExecutor.of(task.tools, seconds=5, characters=200)
        results = [
            box.answer([ParsedToolCall("remember", {"text": "a"})], allowed=1)[0].result for _ in range(2)
        ]
        (rollout,) = scored(task, "x")
    assert (results, rollout.reward) == (["1", "2"], 2.0)
    assert seen == [], "the worker has its own copy"


def test_a_reward_marked_in_process_and_a_tool_with_a_state_stay_where_their_objects_are():
    seen: list[str] = []

    @gw.in_process
    def recorded(rollout: Rollout, example: Example) -> float:
        seen.append(rollout.text)
        return 1.0

    def note(text: str, state: Any) -> str:
        """Note a text."""
        state.append(text)
        return "noted"

    with isolated(task_of(recorded, tools=[note], state=lambda example: [])) as task:
        assert (task.rewards["it"], list(task.tools)) == (recorded, [note])
        scored(task, "x")
    assert seen == ["x"]


def test_a_reward_whose_arguments_cannot_travel_runs_here():
    task = task_of(lambda rollout, example: 0.5)
    group = Group(example=Example({"n": BadPickle()}), rollouts=rollouts("a", "b"))
    with isolated(task) as moved:
        done = score_group(group, rewards=moved.rewards, weights={}, seconds=SECONDS).rollouts
    assert [rollout.reward for rollout in done] == [0.5, 0.5]


def test_the_sum_of_rewards_that_no_float_holds_fails_the_rollout():
    task = replace(task_of(lambda rollout, example: 1e30), weights={"it": 1e300})
    (rollout,) = scored(task, "a")
    assert rollout.error == "the weighted sum of the rewards is inf; lower task.weights"


def test_no_process_outlives_the_worker():
    def children() -> set[str]:
        with Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").open() as file:
            return set(file.read().split())

    before = children()  # other tests may have left a fork server
    with isolated(task_of(lambda rollout, example: forked_crowd())) as task:
        scored(task, "a")
    assert children() <= before


SWALLOWS = """
import time
import groupwise as gw
from groupwise.isolation import time_limit
time_limit.GRACE_SECONDS = 0.5

@gw.in_process
def stubborn(rollout, example):
    while True:
        try:
            time.sleep(0.05)
        except BaseException:
            continue

task = gw.Task(name="t", examples=[{"n": n} for n in range(9)], prompt=lambda row: str(row["n"]),
               rewards={"it": stubborn})
"""


def test_a_reward_in_the_process_that_swallows_its_limit_stops_the_run_with_a_sentence(tmp_path):
    path = task_file(tmp_path, SWALLOWS)
    ended = run_command("train", str(path), *WORDS, f"run.output_dir={tmp_path}", "task.reward_seconds=0.2")
    assert ended.code == 3
    assert ended.err.startswith(
        f"error: the reward stubborn ({path}, line 7) ran more than 0.5 s past its time limit of 0.2 s"
    )
    assert ended.err.count("\n") == 1


WORDS = (*SMALL, "run.name=run", "evaluate.skip=true", "run.max_steps=2", "run.save_every=1")

LEAVES = """
import logging, os, sys, zlib
import groupwise as gw

def leaves(rollout, example):
    logging.warning("a reward speaks")
    os.chdir("/")
    if rollout.member == 0:
        sys.exit(0)
    return float(zlib.crc32(rollout.text.encode()) % 2)

task = gw.Task(name="t", examples=[{"n": n} for n in range(9)], prompt=lambda row: str(row["n"]),
               rewards={"it": MARKleaves)})
"""


@pytest.mark.parametrize("mark", ["(", "gw.in_process("])
def test_a_reward_that_leaves_changes_folder_and_logs_does_not_disturb_the_run(tmp_path, monkeypatch, mark):
    monkeypatch.chdir(tmp_path)
    task_file(tmp_path, LEAVES.replace("MARK", mark))
    ended = run_command("train", "luck.py", *WORDS, "run.output_dir=runs")
    assert ended.code == 0, ended.err
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step-000002").is_dir()
    rows = read_rollouts(tmp_path / "runs" / "run" / "rollouts" / "step-000002.parquet")
    assert {row["error"] for row in rows if row["member"] == 0} == {
        "reward it: SystemExit: 0 (luck.py, line 9)"
    }
    assert "a reward speaks" in ended.err
    assert '"reward/mean"' not in ended.err + ended.out, "our log does not go to the terminal"


MISTAKEN = """
import groupwise as gw

calls = []

def mistaken(rollout, example):
    return float(rollout.text == example["anser"])

def counts(rollout, example):
    calls.append(rollout)
    return float(len(calls))

def sometimes(completions, trainer_state, log_metric, log_extra, **columns):
    log_metric("letters", 2.0 + trainer_state.global_step)
    log_extra("length", [len(completion) for completion in completions])
    if trainer_state.global_step == 0:
        raise ValueError("no gold")
    return [float(trainer_state.max_steps)] * len(completions)

task = gw.Task(name="t", examples=[{"answer": str(n)} for n in range(9)], prompt=lambda row: row["answer"],
               rewards=REWARDS)
"""


def test_a_mistake_in_a_reward_shows_its_line_and_traceback_once_and_before_the_model_loads(tmp_path):
    path = task_file(tmp_path, MISTAKEN.replace("REWARDS", '{"mistaken": mistaken}'))
    ended = run_command("train", str(path), *WORDS, f"run.output_dir={tmp_path}", "model.name=tiny")
    assert ended.code == 3
    lines = ended.out.splitlines()
    assert lines[1] == (
        "reward mistaken failed on a trial answer: KeyError: \"the example has no column 'anser'; it has "
        "['answer']\" (luck.py, line 7)"
    )
    assert ended.out.count('return float(rollout.text == example["anser"])') == 1
    assert "the first: reward mistaken: KeyError" in ended.err


def test_a_trial_leaves_nothing_behind_and_failures_stand_in_the_step_line_and_the_alarm(tmp_path):
    path = task_file(tmp_path, MISTAKEN.replace("REWARDS", '{"counts": counts, "sometimes": sometimes}'))
    words = (*WORDS, f"run.output_dir={tmp_path}", "rollout.refill=0", "task.max_failed=1")
    ended = run_command("train", str(path), *words)
    assert ended.code == 0, ended.err
    first, second = deterministic_metrics(tmp_path / "run")
    assert second["reward/counts/mean"] == fmean(range(13, 25)), "12 rollouts a step, the trial not counted"
    assert (first["rollout/failed"], second["rollout/failed"]) == (1.0, 0.0)
    assert (first["logged/letters"], second["logged/letters"]) == (2.0, 3.0)
    assert second["reward/sometimes/mean"] == 2.0, "trainer_state.max_steps"
    (step,) = [line for line in ended.out.splitlines() if line.startswith("step 1/2")]
    assert step.endswith(" · failed 100 %")


def test_the_alarm_says_why_rollouts_fail(tmp_path):
    text = MISTAKEN.replace("REWARDS", '{"sometimes": sometimes}').replace("== 0:", "< 4:")
    path = task_file(tmp_path, text)
    words = (*SMALL, "run.name=run", "evaluate.skip=true", "rollout.refill=0", "task.max_failed=1")
    ended = run_command("train", str(path), *words, f"run.output_dir={tmp_path}")
    (alarm,) = [line for line in ended.out.splitlines() if "Rollouts fail" in line]
    assert alarm.endswith("One of them: reward sometimes: ValueError: no gold (luck.py, line 17)")


def test_an_async_reward_works_inside_a_running_event_loop():
    async def reward(rollout: Rollout, example: Example) -> float:
        await asyncio.sleep(0)
        return 0.5

    async def notebook() -> float:
        return scored(task_of(gw.in_process(reward)), "a")[0].reward

    assert asyncio.run(notebook()) == 0.5


HANGS = """
import os, signal, time
import groupwise as gw

TRAINER = os.getpid()

def hangs(rollout, example):
    if not rollout.text:
        return 1.0  # the trial
    for _ in range(TIMES):
        os.kill(TRAINER, signal.SIGTERM)
        time.sleep(0.05)
    while True:
        try:
            time.sleep(0.05)
        except BaseException:
            continue

task = gw.Task(name="t", examples=[{"n": n} for n in range(9)], prompt=lambda row: str(row["n"]),
               rewards={"it": hangs}, held_out=[{"n": 10}])
"""


@pytest.mark.parametrize(("times", "seconds"), [(1, "1"), (2, "1000")])
def test_sigterm_ends_a_hanging_step_at_the_next_limit_and_a_second_one_at_once(tmp_path, times, seconds):
    path = task_file(tmp_path, HANGS.replace("TIMES", str(times)))
    words = (*WORDS, f"run.output_dir={tmp_path}", f"task.reward_seconds={seconds}", "rollout.prompts=9")
    started = time.monotonic()
    ended = run_command("train", str(path), *words)
    assert ended.code == -signal.SIGTERM
    assert time.monotonic() - started < 60, "36 calls of a second each are not waited for"
