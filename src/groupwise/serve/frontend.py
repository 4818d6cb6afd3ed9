"""The front-end process of the server, which handles HTTP while the main process runs the engine.

Starts the process, checks its address, and leaves a core to it on small machines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from groupwise.errors import ConfigError
from groupwise.model.load import keep_quiet, load_tokenizer
from groupwise.model.policy import Policy
from groupwise.model.tokenizer import TokenizerCodec
from groupwise.serve.openai_server import OpenAIServer

NARROW = 256
"""Largest hidden size of a model that counts as small."""


def leave_a_core(policy: Policy) -> None:
    """Use one compute thread fewer for a small model on a CPU.

    All threads of a matrix product wait for the slowest one, and the front-end process interrupts one of them
    with every token. A small model generates many tokens per second and gains little from the last core. A
    larger one generates few, and needs it. OMP_NUM_THREADS takes precedence if it is set.
    """
    small = policy.head_weight.shape[1] <= NARROW
    if policy.device.type == "cpu" and small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """Settings of the front-end process."""

    host: str
    port: int
    tokenizer: Path
    vocabulary: int
    model: str
    context: int
    slots: int
    api_key: str | None
    allowed_hosts: tuple[str, ...] = ()


def start_front() -> Connection:
    """Start the process, which then waits for its `StartupConfig`, and return our end of the pipe."""
    processes = get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=run_front, args=(theirs,), name="groupwise-front", daemon=True)
    # Ctrl-C also reaches the child, which must ignore SIGINT from the start: it ends with this process.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()
    return ours


def check_address(host: str, port: int) -> None:
    """Raise ConfigError if the address cannot be bound, before a model is loaded."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(address)
    except (OSError, UnicodeError) as error:  # some host names cannot be resolved
        raise cannot_listen(host, port, getattr(error, "strerror", None) or str(error)) from error


def cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    advice = "; choose another port with --port" if "already in use" in reason else ""
    return ConfigError(f"cannot listen on {host}:{port}: {reason}{advice}")


def open_front(connection: Connection, startup: StartupConfig) -> int:
    """Make the process listen, and return the port."""
    connection.send(startup)
    port: int | str = connection.recv()
    if isinstance(port, str):
        raise cannot_listen(startup.host, startup.port, port)
    return port


def run_front(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in case it is not inherited
    keep_quiet()
    try:
        startup: StartupConfig = connection.recv()
    except EOFError:
        return
    codec = TokenizerCodec(load_tokenizer(startup.tokenizer), vocabulary=startup.vocabulary)
    server = OpenAIServer(
        codec,
        connection,
        model=startup.model,
        context=startup.context,
        slots=startup.slots,
        api_key=startup.api_key,
        allowed_hosts=startup.allowed_hosts,
    )
    try:
        asyncio.run(server.run(startup.host, startup.port, ready=connection.send))
    except (OSError, UnicodeError) as error:
        connection.send(getattr(error, "strerror", None) or str(error))
