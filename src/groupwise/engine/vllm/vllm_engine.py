"""Generation by vLLM servers: token ids in, token ids and log-probabilities out, weights after every update.

A server is told everything and believed nothing. New weights get a name that no session has used, so one
that missed them cannot answer; and after each update it is asked for log-probabilities of a fixed probe,
which must be those of the policy now, not those of before.

Adapters are loaded by name (`/v1/load_lora_adapter`); whole weights through `reload_weights` of vLLM's
workers. Both read files in a folder that trainer and servers share, and others may share it too: each
session writes into a sub-folder of its own and deletes nothing else.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from groupwise.config.schema import EngineConfig
from groupwise.engine.vllm.vllm_client import (
    ServerRefused,
    ServerUnavailable,
    VllmServer,
    VllmServers,
    WeightCheck,
)
from groupwise.errors import ConfigError
from groupwise.model.policy import Policy
from groupwise.parallel.processes import Processes
from groupwise.records import Completion, Finish, Request, Sampling
from groupwise.tracking.run_log import LOGGER

OLDEST = (0, 28)
"""The first version whose interface this module was made for."""
BASE = "policy"
"""What servers call the model without adapters: `groupwise serve-rollouts` says so."""
FAREWELL = 5.0
"""Seconds that a server has to drop the adapters of a session that ends."""


class VllmEngine:
    """Continues prompts on servers that hold a copy of the policy."""

    unrepeatable = True

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        *,
        exchange: Path,
        processes: Processes | None = None,
        say: Callable[[str], None] = LOGGER.warning,
    ) -> None:
        self.policy = policy
        self.config = config
        self.processes = processes or Processes()
        self.exchange = exchange.resolve()
        self.session = secrets.token_hex(8)
        """Sets files and adapters apart from those of others, and of this run before it was stopped.

        The leader's, once servers have weights.
        """
        self.servers = VllmServers(
            config.servers, patience=config.patience, say=say, first=self.processes.rank
        )
        self.probe = WeightCheck(policy)
        self._sent: int | None = None
        self._pool = ThreadPoolExecutor(config.requests)
        for server in self.servers.all:
            check_server(server, adapters=policy.has_adapter, seconds=config.request_seconds)
            check_logprobs(server, seconds=config.request_seconds)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """While the block lasts, calls answer with the policy as it was when it began."""
        if self._sent != self.policy.version:
            gathered = self.policy.gathered()
            with self.policy.whole():
                self.probe.take()
            self.processes.lead(lambda: self._publish(gathered))
            self._sent = self.policy.version
            self._believe_the_leader()
        yield

    def _believe_the_leader(self) -> None:
        """Servers that one process has brought the weights to have them for all."""
        brought = {server.address: server.version for server in self.servers.all}
        known = (brought, self.probe.rounding, self.session)
        brought, self.probe.rounding, self.session = self.processes.gather(known)[0]
        for server in self.servers.all:
            server.version = brought[server.address]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return each request's completions; a group goes to a server as one request."""
        assert self._sent is not None, "the servers have no weights yet: generate inside `ready`"
        return list(self._pool.map(lambda request: self._group(request, sampling), requests))

    def release(self) -> None:
        """Nothing of this process's memory is held."""

    def make_room(self, needed: int) -> None:
        """Nothing of this process's memory is held."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.processes.leader:
            shutil.rmtree(self.exchange / self.session, ignore_errors=True)
            if self.policy.has_adapter and self._sent is not None:
                with ThreadPoolExecutor(len(self.servers.all)) as pool:
                    pool.map(self._take_leave, self.servers.all)

    def _take_leave(self, server: VllmServer) -> None:
        with suppress(Exception):  # whatever a server that may be gone answers, the run is over
            unload(server, session=self.session, seconds=FAREWELL)

    def _folder(self, version: int | None) -> Path:
        return self.exchange / self.session / f"version-{version}"

    @property
    def _name(self) -> str:
        return f"{self.session}-{self._sent}" if self.policy.has_adapter else BASE

    def _publish(self, gathered: dict[str, Tensor] | None) -> None:
        """Write the weights, bring them to every server that is up, and make sure that they arrived."""
        version, before = self.policy.version, self._sent
        self.policy.save(self._folder(version), gathered=gathered)
        self._sent = version
        if before is not None:
            self.servers.do(self._bring)  # at least one must have them
        for server in self.servers.all:
            try:
                self._bring(server)
            except ServerUnavailable as error:
                if before is None:
                    raise ConfigError(
                        f"{server.address} cannot take the policy's weights: {error}"
                    ) from error
                self.servers.failed(server, error)
        if before is not None and before != version:
            shutil.rmtree(self._folder(before), ignore_errors=True)

    def _bring(self, server: VllmServer) -> None:
        """Give a server the weights of now, and check them, unless it is known to have them."""
        with server.lock:
            if server.version == self._sent:
                return
            try:
                self._give(server)
            except ServerRefused as error:
                raise ConfigError(f"a rollout server cannot take the policy's weights: {error}") from error
            server.version = self._sent

    def _give(self, server: VllmServer) -> None:
        folder = str(self._folder(self._sent))
        seconds = self.config.request_seconds
        if self.policy.has_adapter:
            load_adapter(server, self._name, folder, seconds=seconds)
            with knowing_names():
                unload(server, session=self.session, seconds=seconds, keep=self._name)
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            server.ask("/collective_rpc", body, seconds=seconds)
            server.ask("/reset_prefix_cache", {}, seconds=seconds)
        with knowing_names():
            self.probe.check(self._probe_logprobs(server), server.address)

    def _probe_logprobs(self, server: VllmServer) -> list[float]:
        answer = server.ask(
            "/v1/completions",
            {
                "model": self._name,
                "prompt": list(self.probe.tokens),
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
            },
            seconds=self.config.request_seconds,
        )
        given = answer["choices"][0]["prompt_logprobs"][1:]
        pairs = zip(self.probe.tokens[1:], given, strict=True)
        return [float(entry[str(token)]["logprob"]) for token, entry in pairs]

    def _group(self, request: Request, sampling: Sampling) -> list[Completion]:
        found: list[Completion] = self.servers.do(lambda server: self._ask(server, request, sampling))
        return found

    def _ask(self, server: VllmServer, request: Request, sampling: Sampling) -> list[Completion]:
        """Ask one server for a group's answers; one that has lost the weights is given them again."""
        self._bring(server)
        body = {
            "model": self._name,
            "prompt": list(request.prompt),
            "n": len(request.seeds),
            "seed": request.seeds[0] % (1 << 31),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(self.policy.end_tokens),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        try:
            with knowing_names():
                answer = server.ask("/v1/completions", body, seconds=self.config.request_seconds)
        except ServerRefused as error:
            raise ConfigError(f"a rollout server refuses a request: {error}") from error
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != len(request.seeds):
            raise ServerUnavailable(f"it gave {len(choices)} answers instead of {len(request.seeds)}")
        return [self._completion(choice) for choice in choices]

    def _completion(self, choice: dict[str, Any]) -> Completion:
        tokens = tuple(choice["token_ids"])
        logprobs = tuple(float(x) for x in choice["logprobs"]["token_logprobs"])
        finish: Finish = "stop"
        if choice["finish_reason"] == "length":
            finish = "length"
        elif choice["finish_reason"] != "stop":
            raise ServerUnavailable(f"an answer ended by {choice['finish_reason']!r}")
        elif tokens and tokens[-1] in self.policy.end_tokens:
            finish = "end"
        # Servers do not tell entropies; a token's surprise has that mean.
        surprise = tuple(-x for x in logprobs)
        return Completion(tokens=tokens, logprobs=logprobs, entropies=surprise, finish=finish)


@contextmanager
def knowing_names() -> Iterator[None]:
    """A server that no longer knows a name was restarted between two requests: it may be given it again."""
    try:
        yield
    except ServerRefused as error:
        if error.code == 404:
            raise ServerUnavailable(str(error)) from error
        raise


def check_logprobs(server: VllmServer, *, seconds: float) -> None:
    """Refuse a server whose log-probabilities are not of the distribution it draws from."""
    only = {"model": BASE, "prompt": [0], "max_tokens": 1, "allowed_token_ids": [1], "logprobs": 0}
    try:
        answer = server.ask("/v1/completions", only, seconds=seconds)
        logprob = answer["choices"][0]["logprobs"]["token_logprobs"][0]
    except (ServerUnavailable, ServerRefused, LookupError, TypeError) as error:
        raise ConfigError(f"the server at {server.address} does not complete a prompt: {error}") from error
    if logprob != 0.0:  # the only token allowed is certain
        raise ConfigError(
            f"the server at {server.address} tells log-probabilities without temperature and cuts: start it "
            "with --logprobs-mode processed_logprobs, as groupwise serve-rollouts does"
        )


def load_adapter(server: VllmServer, name: str, folder: str, *, seconds: float) -> None:
    """Load an adapter; where the name is known, an earlier try succeeded whose answer did not arrive."""
    try:
        server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, seconds=seconds)
    except ServerRefused as error:
        if "already been loaded" not in str(error):
            raise ConfigError(
                f"a rollout server cannot load the adapter in {folder}: {error}; it must see that folder "
                "(engine.exchange), and its --max-lora-rank must reach lora.r"
            ) from error


def unload(server: VllmServer, *, session: str, seconds: float, keep: str | None = None) -> None:
    """Drop a session's adapters but the one to keep."""
    for model in server.ask("/v1/models", seconds=seconds)["data"]:
        if model["id"].startswith(f"{session}-") and model["id"] != keep:
            server.ask("/v1/unload_lora_adapter", {"lora_name": model["id"]}, seconds=seconds)


def check_server(server: VllmServer, *, adapters: bool, seconds: float) -> None:
    """Refuse a server that is too old, or was started without what training needs."""
    try:
        version = str(server.ask("/version", seconds=seconds)["version"])
        paths = server.ask("/openapi.json", seconds=seconds)["paths"]
        models = {model["id"] for model in server.ask("/v1/models", seconds=seconds)["data"]}
    except (ServerUnavailable, ServerRefused, KeyError, TypeError) as error:
        raise ConfigError(
            f"there is no vLLM server at {server.address} ({error}); groupwise serve-rollouts starts one"
        ) from error
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise ConfigError(f"the server at {server.address} is vLLM {version}; 0.28 or newer is needed")
    needed = "/v1/load_lora_adapter" if adapters else "/collective_rpc"
    if needed not in paths or BASE not in models:
        raise ConfigError(
            f"the server at {server.address} was not started for training: start it with what "
            "groupwise serve-rollouts prints"
        )
