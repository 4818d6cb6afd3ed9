"""Many streaming clients at once: nothing dropped, nothing mixed up, overload refused, and how fast.

    python benchmarks/serving.py --model tiny --clients 8 --seconds 60
    python benchmarks/serving.py --model smollm2 --clients 64 --seconds 60     # on a GPU

A server in a process of its own; clients that ask for stream after stream, each with a seed of its own. Every
stream must be whole. A sample of them is compared with what the engine gives offline for the same seed: equal
but for rounding on a GPU. Throughput is compared with the engine offline at the same number of sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass

PROMPTS = [f"Using each number in this list only once (3, {n}, 5), create an equation." for n in range(7, 40)]


@dataclass(frozen=True, slots=True)
class Stream:
    seed: int
    text: str
    tokens: int
    first: float
    """Seconds to the first text."""


async def ask(port: int, body: dict[str, object]) -> tuple[int, list[str], float]:
    """One request on a connection of its own: status, the data lines, and when the first text came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    started = time.perf_counter()
    writer.write(head.encode() + data)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    first, lines = 0.0, []
    async for raw in reader:
        if raw.startswith(b"data: "):
            lines.append(raw[6:].decode().strip())
            if not first and b'"content": ""' not in raw:
                first = time.perf_counter() - started
    writer.close()
    return status, lines, first


async def stream(port: int, seed: int, tokens: int) -> Stream:
    body = {
        "messages": [{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}],
        "max_tokens": tokens,
        "seed": seed,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, lines, first = await ask(port, body)
    assert status == 200, f"status {status}"
    assert lines[-1] == "[DONE]", "the stream was cut"
    parts = [json.loads(line) for line in lines[:-1]]
    assert len({part["id"] for part in parts}) == 1, "parts of several answers in one stream"
    assert parts[-2]["choices"][0]["finish_reason"] in ("stop", "length"), "the answer has no end"
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
    return Stream(seed, text, parts[-1]["usage"]["completion_tokens"], first)


async def load(port: int, *, clients: int, seconds: float, tokens: int) -> tuple[list[Stream], float]:
    """Every client asks for one stream after another until time is up."""
    deadline = time.perf_counter() + seconds
    found: list[Stream] = []

    async def client(number: int) -> None:
        turn = 0
        while time.perf_counter() < deadline:
            found.append(await stream(port, 1000 * number + turn, tokens))
            turn += 1

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return found, time.perf_counter() - started


async def overload(port: int, *, count: int, tokens: int) -> dict[int, int]:
    """Ask for far more at once than may wait."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    statuses: dict[int, int] = {}
    for status, _, _ in await asyncio.gather(*(ask(port, body) for _ in range(count))):
        statuses[status] = statuses.get(status, 0) + 1
    return statuses


def offline(model: str, sample: list[Stream], *, clients: int, tokens: int) -> tuple[int, float]:
    """How many of the sample the engine writes alike, and its tokens a second at as many sequences."""
    from groupwise.config.model import ModelConfig
    from groupwise.config.sections import EngineConfig
    from groupwise.engine.engine import Engine
    from groupwise.engine.sampler import derive_seed
    from groupwise.model.load import load_for_generation
    from groupwise.records import Request, Sampling

    policy = load_for_generation(ModelConfig(name=model), rank=0, trained=None)
    engine = Engine(policy, EngineConfig(max_sequences=clients))

    def request(seed: int) -> Request:
        prompt = policy.encode(PROMPTS[seed % len(PROMPTS)])
        return Request(prompt=prompt, seeds=(derive_seed(seed, "serve", 0),))

    sampling = Sampling(temperature=1.0, max_tokens=tokens)
    written = engine.generate([request(one.seed) for one in sample], sampling)
    alike = sum(policy.decode(c[0].tokens) == one.text for c, one in zip(written, sample, strict=True))
    requests = [request(1000 * number + turn) for turn in range(4) for number in range(clients)]
    engine.generate(requests[:clients], sampling)
    started = time.perf_counter()
    done = engine.generate(requests, sampling)
    count = sum(len(completion.tokens) for members in done for completion in members)
    return alike, count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    words = ["serve", arguments.model, "--port", "0", "--max-sequences", str(arguments.clients)]
    words += ["--queue", str(arguments.clients), "--max-context", "512"]
    server = subprocess.Popen([sys.executable, "-m", "groupwise", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        port = int(said.partition("http://127.0.0.1:")[2].partition("/")[0])
        asyncio.run(load(port, clients=arguments.clients, seconds=3, tokens=arguments.tokens))  # warm
        streams, seconds = asyncio.run(
            load(port, clients=arguments.clients, seconds=arguments.seconds, tokens=arguments.tokens)
        )
        refused = asyncio.run(overload(port, count=6 * arguments.clients, tokens=arguments.tokens))
    finally:
        server.terminate()
        server.wait(30)
    tokens = sum(one.tokens for one in streams)
    sample = streams[:: max(1, len(streams) // 64)]
    alike, rate = offline(arguments.model, sample, clients=arguments.clients, tokens=arguments.tokens)
    firsts = sorted(one.first for one in streams)
    print(f"{len(streams)} whole streams to {arguments.clients} clients in {seconds:.1f} s")
    print(f"{alike} of {len(sample)} compared are what the engine writes offline")
    print(f"{tokens / seconds:.0f} tokens/s served, {rate:.0f} offline: {tokens / seconds / rate:.0%}")
    print(f"first text after {firsts[len(firsts) // 2]:.3f} s (median), {firsts[-1]:.3f} s (most)")
    print(f"overload of {6 * arguments.clients} at once: {refused}")


if __name__ == "__main__":
    main()
