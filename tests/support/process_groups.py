"""The same function in several processes that know of each other, as torchrun would start them."""

from __future__ import annotations

import faulthandler
import os
import socket
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from queue import Empty
from typing import Any

import pytest

from tests.support.small_runs import PROCESSES

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="requires DeepSpeed: pip install 'groupwise[deepspeed]'"
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_as(rank: int, count: int, port: int, answers: Any, work: Callable[..., Any], given: tuple) -> None:
    faulthandler.enable()  # who is ended by a signal tells where
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        answers.put((rank, work(*given), None))
    except BaseException as error:
        answers.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def all_answers(answers: Any, children: list[Any]) -> dict[int, tuple[Any, str | None]]:
    """Return (value, error) of every process, or fail when one has died or takes too long."""
    found: dict[int, tuple[Any, str | None]] = {}
    deadline = time.monotonic() + 200
    while len(found) < len(children):
        try:
            rank, value, error = answers.get(timeout=1)
            found[rank] = value, error
        except Empty:
            ended = {rank: child.exitcode for rank, child in enumerate(children) if child.exitcode}
            assert not ended, f"processes ended without an answer (process: exit code): {ended}"
            assert time.monotonic() < deadline, f"no answer but from processes {sorted(found)}"
    return found


def in_processes(count: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """Return what `work` returned in each of `count` processes; fails where one of them failed."""
    answers = PROCESSES.Queue()
    port = free_port()
    children = [
        PROCESSES.Process(target=run_as, args=(rank, count, port, answers, work, given))
        for rank in range(count)
    ]
    for child in children:
        child.start()
    try:
        found = all_answers(answers, children)
        for child in children:
            child.join(30)
    finally:
        for child in children:
            child.kill()  # who waits for one that has died
    errors = [error for _, error in found.values() if error is not None]
    assert not errors, "\n".join(errors)
    return [found[rank][0] for rank in range(count)]
