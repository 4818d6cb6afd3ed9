"""Several processes give what one gives: rollouts, gradients, checkpoints; and they fail as one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import read_config
from groupwise.config.schema import LOSSES
from groupwise.errors import ConfigError, InvariantError, RemoteRankError
from groupwise.learner.learner import Learner
from groupwise.model.attention.ulysses import UlyssesContext
from groupwise.parallel.processes import Processes, joined_processes, shares_of_samples
from groupwise.records import Sample, Sampling
from groupwise.training import train
from tests.support.process_groups import in_processes
from tests.support.sharded_updates import (
    OFF_POLICY,
    gradients_of_cases,
    relative_difference,
    trained,
    uneven_samples,
)
from tests.support.small_models import policy_of, small_model
from tests.support.small_runs import deterministic_metrics, small_config, task_file

MORE = {
    "with a KL penalty and an entropy bonus": ("algo.beta=0.1", "algo.entropy_bonus=0.01"),
    "in mini-batches and small micro-batches": ("optim.minibatches=2", "optim.micro_batch_tokens=12"),
    "with layers computed again": ("model.gradient_checkpointing=true",),
}


CASES = {
    **{loss: (loss, OFF_POLICY) for loss in LOSSES},
    **{name: ("grpo", (*OFF_POLICY, *overrides)) for name, overrides in MORE.items()},
}


@pytest.fixture(scope="module", params=["ddp", "fsdp", "context"])
def gradients_of_two(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The gradients of all cases in each of two processes; one process group computes them all."""
    layout = (f"run.parallel={request.param}",)
    shared = {name: (loss, (*overrides, *layout)) for name, (loss, overrides) in CASES.items()}
    return in_processes(2, gradients_of_cases, shared)


@pytest.fixture(scope="module")
def gradients_of_one() -> dict[str, Any]:
    return gradients_of_cases(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_two_processes_is_that_of_one(
    case: str, gradients_of_two: list[dict[str, Any]], gradients_of_one: dict[str, Any]
) -> None:
    alone = gradients_of_one[case]
    both = [answer[case] for answer in gradients_of_two]
    for each in both:
        assert len(each["gradients"]) == len(alone["gradients"])
        for ours, expected in zip(each["gradients"], alone["gradients"], strict=True):
            assert relative_difference(expected, ours) <= 1e-5
        assert each["report"] == pytest.approx(alone["report"], rel=1e-4, abs=1e-6)
        assert each["seen"].keys() == alone["seen"].keys()
    same = both[0]["weights"], both[1]["weights"]
    assert all((same[0][name] == same[1][name]).all() for name in same[0])


def test_a_stretch_without_a_trained_token_waits_for_the_others() -> None:
    """One long prompt and one short answer: the first half of the row trains nothing."""
    for one, other in in_processes(2, long_prompt_gradient):
        assert one == pytest.approx(other, rel=1e-5)


def long_prompt_gradient() -> tuple[float, float]:
    torch.set_num_threads(1)
    prompt, answer = tuple(range(10, 60)), (7, 8, 9)
    nothing = (0.0,) * len(prompt)
    sample = Sample(
        tokens=prompt + answer,
        trained=(False,) * len(prompt) + (True,) * 3,
        logprobs=(*nothing, -5.0, -5.0, -5.0),
        entropies=(*nothing, 0.0, 0.0, 0.0),
        advantages=(*nothing, 1.0, 1.0, 1.0),
        prefix=len(prompt),
        group=0,
    )
    norms = []
    with joined_processes() as processes:
        for context in (UlyssesContext(rank=processes.rank, count=2), None):
            config = read_config(overrides=["algo.max_gap=100", "optim.learning_rate=1e-3"]).resolve()
            own = processes if context else Processes()
            learner = Learner(
                policy_of(small_model()),
                algo=config.algo,
                optim=config.optim,
                sampling=Sampling(max_tokens=8),
                max_steps=1,
                processes=own,
                context=context,
            )
            norms.append(learner.update([sample], sequences=1, tokens=3)["policy/grad_norm"])
    return norms[0], norms[1]


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 key heads must be divisible by 3 processes"):
        UlyssesContext(rank=0, count=3).check(policy_of(small_model()))


def test_more_processes_than_groups_divide_the_groups() -> None:
    samples = [sample for sample in uneven_samples() if sample.group == 0]
    shares = shares_of_samples(samples, 3)
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3]
    assert max(len(share) for share in shares) <= 2


def test_shares_are_of_like_size() -> None:
    samples = uneven_samples()
    tokens = [sum(len(samples[i].tokens) for i in share) for share in shares_of_samples(samples, 2)]
    assert max(tokens) < 1.3 * min(tokens)


def test_a_list_dealt_out_comes_back_in_its_order() -> None:
    assert in_processes(3, joined_list) == [list("abcdefgh")] * 3


def joined_list() -> list[str]:
    with joined_processes() as processes:
        return processes.joined("abcdefgh"[processes.share])


def close(one: Path, other: Path) -> None:
    """Two runs are the same but for rounding."""
    for ours, theirs in zip(deterministic_metrics(one), deterministic_metrics(other), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    last = sorted((one / "checkpoints").iterdir())[-1].name
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        a, b = (load_file(run / "checkpoints" / last / name) for run in (one, other))
        assert a.keys() == b.keys()
        # As a whole: Adam makes a full step of a gradient that is all rounding.
        assert relative_difference(a, b) < 1e-4


@pytest.fixture(scope="module")
def run_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    task_file(folder)
    return Path(trained(small_config(folder)))


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_run_of_two_processes_is_that_of_one_and_either_goes_on_with_the_others(
    layout: str, run_of_one: Path, tmp_path: Path
) -> None:
    several = f"run.parallel={layout}"
    for name in ("two", "back", "forth"):
        (tmp_path / name).mkdir()
        task_file(tmp_path / name)
    paths = {name: tmp_path / name / "run" for name in ("two", "back", "forth")}
    in_processes(2, trained, small_config(tmp_path / "two", several))
    close(run_of_one, paths["two"])

    # Begun by two, ended by one; and the other way round.
    first = small_config(tmp_path / "back", "run.max_steps=2", several)
    in_processes(2, trained, first)
    trained(small_config(tmp_path / "back"), resume=paths["back"])
    trained(small_config(tmp_path / "forth", "run.max_steps=2"))
    in_processes(2, trained, small_config(tmp_path / "forth", several), paths["forth"])
    for name in ("back", "forth"):
        stats = json.loads((paths[name] / "training_stats.json").read_text())
        assert stats["steps"] == 4
        assert [row["step"] for row in deterministic_metrics(paths[name])] == [1, 2, 3, 4]
        last = "checkpoints/step-000004/model.safetensors"
        assert relative_difference(load_file(run_of_one / last), load_file(paths[name] / last)) < 1e-4


def test_accelerate_told_to_divide_divides(tmp_path: Path) -> None:
    """With what `accelerate launch` sets for FSDP, every process still loads the weights itself."""
    task_file(tmp_path)
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_VERSION": "2",
    }
    in_processes(
        2, trained, small_config(tmp_path, "run.max_steps=2", "evaluate.skip=true"), None, environment
    )
    assert [row["step"] for row in deterministic_metrics(tmp_path / "run")] == [1, 2]


def test_what_fails_in_one_process_fails_in_all_and_the_leader_says_where() -> None:
    leader, follower = in_processes(2, failing, 1)
    assert leader == ("InvariantError", "in process 1: the promise is broken")
    assert follower == ("RemoteRankError", "the promise is broken", 3)
    leader, follower = in_processes(2, failing, 0)
    assert leader == ("InvariantError", "the promise is broken")
    assert follower == ("RemoteRankError", "the promise is broken", 3)


def failing(rank: int) -> tuple[object, ...]:
    with joined_processes() as processes:
        try:
            with processes.together():
                if processes.rank == rank:
                    raise InvariantError("the promise is broken")
        except RemoteRankError as error:
            return type(error).__name__, str(error), error.code
        except InvariantError as error:
            return type(error).__name__, str(error)
    return ("nothing was raised",)


def test_alone_nothing_is_wrapped() -> None:
    with pytest.raises(ConfigError, match=r"^as it is$"), Processes().together():
        raise ConfigError("as it is")


RAISES_IN_ONE = """
import os
import groupwise as gw

def broken(rollout: gw.Rollout, example: gw.Example) -> float:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("no verifier on this machine")
    return 1.0

task = gw.Task(
    name="broken",
    examples=[{"n": n} for n in range(24)],
    prompt=lambda example: f"{example['n']} + 1",
    rewards={"broken": broken},
)
"""


def test_failed_rollouts_of_one_process_stop_the_run_of_all(tmp_path: Path) -> None:
    task_file(tmp_path, RAISES_IN_ONE)
    config = small_config(tmp_path, "task.max_failed=0.1", "evaluate.skip=true")
    errors = in_processes(2, stopped, config)
    assert "no verifier on this machine" in errors[0]
    assert errors[0] == errors[1]
    shutil.rmtree(tmp_path / "run")


def stopped(config: Any) -> str:
    torch.set_num_threads(1)
    try:
        train(config)
    except InvariantError as error:
        return str(error)
    return "it went on"
