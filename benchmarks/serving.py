"""Many streaming clients at once: nothing dropped, nothing mixed up, overload refused, and how fast.

    python benchmarks/serving.py --model tiny --clients 8 --seconds 60
    python benchmarks/serving.py --model smollm2 --clients 64 --seconds 60     # on a GPU

A server in a process of its own; clients that ask for stream after stream, each with a seed of its own. Every
stream must be whole. A sample of them is compared with what the engine gives offline for the same seed: equal
but for rounding on a GPU, which may turn an answer from some token on. Throughput is compared with the engine
offline at the same number of sequences, with every core and with as many threads as the server has.
`--top-logprobs 20` has every client ask for that many alternatives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, takewhile
from math import exp
from multiprocessing import get_context
from pathlib import Path
from typing import Any

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
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
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


async def stream(port: int, seed: int, tokens: int, top: int) -> Stream:
    body = {
        "messages": [{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}],
        "max_tokens": tokens,
        "seed": seed,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"logprobs": True, "top_logprobs": top} if top else {}),
    }
    status, lines, first = await ask(port, body)
    assert status == 200, f"status {status}"
    assert lines[-1] == "[DONE]", "the stream was cut"
    parts = [json.loads(line) for line in lines[:-1]]
    assert len({part["id"] for part in parts}) == 1, "parts of several answers in one stream"
    assert parts[-2]["choices"][0]["finish_reason"] in ("stop", "length"), "the answer has no end"
    count = parts[-1]["usage"]["completion_tokens"]
    check_alternatives(
        [part["choices"][0]["logprobs"] for part in parts[:-1]], count=count if top else 0, top=top
    )
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
    return Stream(seed, text, count, first)


def check_alternatives(parts: Sequence[Any], *, count: int, top: int) -> None:
    """All tokens have as many as asked for, the best first, and the drawn one is none better than these."""
    places = [place for part in parts if part for place in part["content"]]
    assert len(places) == count, "tokens without log-probabilities"
    for place in places:
        values = [other["logprob"] for other in place["top_logprobs"]]
        assert len(values) == top, "fewer alternatives than asked for"
        assert all(one >= two - 1e-4 for one, two in pairwise(values)), "the best is not first"
        assert sum(map(exp, values)) < 1.001, "more than everything is likely"
        assert place["logprob"] in values or place["logprob"] <= values[-1] + 1e-4, (
            "the drawn one is left out"
        )


async def clients_at(
    port: int, numbers: Sequence[int], *, seconds: float, tokens: int, top: int
) -> tuple[list[Stream], float]:
    """Each of these clients asks for one stream after another until time is up."""
    deadline = time.perf_counter() + seconds
    found: list[Stream] = []

    async def client(number: int) -> None:
        turn = 0
        while time.perf_counter() < deadline:
            found.append(await stream(port, 1000 * number + turn, tokens, top))
            turn += 1

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in numbers))
    return found, time.perf_counter() - started


def some_clients(
    port: int, numbers: Sequence[int], seconds: float, tokens: int, top: int
) -> tuple[list[Stream], float]:
    return asyncio.run(clients_at(port, numbers, seconds=seconds, tokens=tokens, top=top))


def load(
    pool: ProcessPoolExecutor,
    processes: int,
    port: int,
    *,
    clients: int,
    seconds: float,
    tokens: int,
    top: int,
) -> tuple[list[Stream], float]:
    """All clients, in as many processes: one alone would not read as fast as a GPU writes."""
    shares = [range(first, clients, processes) for first in range(processes)]
    parts = [pool.submit(some_clients, port, share, seconds, tokens, top) for share in shares]
    done = [part.result() for part in parts]
    return [one for streams, _ in done for one in streams], max(took for _, took in done)


async def overload(port: int, *, count: int, tokens: int) -> dict[int, int]:
    """Ask for far more at once than may wait."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    statuses: dict[int, int] = {}
    for status, _, _ in await asyncio.gather(*(ask(port, body) for _ in range(count))):
        statuses[status] = statuses.get(status, 0) + 1
    return statuses


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    alike: int
    """Streams that the engine writes the same."""
    own: int
    """Streams that begin like the engine's answer to their own question rather than to another."""
    rate: float
    """Tokens a second with as many sequences as there were clients and all cores, the best of three calls."""
    rate_with_its_threads: float
    """The same with the server's number of threads."""
    occupancy: float


def offline(model: str, sample: list[Stream], *, clients: int, tokens: int) -> Offline:
    from groupwise.config.schema import EngineConfig, ModelConfig
    from groupwise.engine.engine import Engine
    from groupwise.model.load import load_for_generation
    from groupwise.records import Request, Sampling, derive_seed
    from groupwise.serve.openai_server import leave_a_core

    policy = load_for_generation(ModelConfig(name=model), rank=0, trained=None)
    engine = Engine(policy, EngineConfig(max_sequences=clients))

    def request(seed: int) -> Request:
        prompt = policy.encode(PROMPTS[seed % len(PROMPTS)])
        return Request(prompt=prompt, seeds=(derive_seed(seed, "serve", 0),))

    sampling = Sampling(temperature=1.0, max_tokens=tokens)
    written = engine.generate([request(one.seed) for one in sample], sampling)
    texts = [policy.decode(members[0].tokens) for members in written]
    alike = sum(text == one.text for text, one in zip(texts, sample, strict=True))
    own = sum(is_nearest(one.text, texts, number) for number, one in enumerate(sample))
    requests = [request(1000 * number + turn) for turn in range(8) for number in range(clients)]

    def rate() -> float:
        started = time.perf_counter()
        done = engine.generate(requests, sampling)
        count = sum(len(completion.tokens) for members in done for completion in members)
        return count / (time.perf_counter() - started)

    whole = max(rate() for _ in range(3))  # the first also captures graphs
    leave_a_core(policy)
    same = max(rate() for _ in range(3)) if policy.device.type == "cpu" else whole
    return Offline(alike=alike, own=own, rate=whole, rate_with_its_threads=same, occupancy=engine.occupancy)


def is_nearest(text: str, texts: Sequence[str], number: int) -> bool:
    """Whether a text shares no longer beginning with another of these than with the one of its number."""
    shared = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))
        for other in texts
    ]
    return shared[number] == max(shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--top-logprobs", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--output", type=Path, help="folder for serving.json")
    arguments = parser.parse_args()
    clients, tokens = arguments.clients, arguments.tokens
    words = ["serve", arguments.model, "--port", "0", "--max-sequences", str(clients)]
    words += ["--queue", str(clients), "--max-context", str(256 + tokens)]
    server = subprocess.Popen([sys.executable, "-m", "groupwise", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        port = int(said.partition("http://127.0.0.1:")[2].partition("/")[0])
        processes = min(arguments.processes, clients)
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            top = arguments.top_logprobs
            measure = partial(load, pool, processes, port, clients=clients, tokens=tokens, top=top)
            measure(seconds=5)  # warm
            streams, seconds = measure(seconds=arguments.seconds)
        refused = asyncio.run(overload(port, count=6 * clients, tokens=tokens))
    finally:
        server.terminate()
        server.wait(30)
    written = sum(one.tokens for one in streams)
    sample = streams[:: max(1, len(streams) // 64)]
    other = offline(arguments.model, sample, clients=clients, tokens=tokens)
    firsts = sorted(one.first for one in streams)
    found = {
        "model": arguments.model,
        "clients": clients,
        "top_logprobs": arguments.top_logprobs,
        "streams": len(streams),
        "seconds": seconds,
        "compared": len(sample),
        "served_tokens_s": written / seconds,
        **{f"offline_{name}": value for name, value in asdict(other).items()},
        "share": written / seconds / other.rate,
        "share_with_its_threads": written / seconds / other.rate_with_its_threads,
        "first_text_s": {"median": firsts[len(firsts) // 2], "most": firsts[-1]},
        "overload": refused,
    }
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "serving.json").write_text(json.dumps(found, indent=1))
    print(f"{len(streams)} whole streams to {clients} clients in {seconds:.1f} s")
    print(f"{other.alike} of {len(sample)} compared are what the engine writes offline, letter for letter")
    print(f"{other.own} of {len(sample)} begin like the answer to their own question, not like another's")
    print(
        f"{written / seconds:.0f} tokens/s served, {other.rate:.0f} offline: {found['share']:.0%} "
        f"({written / len(streams):.0f} tokens a stream, occupancy offline {other.occupancy:.0%})"
    )
    if other.rate_with_its_threads != other.rate:
        share = found["share_with_its_threads"]
        print(f"{other.rate_with_its_threads:.0f} offline with the server's number of threads: {share:.0%}")
    print(f"first text after {firsts[len(firsts) // 2]:.3f} s (median), {firsts[-1]:.3f} s (most)")
    print(f"overload of {6 * clients} at once: {refused}")


if __name__ == "__main__":
    main()
