"""The vLLM engine: token ids in, token ids and log-probabilities out, weights synced after every update.

Servers are verified after every weight sync. Each sync uses a name that no session has used, so a server
without the new weights cannot respond. The server then returns log-probabilities of a fixed probe, which
must match the current policy.

Adapters are loaded by name (`/v1/load_lora_adapter`), full weights through the `reload_weights` method of
vLLM's workers. Both read files in a folder that trainer and servers share. Other runs may use that folder
too, so each session writes to its own sub-folder and deletes nothing else.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import CompletionSink
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
from groupwise.tracking.run_folder import LOGGER

OLDEST = (0, 28)
"""Oldest supported vLLM version."""
BASE = "policy"
"""Served name of the model without adapters, as set by `groupwise serve-rollouts`."""
UNLOAD_SECONDS = 5.0
"""Timeout for unloading a session's adapters at its end."""
TOOL_CHECK_SECONDS = 1.0
"""How often to look for tools that have exceeded their time limit, while servers generate."""


class ToolSink(CompletionSink, Protocol):
    """Receives completions, and reports when the tools of a conversation are done."""

    on_result: Callable[[], None] | None


class VllmEngine:
    """Generates completions on servers that hold a copy of the policy."""

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
        """Makes file and adapter names unique across runs and restarts.

        All processes use the leader's session after the first weight sync.
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
        """Sync the current weights to the servers; inside this context, calls generate with them."""
        if self._sent != self.policy.version:
            gathered = self.policy.gathered()
            with self.policy.whole():
                self.probe.take()
            self.processes.lead(lambda: self._publish(gathered))
            self._sent = self.policy.version
            self._adopt_leader_state()
        yield

    def _adopt_leader_state(self) -> None:
        """Copy the leader's view of the servers to all processes."""
        versions = {server.address: server.version for server in self.servers.all}
        state = (versions, self.probe.rounding, self.session)
        versions, self.probe.rounding, self.session = self.processes.gather(state)[0]
        for server in self.servers.all:
            server.version = versions[server.address]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return each request's completions; a group is sent to a server as one request."""
        assert self._sent is not None, "the servers have no weights yet; call generate inside `ready`"
        return list(self._pool.map(lambda request: self._group(request, sampling), requests))

    def converse(
        self, requests: Sequence[Request], sampling: Sampling, sink: ToolSink, *, tokens: int, turns: int
    ) -> None:
        """Run each conversation by itself: it requests its next turn as soon as its tools are done.

        A turn is one request, so the members of a group do not wait for each other either. The server's
        prefix cache holds what they share.
        """
        assert self._sent is not None, "the servers have no weights yet; call converse inside `ready`"
        events: SimpleQueue[tuple[tuple[int, int], Future[list[Completion]]] | None] = SimpleQueue()
        sink.on_result = partial(events.put, None)

        def deliver(key: tuple[int, int], done: Future[list[Completion]]) -> None:
            events.put((key, done))

        sizes = [len(request.seeds) for request in requests]
        pool = ThreadPoolExecutor(min(sum(sizes), self.config.requests * max(sizes, default=1)) or 1)
        waiting, next_requests, submitted = 0, requests, 0
        try:
            while True:
                for number, request in enumerate(next_requests, start=submitted):
                    for member, seed in enumerate(request.seeds):
                        one = pool.submit(self._group, replace(request, seeds=(seed,)), sampling)
                        one.add_done_callback(partial(deliver, (number, member)))
                        waiting += 1
                submitted += len(next_requests)
                if not waiting:
                    return  # no tools are running, or `ready` would have waited for them
                with suppress(Empty):
                    event = events.get(timeout=TOOL_CHECK_SECONDS)
                    if event is not None:
                        (number, member), done = event
                        waiting -= 1
                        (completion,) = done.result()
                        sink.finished(number, member, completion)
                next_requests = sink.ready(wait=not waiting)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def release(self) -> None:
        """Do nothing: this engine holds no memory in this process."""

    def make_room(self, needed: int) -> None:
        """Do nothing: this engine holds no memory in this process."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.processes.leader:
            shutil.rmtree(self.exchange / self.session, ignore_errors=True)
            if self.policy.has_adapter and self._sent is not None:
                with ThreadPoolExecutor(len(self.servers.all)) as pool:
                    pool.map(self._unload_session, self.servers.all)

    def _unload_session(self, server: VllmServer) -> None:
        with suppress(Exception):  # the run is over and the server may be down: errors do not matter
            unload(server, session=self.session, seconds=UNLOAD_SECONDS)

    def _folder(self, version: int | None) -> Path:
        return self.exchange / self.session / f"version-{version}"

    @property
    def _name(self) -> str:
        return f"{self.session}-{self._sent}" if self.policy.has_adapter else BASE

    def _publish(self, gathered: dict[str, Tensor] | None) -> None:
        """Write the weights, load them on every server that is up, and verify them."""
        version, before = self.policy.version, self._sent
        self.policy.save(self._folder(version), gathered=gathered)
        self._sent = version
        if before is not None:
            self.servers.do(self._sync)  # at least one server must succeed
        for server in self.servers.all:
            try:
                self._sync(server)
            except ServerUnavailable as error:
                if before is None:
                    raise ConfigError(
                        f"{server.address} cannot load the policy's weights: {error}"
                    ) from error
                self.servers.failed(server, error)
        if before is not None and before != version:
            shutil.rmtree(self._folder(before), ignore_errors=True)

    def _sync(self, server: VllmServer) -> None:
        """Load the current weights on a server and verify them, unless it already has them."""
        with server.lock:
            if server.version == self._sent:
                return
            try:
                self._load_weights(server)
            except ServerRefused as error:
                raise ConfigError(f"a rollout server cannot load the policy's weights: {error}") from error
            server.version = self._sent

    def _load_weights(self, server: VllmServer) -> None:
        folder = str(self._folder(self._sent))
        seconds = self.config.request_seconds
        if self.policy.has_adapter:
            load_adapter(server, self._name, folder, seconds=seconds)
            with retry_unknown_names():
                unload(server, session=self.session, seconds=seconds, keep=self._name)
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            server.request("/collective_rpc", body, seconds=seconds)
            server.request("/reset_prefix_cache", {}, seconds=seconds)
        with retry_unknown_names():
            self.probe.check(self._probe_logprobs(server), server.address)

    def _probe_logprobs(self, server: VllmServer) -> list[float]:
        response = server.request(
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
        entries = response["choices"][0]["prompt_logprobs"][1:]
        pairs = zip(self.probe.tokens[1:], entries, strict=True)
        return [float(entry[str(token)]["logprob"]) for token, entry in pairs]

    def _group(self, request: Request, sampling: Sampling) -> list[Completion]:
        group: list[Completion] = self.servers.do(lambda server: self._complete(server, request, sampling))
        return group

    def _complete(self, server: VllmServer, request: Request, sampling: Sampling) -> list[Completion]:
        """Request a group's completions from one server; sync the weights first if it lost them."""
        self._sync(server)
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
            with retry_unknown_names():
                response = server.request("/v1/completions", body, seconds=self.config.request_seconds)
        except ServerRefused as error:
            raise ConfigError(f"a rollout server rejected a request: {error}") from error
        choices = sorted(response["choices"], key=lambda choice: choice["index"])
        if len(choices) != len(request.seeds):
            raise ServerUnavailable(
                f"the server returned {len(choices)} completions instead of {len(request.seeds)}"
            )
        return [self._completion(choice) for choice in choices]

    def _completion(self, choice: dict[str, Any]) -> Completion:
        tokens = tuple(choice["token_ids"])
        logprobs = tuple(float(x) for x in choice["logprobs"]["token_logprobs"])
        finish: Finish = "stop"
        if choice["finish_reason"] == "length":
            finish = "length"
        elif choice["finish_reason"] != "stop":
            raise ServerUnavailable(f"a completion has the finish reason {choice['finish_reason']!r}")
        elif tokens and tokens[-1] in self.policy.end_tokens:
            finish = "end"
        # vLLM does not return entropies; the negative log-probability has the entropy as its mean.
        surprisal = tuple(-x for x in logprobs)
        return Completion(tokens=tokens, logprobs=logprobs, entropies=surprisal, finish=finish)


@contextmanager
def retry_unknown_names() -> Iterator[None]:
    """Make a 404 retryable: the server was restarted and needs the adapter again."""
    try:
        yield
    except ServerRefused as error:
        if error.code == 404:
            raise ServerUnavailable(str(error)) from error
        raise


def check_logprobs(server: VllmServer, *, seconds: float) -> None:
    """Raise ConfigError if a server's log-probabilities are not those of its sampling distribution."""
    only = {"model": BASE, "prompt": [0], "max_tokens": 1, "allowed_token_ids": [1], "logprobs": 0}
    try:
        response = server.request("/v1/completions", only, seconds=seconds)
        logprob = response["choices"][0]["logprobs"]["token_logprobs"][0]
    except (ServerUnavailable, ServerRefused, LookupError, TypeError) as error:
        raise ConfigError(f"the server at {server.address} cannot complete a prompt: {error}") from error
    if logprob != 0.0:  # the only allowed token has probability 1
        raise ConfigError(
            f"the server at {server.address} returns log-probabilities before temperature and truncation; "
            "start it with --logprobs-mode processed_logprobs, as groupwise serve-rollouts does"
        )


def load_adapter(server: VllmServer, name: str, folder: str, *, seconds: float) -> None:
    """Load an adapter. A name already loaded means that an earlier attempt succeeded without a response."""
    try:
        server.request("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, seconds=seconds)
    except ServerRefused as error:
        if "already been loaded" not in str(error):
            raise ConfigError(
                f"a rollout server cannot load the adapter in {folder}: {error}; give the server access to "
                "that folder (engine.exchange) and set its --max-lora-rank to at least lora.r"
            ) from error


def unload(server: VllmServer, *, session: str, seconds: float, keep: str | None = None) -> None:
    """Unload a session's adapters, except `keep`."""
    for model in server.request("/v1/models", seconds=seconds)["data"]:
        if model["id"].startswith(f"{session}-") and model["id"] != keep:
            server.request("/v1/unload_lora_adapter", {"lora_name": model["id"]}, seconds=seconds)


def check_server(server: VllmServer, *, adapters: bool, seconds: float) -> None:
    """Raise ConfigError if a server is too old or was started without the options that training needs."""
    try:
        version = str(server.request("/version", seconds=seconds)["version"])
        paths = server.request("/openapi.json", seconds=seconds)["paths"]
        models = {model["id"] for model in server.request("/v1/models", seconds=seconds)["data"]}
    except (ServerUnavailable, ServerRefused, KeyError, TypeError) as error:
        raise ConfigError(
            f"no vLLM server responds at {server.address} ({error}); start one with groupwise serve-rollouts"
        ) from error
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise ConfigError(f"the server at {server.address} runs vLLM {version}; upgrade to 0.28 or newer")
    needed = "/v1/load_lora_adapter" if adapters else "/collective_rpc"
    if needed not in paths or BASE not in models:
        raise ConfigError(
            f"the server at {server.address} lacks options that training needs; start it with the command "
            "that groupwise serve-rollouts prints"
        )
