"""How many threads compute while another process talks to clients."""

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
"""Hidden size up to which a model is small."""


def leave_a_core(policy: Policy) -> None:
    """Let one thread fewer compute where a small model runs on a CPU.

    All threads of a product wait for the slowest one, and whoever talks to clients stops one of them with
    every token. A small model writes many tokens and gains little from its last core; a larger one
    writes few, and needs it. Who says OMP_NUM_THREADS decides.
    """
    small = policy.head_weight.shape[1] <= NARROW
    if policy.device.type == "cpu" and small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """What that process needs to know."""

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
    """Start the process, which goes on to wait for its `Opening`, and return our end of the line to it."""
    processes = get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=run_front, args=(theirs,), name="groupwise-front", daemon=True)
    # Ctrl-C reaches that process too, which ends with this one: it is to ignore it from its first moment.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()
    return ours


def check_address(host: str, port: int) -> None:
    """Refuse an address that nobody can listen at, before a model is loaded for it."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except (OSError, UnicodeError) as error:  # some names of hosts cannot even be looked up
        raise cannot_listen(host, port, getattr(error, "strerror", None) or str(error)) from error


def cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    advice = "; name another port by --port" if "already in use" in reason else ""
    return ConfigError(f"cannot listen at {host}:{port}: {reason}{advice}")


def open_front(connection: Connection, opening: StartupConfig) -> int:
    """Let it listen, and return the port."""
    connection.send(opening)
    port: int | str = connection.recv()
    if isinstance(port, str):
        raise cannot_listen(opening.host, opening.port, port)
    return port


def run_front(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it is not inherited
    keep_quiet()
    try:
        opening: StartupConfig = connection.recv()
    except EOFError:
        return
    codec = TokenizerCodec(load_tokenizer(opening.tokenizer), vocabulary=opening.vocabulary)
    server = OpenAIServer(
        codec,
        connection,
        model=opening.model,
        context=opening.context,
        slots=opening.slots,
        api_key=opening.api_key,
        allowed_hosts=opening.allowed_hosts,
    )
    try:
        asyncio.run(server.run(opening.host, opening.port, ready=connection.send))
    except (OSError, UnicodeError) as error:
        connection.send(getattr(error, "strerror", None) or str(error))
