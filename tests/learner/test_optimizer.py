"""Kinds of AdamW: the same steps wherever the state is, and states that survive a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.config import read_config
from groupwise.errors import ConfigError
from groupwise.learner import optimizer as optimizers
from groupwise.learner.checkpoint import load_optimizer, optimizer_tensors
from groupwise.learner.optimizer import CPUAdamW, make_optimizer
from tests.support.small_models import policy_of, small_model
from tests.support.small_runs import KILL, SignalAt, run_artifacts, run_command


def steps(policy: Any, optimizer: Any, count: int, *, first: int = 0) -> None:
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        for parameter in policy.trainable().values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def optim(*words: str) -> Any:
    return read_config(overrides=["optim.weight_decay=0.1", "optim.learning_rate=0.01", *words]).optim


@pytest.mark.parametrize("piece", [1 << 22, 1000, 7])
def test_an_offloaded_optimizer_makes_the_same_steps(monkeypatch, piece):
    monkeypatch.setattr(optimizers, "PIECE", piece)
    one, other = policy_of(small_model()), policy_of(small_model())
    steps(one, make_optimizer(one, optim()), 5)
    steps(other, make_optimizer(other, optim("optim.offload=true")), 5)
    for name, parameter in one.trainable().items():
        torch.testing.assert_close(other.trainable()[name], parameter, rtol=1e-5, atol=1e-6)


def test_an_offloaded_optimizer_steps_weights_that_do_not_lie_in_one_piece(monkeypatch):
    monkeypatch.setattr(optimizers, "PIECE", 5)
    start, gradient = torch.randn(6, 8), torch.randn(6, 8)
    settings: Any = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    pieces = torch.nn.Parameter(start.clone()[:, ::2])
    whole = torch.nn.Parameter(start[:, ::2].clone())
    one, other = CPUAdamW([pieces], **settings), torch.optim.AdamW([whole], **settings)
    for _ in range(3):
        pieces.grad, whole.grad = gradient[:, ::2], gradient[:, ::2].clone()
        one.step()
        other.step()
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)


def test_an_offloaded_state_of_bfloat16_weights_is_put_back_in_the_same_bits():
    weight = torch.nn.Parameter(torch.randn(4, 5).bfloat16())
    settings: Any = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    first, second = (CPUAdamW([weight], **settings) for _ in range(2))
    weight.grad = torch.randn(4, 5).bfloat16()
    first.step()
    second.load_state_dict(first.state_dict())
    for name, saved in first.state[weight].items():
        assert saved.dtype == torch.float32
        assert torch.equal(second.state[weight][name], saved), name


@pytest.mark.parametrize("words", [(), ("optim.offload=true",), ("optim.kind=adamw8bit",)])
def test_a_state_that_was_saved_goes_on_in_the_same_bits(words):
    if words == ("optim.kind=adamw8bit",):
        pytest.importorskip("bitsandbytes")
    whole, stopped = (policy_of(small_model()) for _ in range(2))
    steps(whole, make_optimizer(whole, optim(*words)), 4)
    first = make_optimizer(stopped, optim(*words))
    steps(stopped, first, 2)
    tensors, settings = optimizer_tensors(first, stopped.trainable())
    second = make_optimizer(stopped, optim(*words))
    load_optimizer(second, stopped.trainable(), tensors=tensors, settings=settings)
    steps(stopped, second, 2, first=2)
    for name, parameter in whole.trainable().items():
        assert torch.equal(stopped.trainable()[name], parameter), name


def test_eight_bits_hold_the_state_of_large_weights():
    pytest.importorskip("bitsandbytes")
    policy = policy_of(small_model())
    optimizer = make_optimizer(policy, optim("optim.kind=adamw8bit"))
    steps(policy, optimizer, 1)
    tensors, _ = optimizer_tensors(optimizer, policy.trainable())
    large = [t for name, t in tensors.items() if name.endswith("state1") and t.numel() >= 4096]
    assert large
    assert {tensor.dtype for tensor in large} == {torch.uint8}


def test_a_run_with_its_optimizer_offloaded_resumes_exactly(tmp_path):
    words = ["sft", "--task", "countdown", "--max-steps", "4", f"run.output_dir={tmp_path}", "lora.r=4"]
    words += ["optim.offload=true", "run.save_every=2", "sft.batch=2", "evaluate.skip=true"]
    words += ["track.trackers=[]", "model.device=cpu"]
    assert run_command(*words, "run.name=whole").code == 0
    assert run_command(*words, "run.name=cut", signals=[SignalAt("metrics.jsonl", KILL, nth=4)]).code == -KILL
    assert run_command("sft", "--resume", str(tmp_path / "cut")).code == 0
    assert run_artifacts(tmp_path / "cut") == run_artifacts(tmp_path / "whole")


def test_eight_bits_and_main_memory_do_not_go_together():
    with pytest.raises(ConfigError, match=r"optim\.offload requires optim\.kind=adamw"):
        optim("optim.kind=adamw8bit", "optim.offload=true")
