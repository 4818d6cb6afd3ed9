"""HTTP client for vLLM servers, and the check of their weights.

Requests to a server that dies, hangs or fails are retried with back-off, on other servers if there are any.
`WeightCheck` compares a server's log-probabilities on a fixed text with the policy's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from statistics import fmean
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import torch

from groupwise.errors import ConfigError, GroupwiseError, InvariantError, ServersGoneError
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.policy import Policy
from groupwise.records import Sampling

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds to back off from a failed server: the first and the maximum; doubled after each failure."""


class ServerUnavailable(Exception):
    """A server did not respond, or failed temporarily; the request can be retried."""


class ServerRefused(Exception):
    """A server rejected a request with a client error (4xx)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class VllmServer:
    """One server and its health."""

    address: str
    version: object = None
    """Version of the weights on the server; None: unknown, for example after a failure."""
    busy: int = 0
    failures: int = 0
    """Consecutive failures."""
    rest_until: float = 0.0
    answered: float = 0.0
    """Time of the last successful response."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the server receives new weights."""

    def request(self, path: str, body: object = None, *, seconds: float) -> Any:
        """POST `body` as JSON (GET if None) and return the parsed JSON response, or its text."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.address + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=seconds) as response:
                text = response.read()
        except HTTPError as error:
            detail = error.read().decode(errors="replace")[:300]
            if error.code >= 500 or error.code == 429:
                raise ServerUnavailable(f"{path} returned {error.code}: {detail}") from error
            message = f"{self.address}{path} returned {error.code}: {detail}"
            raise ServerRefused(error.code, message) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            cause = getattr(reason, "strerror", None) or reason or type(error).__name__
            raise ServerUnavailable(f"{path}: {cause}") from error
        self.answered = time.monotonic()
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")

    def failed(self) -> None:
        """Back off from this server; concurrent failures count once."""
        self.version = None  # it may restart without the weights
        now = time.monotonic()
        if now >= self.rest_until:
            self.failures += 1
            self.rest_until = now + min(FIRST_PAUSE * 2 ** (self.failures - 1), LONGEST_PAUSE)


class VllmServers:
    """A pool of servers; work goes to the least busy server that is up."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        patience: float,
        say: Callable[[str], None],
        first: int = 0,
        role: str = "rollout server",
    ) -> None:
        for address in addresses:
            if urlsplit(address).scheme not in ("http", "https"):
                raise ConfigError(f"engine.servers must be URLs such as http://host:8000; got {address!r}")
        order = [*addresses[first % len(addresses) :], *addresses[: first % len(addresses)]]
        self.all = [VllmServer(address.rstrip("/")) for address in order]
        self.patience = patience
        self.say = say
        self.role = role
        """What messages call a server."""
        self.retries = 0
        """Requests that were retried."""
        self._lock = threading.Lock()

    def do(self, work: Callable[[VllmServer], Any]) -> Any:
        """Run `work` on a server; on failure, retry on another server or later on the same one."""
        started = time.monotonic()
        while True:
            server = self._acquire()
            try:
                result = work(server)
            except ServerUnavailable as error:
                self.failed(server, error)
                # The timeout counts from the last successful response of any server.
                answered = max(started, *(each.answered for each in self.all))
                if time.monotonic() > answered + self.patience:
                    raise all_unavailable(self.role, self.patience, server, error) from error
            else:
                if server.failures:
                    self.say(f"{self.role} {server.address} responds again")
                    server.failures = 0
                return result
            finally:
                with self._lock:
                    server.busy -= 1

    def failed(self, server: VllmServer, error: ServerUnavailable) -> None:
        """Back off from a server, and report its first failure."""
        with self._lock:
            self.retries += 1
            first_failure = server.failures == 0
            server.failed()
        if first_failure:
            self.say(f"{self.role} {server.address} does not respond ({error}); retrying")

    def _acquire(self) -> VllmServer:
        while True:
            with self._lock:
                now = time.monotonic()
                rested = [server for server in self.all if server.rest_until <= now]
                if rested:
                    server = min(rested, key=lambda server: (server.failures, server.busy))
                    server.busy += 1
                    return server
                soonest = min(server.rest_until for server in self.all)
            time.sleep(max(0.01, min(soonest - time.monotonic(), self.patience)))


def all_unavailable(role: str, seconds: float, server: VllmServer, error: Exception) -> GroupwiseError:
    return ServersGoneError(
        f"no {role} has responded for {seconds:g} s (engine.patience); the last attempt was "
        f"{server.address}: {error}; start the {role} again and resume with --resume"
    )


LENGTH = 64
LIMIT = 0.2
"""Nats per token above which a server must have a different model: bfloat16 rounding stays below."""
MIN_ROUNDING = 1e-5
"""Lower bound on the rounding difference: that of float32."""
ROUNDING_FACTOR = 4.0
"""A difference above this multiple of the rounding means different weights."""


class WeightCheck:
    """Compares log-probabilities of random tokens, which change more with every update than those of text."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        ordinary = min(policy.head_weight.shape[0], policy.tokenizer.vocab_size or 1 << 30)
        self.tokens = tuple(int(t) for t in np.random.default_rng(0).integers(0, ordinary, LENGTH))
        self.now: list[float] | None = None
        self.rounding: float | None = None
        """Difference between server and trainer with equal weights, measured by the first check."""

    @torch.no_grad()
    def take(self) -> None:
        """Compute the log-probabilities of the current policy."""
        tokens_T = torch.tensor(self.tokens, device=self.policy.device)
        layout = PackedLayout.build([(1, (LENGTH - 2,))], device=tokens_T.device)
        positions_T = torch.arange(LENGTH - 1, device=tokens_T.device)
        with self.policy.in_eval_mode():
            hidden_TM = self.policy.hidden(tokens_T[:-1], positions_T, layout)
        logprobs_N, _ = self.policy.token_logprobs(
            hidden_TM, tokens_T[1:], Sampling(), entropy_gradient=False
        )
        self.now = logprobs_N.float().cpu().tolist()

    def check(self, served: Sequence[float], address: str) -> None:
        """Raise InvariantError if a server's log-probabilities differ from the policy's."""
        assert self.now is not None, "call `take` first"
        gap = distance(served, self.now)
        if not gap <= LIMIT:
            raise InvariantError(
                f"the rollout server {address} has other weights than the trainer: its log-probabilities "
                f"differ by {gap:.3f} nats per token on a fixed text; serve the trainer's model and dtype"
            )
        if self.rounding is None:
            self.rounding = max(gap, MIN_ROUNDING)
        if gap > ROUNDING_FACTOR * self.rounding:
            raise InvariantError(
                f"the rollout server {address} did not load the latest weights completely: its "
                f"log-probabilities differ from the trainer's by {gap:.2g} nats per token on a fixed text; "
                f"rounding explains {self.rounding:.2g}; restart the server and resume with --resume"
            )


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))
