"""How fast a batch of slow rewards is scored: a server that takes 200 ms, and Python that takes 50 ms of CPU.

python benchmarks/reward_speed.py [--workers 16] [--concurrency 128]

The server is an HTTP server on this machine, in a process of its own. It waits 200 ms before it grades. It is
called by `gw.rewards.judge`, and by an async reward that speaks HTTP itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import groupwise as gw
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.runner import RewardContext
from groupwise.rewards.score_ahead import score_ahead
from groupwise.tasks import Task, isolated

GROUPS, MEMBERS = 32, 16
SECONDS = 0.2
"""Time that the server takes for an answer."""
CONTENT = {"choices": [{"message": {"role": "assistant", "content": "<grade>10</grade>"}}]}
PATH = "/v1/chat/completions"


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """Return the body of an HTTP message."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(line.partition(":")[2] for line in head.split("\r\n") if line.startswith("content-length"))
    return await reader.readexactly(int(length))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Grade one request after a while, and close the connection."""
    await read_body(reader)
    await asyncio.sleep(SECONDS)
    body = json.dumps(CONTENT).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    writer.close()


def serve(ready: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def server() -> Iterator[str]:
    """Run the server in a process of its own; yield its base URL."""
    own, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(other,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{own.recv()}/v1"
    finally:
        process.terminate()
        process.join()


def asking(url: str) -> Any:
    """Return an async reward that asks the server."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def asked(rollout: Rollout, example: Example) -> float:
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps({"messages": [{"role": "user", "content": rollout.text}]}).encode()
        writer.write(f"POST {PATH} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        reply = json.loads(await read_body(reader))
        writer.close()
        return float(reply == CONTENT)

    return asked


def code(rollout: Rollout, example: Example) -> float:
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    return 1.0


def batch(groups: int, members: int, *, name: str) -> list[Group]:
    """Return groups whose answers all differ: a judge asks for equal ones once."""
    empty: dict[str, Any] = {"tokens": (), "trained": (), "logprobs": (), "entropies": ()}
    return [
        Group(
            example=Example({"q": group}),
            rollouts=tuple(
                Rollout(
                    prompt="?",
                    text=f"{name} {group} {member}",
                    prompt_length=0,
                    finish="end",
                    member=member,
                    **empty,
                )
                for member in range(members)
            ),
        )
        for group in range(groups)
    ]


def measure(function: Any, *, workers: int, concurrency: int) -> float:
    """Return the seconds that a batch takes, after one call that starts the workers."""
    task = Task(name="t", examples=[{"q": 1}], prompt=str, rewards={"reward": function})
    with isolated(task, workers=workers) as moved:
        for name, groups, members in (("first", workers, 4), ("then", GROUPS, MEMBERS)):
            answers = batch(groups, members, name=name)
            context = RewardContext()
            started = time.perf_counter()
            score_ahead(
                answers, rewards=moved.rewards, seconds=30.0, concurrency=concurrency, context=context
            )
            seconds = time.perf_counter() - started
            assert list(context.ready.values()) == [1.0] * (groups * members)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=128)
    options = parser.parse_args()
    os.environ["NO_PROXY"] = "127.0.0.1"
    calls, together = GROUPS * MEMBERS, options.concurrency
    with server() as url:
        for name, reward in {
            "judge": gw.rewards.judge(url=url, model="m"),
            "async reward": asking(url),
        }.items():
            seconds = measure(reward, workers=1, concurrency=together)
            print(f"{calls} calls of 200 ms over HTTP, {name}, {together} at a time: {seconds:.2f} s")
    seconds = measure(code, workers=options.workers, concurrency=1)
    print(f"{calls} rewards of 50 ms of CPU, {options.workers} workers: {seconds:.2f} s")


if __name__ == "__main__":
    main()
