"""HTTP to servers that may die, hang or fail: bounded retries with back-off, and others take over."""

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

from groupwise.errors import ConfigError, GroupwiseError, InvariantError
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.ops.equivalence import in_mode
from groupwise.model.ops.logprobs import token_logprobs
from groupwise.model.policy import Policy
from groupwise.records import Sampling

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds a server that failed is left alone; doubled each time."""


class ServerUnavailable(Exception):
    """A server did not answer, or says that it cannot now: it may later."""


class ServerRefused(Exception):
    """A server understood and said no."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(slots=True)
class VllmServer:
    """One server, and how it has been doing."""

    address: str
    version: object = None
    """Which weights it is known to have; None: unknown, as after it was gone."""
    busy: int = 0
    failures: int = 0
    """In a row."""
    rest_until: float = 0.0
    answered: float = 0.0
    """When it last answered anything well."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever brings it new weights."""

    def ask(self, path: str, body: object = None, *, seconds: float) -> Any:
        """Send JSON (or ask without a body) and return the JSON that comes back, or the text."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.address + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=seconds) as answer:
                text = answer.read()
        except HTTPError as error:
            words = error.read().decode(errors="replace")[:300]
            if error.code >= 500 or error.code == 429:
                raise ServerUnavailable(f"{path} answered {error.code}: {words}") from error
            raise ServerRefused(error.code, f"{self.address}{path} answered {error.code}: {words}") from error
        except (OSError, HTTPException) as error:
            raise ServerUnavailable(f"{path}: {error or type(error).__name__}") from error
        self.answered = time.monotonic()
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")

    def failed(self) -> None:
        """Rest a while; what else was under way there fails with it and counts once."""
        self.version = None  # it may come back as another process, without what it was given
        now = time.monotonic()
        if now >= self.rest_until:
            self.failures += 1
            self.rest_until = now + min(FIRST_PAUSE * 2 ** (self.failures - 1), LONGEST_PAUSE)


class VllmServers:
    """All of them: work goes to whoever is up and least busy."""

    def __init__(
        self, addresses: Sequence[str], *, patience: float, say: Callable[[str], None], first: int = 0
    ) -> None:
        for address in addresses:
            if urlsplit(address).scheme not in ("http", "https"):
                raise ConfigError(f"engine.servers are addresses such as http://host:8000; got {address!r}")
        order = [*addresses[first % len(addresses) :], *addresses[: first % len(addresses)]]
        self.all = [VllmServer(address.rstrip("/")) for address in order]
        self.patience = patience
        self.say = say
        self.retries = 0
        """Requests that had to be sent again."""
        self._lock = threading.Lock()

    def do(self, work: Callable[[VllmServer], Any]) -> Any:
        """Let some server do the work, another one or the same one later if it fails."""
        asked = time.monotonic()
        while True:
            server = self._take()
            try:
                found = work(server)
            except ServerUnavailable as error:
                self.failed(server, error)
                # Silence counts from the last answer to anything, of any server.
                answered = max(asked, *(each.answered for each in self.all))
                if time.monotonic() > answered + self.patience:
                    raise gone(self.patience, server, error) from error
            else:
                if server.failures:
                    self.say(f"rollout server {server.address} is back")
                    server.failures = 0
                return found
            finally:
                with self._lock:
                    server.busy -= 1

    def failed(self, server: VllmServer, error: ServerUnavailable) -> None:
        """Leave a server alone for a while, and say so the first time."""
        with self._lock:
            self.retries += 1
            well = server.failures == 0
            server.failed()
        if well:
            self.say(f"rollout server {server.address} does not answer ({error}); trying again")

    def _take(self) -> VllmServer:
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


def gone(seconds: float, server: VllmServer, error: Exception) -> GroupwiseError:
    return InvariantError(
        f"no rollout server has answered for {seconds:g} s (engine.patience); the last try, "
        f"{server.address}: {error}; start one (groupwise serve-rollouts) and go on with --resume"
    )


LENGTH = 64
LIMIT = 0.2
"""Nats a token past which a server has another model from the start, whatever the rounding in bfloat16."""
FINEST = 1e-5
"""Rounding in float32; less is luck."""
CLEARLY = 4.0
"""Past this many times the rounding, a difference is one of weights."""


class WeightCheck:
    """A text of random tokens, whose log-probabilities move with every update more than a likely text's."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        ordinary = min(policy.head_weight.shape[0], policy.tokenizer.vocab_size or 1 << 30)
        self.tokens = tuple(int(t) for t in np.random.default_rng(0).integers(0, ordinary, LENGTH))
        self.now: list[float] | None = None
        self.rounding: float | None = None
        """By how much server and trainer differ with the same weights: what the first check finds."""

    @torch.no_grad()
    def take(self) -> None:
        """Compute the policy's log-probabilities of now."""
        tokens_T = torch.tensor(self.tokens, device=self.policy.device)
        layout = PackedLayout.build([(1, (LENGTH - 2,))], device=tokens_T.device)
        positions_T = torch.arange(LENGTH - 1, device=tokens_T.device)
        with in_mode(self.policy.model, training=False):
            hidden_TM = self.policy.hidden(tokens_T[:-1], positions_T, layout)
        logprobs_N, _ = token_logprobs(
            hidden_TM,
            self.policy.head_weight,
            self.policy.head_bias,
            tokens_T[1:],
            Sampling(),
            entropy_gradient=False,
        )
        self.now = logprobs_N.float().cpu().tolist()

    def check(self, served: Sequence[float], address: str) -> None:
        """Stop the run when a server's log-probabilities are not the policy's."""
        assert self.now is not None, "the policy's own come first"
        gap = distance(served, self.now)
        if not gap <= LIMIT:
            raise InvariantError(
                f"the rollout server {address} has other weights than the trainer: its log-probabilities "
                f"differ by {gap:.3f} nats a token on a fixed text; is it the same model and dtype?"
            )
        if self.rounding is None:
            self.rounding = max(gap, FINEST)
        if gap > CLEARLY * self.rounding:
            raise InvariantError(
                f"the rollout server {address} has not taken the update, or only a part of it: its "
                f"log-probabilities differ from the trainer's by {gap:.2g} nats a token on a fixed text, "
                f"where rounding alone makes {self.rounding:.2g}"
            )


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))
