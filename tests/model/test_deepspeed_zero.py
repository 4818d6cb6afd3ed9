"""What DeepSpeed computes with several processes is what one process computes without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import read_config
from groupwise.config.schema import LoraConfig
from groupwise.errors import ConfigError
from groupwise.learner.learner import Learner
from groupwise.learner.sft_learner import SFTLearner, worked_sample
from groupwise.model import sharding
from groupwise.model.adapters.lora import with_adapter
from groupwise.model.ops.lora_linear import use_fused_lora
from groupwise.parallel.processes import Processes, divide, joined_processes
from tests.support.process_groups import in_processes, needs_deepspeed
from tests.support.sharded_updates import relative_difference, trained
from tests.support.small_models import policy_of, small_model
from tests.support.small_runs import deterministic_metrics, small_config, task_file
from tests.support.zero_updates import STAGES, gradients_alone, learner_of, updated, zero_gradients


@needs_deepspeed
@pytest.mark.parametrize("layout", STAGES)
def test_the_gradient_of_two_processes_is_that_of_one(layout: str) -> None:
    leader, follower = in_processes(2, zero_gradients, layout)
    for name, alone in gradients_alone().items():
        assert len(leader[name]["gradients"]) == len(alone["gradients"])
        for ours, expected in zip(leader[name]["gradients"], alone["gradients"], strict=True):
            assert ours.keys() == expected.keys()
            assert relative_difference(expected, ours) <= 1e-5, name
        assert leader[name]["report"] == pytest.approx(alone["report"], rel=1e-4, abs=1e-6), name
        assert follower[name]["report"] == leader[name]["report"]
    assert leader["error"] == follower["error"]
    assert leader["error"].startswith("the gradient norm is ")


def divided_run(config: Any, resume: Path | None = None, environment: dict[str, str] | None = None) -> str:
    sharding.KEPT_WHOLE = 0
    return trained(config, resume, environment)


def same_run(one: Path, other: Path) -> None:
    """Two runs have learnt the same but for rounding, and left the same files."""
    for ours, theirs in zip(deterministic_metrics(one), deterministic_metrics(other), strict=True):
        learnt = [name for name in ours if name.startswith(("policy/", "optim/"))]
        assert [ours[n] for n in learnt] == pytest.approx([theirs[n] for n in learnt], rel=1e-3, abs=1e-5)
    for path in sorted(one.glob("checkpoints/*/*.safetensors")):
        a, b = load_file(path), load_file(other / path.relative_to(one))
        assert a.keys() == b.keys()
        # As a whole: Adam makes a full step of a gradient that is all rounding.
        assert relative_difference(a, b) < 1e-4, path


ACCELERATE = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
}


@needs_deepspeed
@pytest.mark.parametrize(
    ("settings", "several", "environment"),
    [
        (("optim.warmup_steps=3",), ("run.parallel=zero2",), {}),
        (("model.gradient_checkpointing=true",), ("run.parallel=zero3",), {}),
        (("lora.r=4", "algo.beta=0.1"), (), ACCELERATE),
    ],
    ids=["zero2", "zero3", "adapters, as accelerate says"],
)
def test_a_run_begun_without_deepspeed_goes_on_with_it(
    settings: tuple[str, ...], several: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        task_file(tmp_path / name)
    settings += ("run.keep_best=false",)  # what a shorter run measures at its end, a longer one does not
    trained(small_config(tmp_path / "one", *settings))
    trained(small_config(tmp_path / "two", "run.max_steps=2", *settings))
    whole = small_config(tmp_path / "two", *settings, *several)
    in_processes(2, divided_run, whole, tmp_path / "two/run", environment)
    same_run(tmp_path / "one/run", tmp_path / "two/run")


@needs_deepspeed
def test_a_run_begun_with_deepspeed_goes_on_without_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        task_file(tmp_path / name)
    alike = "run.keep_best=false"
    divided = small_config(tmp_path / "two", alike, "run.max_steps=2", "run.parallel=zero3")
    trained(small_config(tmp_path / "one", alike))
    in_processes(2, divided_run, divided)
    trained(small_config(tmp_path / "two", alike), tmp_path / "two/run")
    same_run(tmp_path / "one/run", tmp_path / "two/run")


@needs_deepspeed
def test_half_precision_goes_on_from_its_copies_in_float32() -> None:
    for found in in_processes(2, half_precision):
        for whole, resumed, rounded in found:
            assert resumed == whole
            assert rounded != whole


def half_precision() -> list[tuple[float, float, float]]:
    """Return sums of float32 weights after two updates: in one go, resumed, and resumed without them."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # some machines announce instructions that they do not have
    with joined_processes() as processes:
        return [half_precision_with(processes, layout) for layout in ("zero1", "zero3")]


def half_precision_with(processes: Processes, layout: str) -> tuple[float, float, float]:
    learner = half_learner(processes, layout, None)
    updated(learner)
    with learner.policy.whole():
        saved = {name: t.detach().clone() for name, t in learner.policy.model.state_dict().items()}
    state, settings = processes.gather(divided(learner).optimizer_state())[0]
    resumed, rounded = (half_learner(processes, layout, saved) for _ in range(2))
    divided(resumed).load_optimizer_state(state, settings)
    divided(rounded).load_optimizer_state(sharding.without_masters(state), settings)
    return master_sum(processes, learner), master_sum(processes, resumed), master_sum(processes, rounded)


def half_learner(processes: Processes, layout: str, saved: dict[str, torch.Tensor] | None) -> Learner:
    policy = policy_of(small_model())
    policy.model.bfloat16()
    if saved is not None:
        policy.model.load_state_dict(saved)
    divide(policy, layout)
    return learner_of(policy, processes)


def divided(learner: Learner) -> sharding.ZeroEngine:
    assert learner.policy.zero is not None
    return learner.policy.zero


def master_sum(processes: Processes, learner: Learner) -> float:
    """Update once more and add up the float32 weights."""
    updated(learner)
    tensors, _ = processes.gather(divided(learner).optimizer_state())[0]
    return sum(float(t.double().abs().sum()) for key, t in tensors.items() if key.endswith(sharding.MASTER))


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("zero3", marks=needs_deepspeed)])
def test_who_has_nothing_to_imitate_goes_along(layout: str) -> None:
    alone = imitation_loss("none")
    for losses in in_processes(2, imitation_loss, layout):
        assert losses == pytest.approx(alone, rel=1e-5)


def imitation_loss(layout: str) -> list[float]:
    """Return the loss of one demonstration before and after a step on it."""
    torch.set_num_threads(1)
    sharding.KEPT_WHOLE = 0
    with joined_processes() as processes:
        config = read_config(overrides=["optim.learning_rate=1e-2"]).resolve()
        torch.manual_seed(0)
        model = with_adapter(small_model(), LoraConfig(r=3), None)
        policy = policy_of(model)
        use_fused_lora(model)
        if processes.count > 1:
            divide(policy, layout)
        imitator = SFTLearner(policy, optim=config.optim, max_steps=1, processes=processes)
        samples = [worked_sample((5, 6, 7), (8, 9), group=0)]
        report = imitator.update(samples)
        return [report["sft/loss"], report["policy/grad_norm"], imitator.loss(samples)]


def test_deepspeed_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"zero2 requires DeepSpeed: pip install 'groupwise\[deepspeed\]'"):
        divide(policy_of(small_model()), "zero2")


@needs_deepspeed
def test_eight_bits_are_not_divided() -> None:
    policy = policy_of(small_model())
    divide(policy, "zero2")
    with pytest.raises(ConfigError, match=r"require optim\.kind=adamw"):
        learner_of(policy, Processes(), "optim.kind=adamw8bit")
