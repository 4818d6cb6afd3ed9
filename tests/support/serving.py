"""Servers: ours in threads of the test's process, with clients of it, and those of scripts."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from groupwise.engine.serving.serving_engine import ServingEngine
from groupwise.model.policy import Policy
from groupwise.serve.ipc import EngineEndpoint
from groupwise.serve.openai_server import OpenAIServer
from tests.support.small_models import Scripted, policy_of, small_model, tiny_tokenizer


@contextmanager
def serving(policy: Policy, **settings: Any) -> Iterator[tuple[ServingEngine, int]]:
    """Both sides of a server, in threads, and its port."""
    usual = {"slots": 8, "context": 512, "waiting": 64, "api_key": None, "allowed_hosts": (), "cors": ()}
    chosen = {**usual, **settings}
    ours, theirs = Pipe()
    side = EngineEndpoint(policy, ours, **{key: chosen[key] for key in ("slots", "context", "waiting")})
    ports: queue.Queue[int] = queue.Queue()

    async def front() -> None:
        limits = {key: chosen[key] for key in ("slots", "context", "api_key", "allowed_hosts", "cors")}
        await OpenAIServer(policy, theirs, model="small", **limits).run("127.0.0.1", 0, ready=ports.put)

    threads = [threading.Thread(target=side.run), threading.Thread(target=asyncio.run, args=(front(),))]
    for thread in threads:
        thread.start()
    try:
        yield side.engine, ports.get(timeout=30)
    finally:
        with socket.socket(fileno=os.dup(ours.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)  # each side finds the other gone
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        ours.close()
        theirs.close()


def ask(port: int, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    connection.request(method, path, body=None if body is None else data, headers=headers)
    response = connection.getresponse()
    read = response.read()
    connection.close()
    if response.headers["Content-Type"] == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in read.decode().split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return response.status, [json.loads(line) for line in lines]
    return response.status, json.loads(read)


def chat(text: str, **settings: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], **settings}


def scripted(text: str) -> Policy:
    """A policy that writes this after any prompt of one token."""
    tokenizer = tiny_tokenizer()
    script = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Scripted(policy_of(small_model()), script)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@contextmanager
def script_server(script: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a script that serves on the port in its argument; yield the port and the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(script), str(port)]) as server:
        try:
            for _ in range(600):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield port, server
        finally:
            server.kill()
