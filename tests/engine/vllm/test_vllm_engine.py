"""Generation on servers: what they answer, and what happens when they die, hang, fail or lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in_vllm import StandIn

import groupwise as gw
from groupwise.config import read_config
from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig, ToolsConfig
from groupwise.engine.engine import Engine
from groupwise.engine.vllm import vllm_client, vllm_engine
from groupwise.engine.vllm.vllm_client import MIN_ROUNDING, VllmServer
from groupwise.engine.vllm.vllm_engine import VllmEngine
from groupwise.errors import ConfigError, InvariantError
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling, derive_seed
from groupwise.rollout.collect import collect
from groupwise.rollout.tool_rollouts import Tools
from groupwise.tasks import UserFunctions
from groupwise.training import train
from tests.support.process_groups import in_processes, needs_deepspeed
from tests.support.scripted_rollouts import Babbling
from tests.support.small_runs import (
    KILL,
    SMALL,
    SignalAt,
    deterministic_metrics,
    run_artifacts,
    run_command,
    small_config,
    task_file,
)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as fake:
        yield fake


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)  # some fresh adapters, moved as below, blow rounding up
    return load_policy(ModelConfig(name="tiny", device="cpu", dtype="float32"), LoraConfig(r=4))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that failed are tried again soon."""
    monkeypatch.setattr(vllm_client, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(vllm_client, "LONGEST_PAUSE", 0.1)


def engine_for(policy: Policy, folder: Path, *servers: StandIn, **settings: Any) -> VllmEngine:
    config = EngineConfig(kind="vllm", servers=tuple(s.address for s in servers), **settings)
    return VllmEngine(policy, config, exchange=folder)


PROMPTS = [Request(prompt=(40 + n, 41, 42), seeds=(n, n + 1, n + 2)) for n in range(4)]
SAMPLING = Sampling(temperature=1.2, max_tokens=5)


def moved(policy: Policy) -> None:
    """Do to the policy what an update does."""
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter += 0.02
    policy.version += 1


def test_a_group_is_one_request_and_its_logprobs_are_the_policys(
    server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    engine = engine_for(policy, tmp_path, server)
    moved(policy)
    with engine.ready():
        groups = engine.generate(PROMPTS, SAMPLING)
    assert server.asked == 4
    assert [len(group) for group in groups] == [3, 3, 3, 3]
    assert_drawn_by(policy, groups)


def test_a_conversation_goes_on_as_soon_as_its_tools_are_done(
    server: StandIn, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first member's turn arrives only after another member has asked for its second turn."""
    engine = engine_for(policy, tmp_path, server)
    monkeypatch.setattr(vllm_engine, "TOOL_CHECK_SECONDS", 60.0)  # results of tools wake the engine
    request, second_turn, first = VllmServer.request, threading.Event(), threading.Lock()
    prompts: list[int] = []
    met: list[bool] = []

    def held(server: VllmServer, path: str, body: Any = None, **options: Any) -> Any:
        answer = request(server, path, body, **options)
        if path != "/v1/completions" or "return_token_ids" not in body:
            return answer
        prompts.append(len(body["prompt"]))
        if prompts[-1] > min(prompts):
            second_turn.set()
        elif first.acquire(blocking=False):
            met.append(second_turn.wait(10))
        choices = [{**choice, "finish_reason": "stop"} for choice in answer["choices"]]
        return {**answer, "choices": choices}  # no turn is cut off

    def look(query: str) -> str:
        """Look something up."""
        time.sleep(0.05)
        return query

    monkeypatch.setattr(VllmServer, "request", held)
    with engine.ready():
        (group,) = collect(
            [gw.Example({"q": "a"})],
            ask=lambda example: "ask",
            codec=Babbling(policy),
            engine=engine,
            sampling=SAMPLING,
            group_size=3,
            seed_parts=(0,),
            tools=Tools.of([look], ToolsConfig(max_turns=3, max_tokens=300)),
        )
    assert met == [True]
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 3, 3]
    assert [rollout.member for rollout in group.rollouts] == [0, 1, 2]
    for rollout in group.rollouts:
        assert [call.result for call in rollout.calls] == ["5", "5"]  # each turn has five tokens


def test_servers_that_are_gone_end_conversations_too(server: StandIn, policy: Policy, tmp_path: Path) -> None:
    engine = engine_for(policy, tmp_path, server, patience=0.1)
    with engine.ready():
        server.mood = "dead"
        with pytest.raises(InvariantError, match="no rollout server has responded"):
            collect(
                [gw.Example({"q": "a"})],
                ask=lambda example: "ask",
                codec=Babbling(policy),
                engine=engine,
                sampling=SAMPLING,
                group_size=2,
                seed_parts=(0,),
                tools=Tools.of([look_up], ToolsConfig()),
            )


def look_up(query: str) -> str:
    """Look something up."""
    return query


def assert_drawn_by(policy: Policy, groups: Sequence[Sequence[Completion]]) -> None:
    """The same seeds through the policy here draw the same tokens with the same log-probabilities."""
    requests = [
        Request(prompt=r.prompt, seeds=tuple(derive_seed(r.seeds[0], member) for member in range(3)))
        for r in PROMPTS
    ]
    own = Engine(policy, EngineConfig()).generate(requests, SAMPLING)
    for theirs, ours in zip(groups, own, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.finish == other.finish


def test_each_update_brings_new_weights_once_and_drops_the_old(
    server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    engine = engine_for(policy, tmp_path, server)
    for version in range(3):
        for _ in range(2):
            with engine.ready():
                engine.generate(PROMPTS[:1], SAMPLING)
        assert len(server.loaded) == 1
        assert server.loaded[0].endswith(f"-{version}")
        assert [path.name for path in tmp_path.glob("*/*")] == [f"version-{version}"]
        moved(policy)


def test_closing_deletes_nothing_but_what_was_written(
    server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "version-0").mkdir()
    engine = engine_for(policy, tmp_path, server)
    with engine.ready():
        assert len(list(tmp_path.iterdir())) == 3
    engine.close()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "version-0"}


def test_two_runs_that_share_a_folder_keep_to_their_own_weights(policy: Policy, tmp_path: Path) -> None:
    with StandIn() as first, StandIn() as second:
        one = engine_for(policy, tmp_path, first)
        with one.ready():
            before = one.generate(PROMPTS, SAMPLING)
        apart = load_policy(ModelConfig(name="tiny", device="cpu", dtype="float32"), LoraConfig(r=4))
        moved(apart)
        apart.version = policy.version
        other = engine_for(apart, tmp_path, second)
        with other.ready(), one.ready():
            first.mood = "forgetful"  # the weights are read from the folder again
            assert one.generate(PROMPTS, SAMPLING) == before
            one.close()
            second.mood = "forgetful"
            other.generate(PROMPTS, SAMPLING)


def test_a_session_never_meets_the_adapters_of_one_that_was_killed(
    server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    with engine_for(policy, tmp_path, server).ready():
        left = list(server.loaded)
    moved(policy)
    policy.version = 0  # as a new process counts
    engine = engine_for(policy, tmp_path, server)
    with engine.ready():
        assert engine.probe.rounding == MIN_ROUNDING
        groups = engine.generate(PROMPTS, SAMPLING)
    assert [name for name in server.loaded if name not in left] == [f"{engine.session}-0"]
    assert_drawn_by(policy, groups)


def test_an_adapter_whose_loading_was_not_confirmed_is_taken_for_loaded(
    server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    engine = engine_for(policy, tmp_path, server)
    with engine.ready():
        for known in engine.servers.all:
            known.version = None
        engine.generate(PROMPTS, SAMPLING)
    assert len(server.loaded) == 1


def test_a_session_that_ends_takes_its_adapters_along(policy: Policy, tmp_path: Path) -> None:
    with StandIn() as first, StandIn() as second:
        first.loaded.append("of-another")
        engine = engine_for(policy, tmp_path, first, second)
        with engine.ready():
            assert len(first.loaded) == 2
        engine.close()
        assert (first.loaded, second.loaded) == (["of-another"], [])


@pytest.mark.parametrize("mood", ["dead", "hanging", "broken"])
def test_closing_waits_for_no_server(
    mood: str, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "UNLOAD_SECONDS", 1.0)
    with StandIn() as well, StandIn() as first, StandIn() as second:
        engine = engine_for(policy, tmp_path, first, well, second)
        with engine.ready():
            first.mood = second.mood = mood
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 2.9  # a hanging one answers after 3 s
        assert well.loaded == []


def test_a_run_that_was_killed_and_goes_on_learns_what_it_would_have(server: StandIn, tmp_path: Path) -> None:
    task = str(task_file(tmp_path))
    where = (*SMALL, f"run.output_dir={tmp_path}", "engine.kind=vllm", f"engine.servers=[{server.address}]")
    words = ("train", task, *where, "lora.r=4", "optim.learning_rate=1e-3")
    assert run_command(*words, "run.name=whole").code == 0
    assert server.loaded == []
    killed = run_command(*words, "run.name=run", signals=[SignalAt("step-000003", KILL)])
    assert killed.code == -KILL
    assert len(server.loaded) == 1
    assert run_command("train", "--resume", str(tmp_path / "run")).code == 0
    assert run_artifacts(tmp_path / "run") == run_artifacts(tmp_path / "whole")
    assert not (tmp_path / "run" / "serving").exists()


@pytest.mark.parametrize("named", [False, True])
def test_a_run_leaves_no_weights_for_servers_behind(named: bool, server: StandIn, tmp_path: Path) -> None:
    task_file(tmp_path)
    shared = tmp_path / "shared"
    over = ["engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4", "run.max_steps=2"]
    run = train(small_config(tmp_path, *over, *[f"engine.exchange={shared}"] * named))
    assert not (run / "serving").exists()
    assert not named or list(shared.iterdir()) == []


def test_a_server_that_keeps_the_old_weights_stops_the_run(
    server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    engine = engine_for(policy, tmp_path, server)
    with engine.ready():
        pass
    server.mood = "stale"
    with torch.no_grad():  # far less than rounding in bfloat16 would be
        for parameter in policy.trainable().values():
            parameter += 1e-4
    policy.version += 1
    with pytest.raises(InvariantError, match="did not load the latest weights completely"), engine.ready():
        pass


def test_a_server_with_other_weights_stops_the_run(server: StandIn, policy: Policy, tmp_path: Path) -> None:
    with torch.no_grad():
        server.policy.head_weight.mul_(1.5)
    engine = engine_for(policy, tmp_path, server)
    with pytest.raises(InvariantError, match="has other weights than the trainer"), engine.ready():
        pass


@pytest.mark.parametrize("mood", ["dead", "hanging", "broken"])
def test_another_server_takes_over(mood: str, policy: Policy, tmp_path: Path) -> None:
    with StandIn() as first, StandIn() as second:
        engine = engine_for(policy, tmp_path, first, second, request_seconds=1.0, requests=2)
        with engine.ready():
            first.mood = mood
            groups = engine.generate(PROMPTS, SAMPLING)
        assert [len(group) for group in groups] == [3, 3, 3, 3]
        assert second.asked == 4
        assert engine.servers.retries >= 1


@pytest.mark.parametrize("mood", ["dead", "broken"])
def test_work_waits_for_the_only_server_to_come_back(
    mood: str, server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    engine = engine_for(policy, tmp_path, server)
    with engine.ready():
        before = engine.generate(PROMPTS, SAMPLING)
        server.mood = mood

        def come_back() -> None:
            time.sleep(0.3)
            server.loaded = []  # as a new process, without adapters
            server.mood = "well"

        threading.Thread(target=come_back).start()
        again = engine.generate(PROMPTS, SAMPLING)
    assert again == before
    assert len(server.loaded) == 1


def test_a_server_that_was_restarted_between_two_requests_gets_the_weights_again(
    server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    engine = engine_for(policy, tmp_path, server)
    moved(policy)
    with engine.ready():
        before = engine.generate(PROMPTS, SAMPLING)
        server.mood = "forgetful"
        again = engine.generate(PROMPTS, SAMPLING)
    assert again == before


def test_a_server_that_was_restarted_while_it_was_given_the_weights_gets_them_again(
    server: StandIn, policy: Policy, tmp_path: Path
) -> None:
    engine = engine_for(policy, tmp_path, server)
    with engine.ready():
        pass
    moved(policy)
    server.mood = "forgetful"  # by the time of the first request with the new name
    with engine.ready():
        assert [len(group) for group in engine.generate(PROMPTS, SAMPLING)] == [3, 3, 3, 3]
    assert engine.servers.retries == 1
    assert server.loaded == [f"{engine.session}-{policy.version}"]


def test_a_server_that_no_longer_knows_an_adapter_to_be_dropped_gets_the_weights_again(
    server: StandIn, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(policy, tmp_path, server)
    with engine.ready():
        pass
    moved(policy)
    listed, gone = server.get, []

    def restarts_after_the_list(path: str) -> Any:
        found = listed(path)
        if path == "/v1/models" and not gone:
            gone.append(path)
            server.loaded = []
        return found

    monkeypatch.setattr(server, "get", restarts_after_the_list)
    with engine.ready():
        pass
    assert gone
    assert server.loaded == [f"{engine.session}-{policy.version}"]


def test_patience_ends_with_a_sentence(server: StandIn, policy: Policy, tmp_path: Path) -> None:
    engine = engine_for(policy, tmp_path, server, patience=0.2)
    with engine.ready():
        server.mood = "dead"
        with pytest.raises(InvariantError, match=r"no rollout server has responded for 0\.2 s"):
            engine.generate(PROMPTS, SAMPLING)


def test_a_server_that_cannot_serve_training_is_refused_at_the_start(policy: Policy, tmp_path: Path) -> None:
    with (
        StandIn(version="0.11.2") as old,
        pytest.raises(ConfigError, match=r"runs vLLM 0\.11\.2; upgrade to 0\.28"),
    ):
        engine_for(policy, tmp_path, old)
    with StandIn(raw=True) as raw, pytest.raises(ConfigError, match="processed_logprobs"):
        engine_for(policy, tmp_path, raw)
    with StandIn() as gone:
        gone.mood = "dead"
        with pytest.raises(ConfigError, match="no vLLM server responds at"):
            engine_for(policy, tmp_path, gone)
    with pytest.raises(ConfigError, match=r"engine\.servers must be URLs such as"):
        VllmEngine(policy, EngineConfig(kind="vllm", servers=("localhost:8000",)), exchange=tmp_path)


@pytest.mark.parametrize("code", [400, 500])
def test_what_a_server_says_against_the_first_requests_is_told_in_a_sentence(
    code: int, server: StandIn, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, refused = server.post, "allowed_token_ids"

    def refuses(path: str, body: dict[str, Any]) -> Any:
        no = {"error": {"code": code, "message": "out of luck"}}
        return no if refused in body or path == refused else answered(path, body)

    monkeypatch.setattr(server, "post", refuses)
    said = f"returned {code}: .*out of luck"
    with pytest.raises(ConfigError, match=f"the server at {server.address} cannot complete .*{said}"):
        engine_for(policy, tmp_path, server)
    refused = "prompt_logprobs"
    adapters = engine_for(policy, tmp_path, server)
    with pytest.raises(ConfigError, match=f"cannot load the policy's weights: .*{said}") as told:
        adapters.ready().__enter__()
    assert server.address in str(told.value)
    refused = "/collective_rpc"
    whole = load_policy(ModelConfig(name="tiny", device="cpu", dtype="float32"), LoraConfig(r=0))
    weights = engine_for(whole, tmp_path, server)
    with pytest.raises(ConfigError, match=f"cannot load the policy's weights: .*{said}"):
        weights.ready().__enter__()


def test_a_run_survives_a_server_that_dies_in_every_step(server: StandIn, tmp_path: Path) -> None:
    task_file(tmp_path)
    over = threading.Event()

    def trouble() -> None:
        while not over.wait(0.15):
            if not server.asked:  # the start asks the server what it is, once: trouble begins after that
                continue
            server.mood, server.loaded = "dead", []
            time.sleep(0.05)
            server.mood = "well"

    config = small_config(tmp_path, "engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4")
    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        run = train(config)
    finally:
        over.set()
        thread.join()
    assert [row["step"] for row in deterministic_metrics(run)] == [1, 2, 3, 4]
    assert all(row["policy/gap"] < 1e-4 for row in deterministic_metrics(run))


def test_with_overlap_each_batch_is_drawn_with_the_weights_before_the_last_update(
    server: StandIn, tmp_path: Path
) -> None:
    task_file(tmp_path)
    over = ("engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4", "optim.minibatches=1")
    config = small_config(tmp_path, *over, "rollout.overlap=true", "optim.learning_rate=1e-3")
    run = train(config)
    rows = deterministic_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # The first two steps' answers come from the same weights; one update lies between them and step 2.
    assert rows[0]["policy/gap"] < 1e-4
    assert all(1e-4 < row["policy/gap"] < 0.5 for row in rows[1:])
    assert all(row["policy/correction"] != 1.0 for row in rows[1:])


class Ahead(gw.Callback):
    """Notes the steps of rollouts and updates with their thread, and stops ahead of step 3."""

    def __init__(self) -> None:
        self.rollouts: dict[int, bool] = {}
        self.updates: list[int] = []

    def after_rollout(self, run: gw.RunControl, groups: Any) -> None:
        self.rollouts[run.step] = threading.current_thread() is threading.main_thread()
        if run.step == 3:
            raise gw.StopTraining("ahead")

    def after_update(self, run: gw.RunControl, metrics: Any) -> None:
        self.updates.append(run.step)


def test_with_overlap_hooks_of_the_next_batch_run_beside_the_update_and_may_stop_it(
    server: StandIn, tmp_path: Path
) -> None:
    task_file(tmp_path)
    over = ("engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4", "evaluate.skip=true")
    config = small_config(tmp_path, *over, "rollout.overlap=true", "rollout.refill=0")
    ahead = Ahead()
    run = train(config, functions=UserFunctions(callbacks=(ahead,)))
    assert ahead.rollouts == {1: True, 2: False, 3: False}
    # The batch of step 3 may be there before step 2 ends, or after.
    assert ahead.updates in ([1, 2], [1, 2, 3])
    assert [row["step"] for row in deterministic_metrics(run)] == ahead.updates
    train(config, resume=run)
    assert [row["step"] for row in deterministic_metrics(run)] == [1, 2, 3, 4]


def test_what_goes_wrong_ahead_stops_the_run(server: StandIn, tmp_path: Path) -> None:
    task_file(tmp_path)
    over = ("engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4", "engine.patience=0.1")
    config = small_config(tmp_path, *over, "rollout.overlap=true", "evaluate.skip=true")
    asked = server.complete

    def die_later(body: dict[str, Any]) -> Any:
        if server.asked >= 5:
            server.mood = "dead"
        return asked(body)

    server.complete = die_later  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="no rollout server has responded"):
        train(config)


def test_a_run_whose_servers_are_gone_saves_its_last_step(server: StandIn, tmp_path: Path) -> None:
    task_file(tmp_path)
    over = ("engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4", "engine.patience=0.1")
    config = small_config(tmp_path, *over, "run.save_every=100", "evaluate.skip=true")
    metrics, asked = tmp_path / "run" / "metrics.jsonl", server.complete

    def die_after_the_first_step(body: dict[str, Any]) -> Any:
        if metrics.exists() and "\n" in metrics.read_text():
            server.mood = "dead"
        return asked(body)

    server.complete = die_after_the_first_step  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="no rollout server has responded"):
        train(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    server.mood, server.complete = "well", asked  # type: ignore[method-assign]
    train(config, resume=tmp_path / "run")
    assert [row["step"] for row in deterministic_metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.overlap=true",
        "run.parallel=fsdp",
        pytest.param("run.parallel=zero3", marks=needs_deepspeed),
    ],
)
def test_two_processes_share_a_server(setting: str, server: StandIn, tmp_path: Path) -> None:
    task_file(tmp_path)
    over = ("engine.kind=vllm", f"engine.servers=[{server.address}]", "lora.r=4", "optim.minibatches=1")
    in_processes(2, trained, small_config(tmp_path, *over, setting))
    rows = deterministic_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["policy/gap"] < 1e-4
    assert all((row["policy/gap"] > 1e-4) == ("overlap" in setting) for row in rows[1:])


def trained(config: Any) -> None:
    torch.set_num_threads(1)
    train(config)


def test_overlap_needs_a_generator_beside_the_trainer_and_a_correction() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.overlap requires a separate generator"):
        read_config(overrides=["rollout.overlap=true"])
    with pytest.raises(ConfigError, match=r"samples from a stale policy; set algo\.correction"):
        read_config(overrides=["rollout.overlap=true", "engine.kind=vllm", "algo.correction=none"])
