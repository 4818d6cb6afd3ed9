"""The lean forward pass against the module's own."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine import cpu_runner
from groupwise.engine.cpu_runner import fused_cpu_forward
from groupwise.engine.engine import Engine
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.policy import Policy
from groupwise.records import Request, Sampling
from tests.support.small_models import policy_of, small_model

CPU = torch.device("cpu")
TOKENS, POSITIONS = torch.tensor([5, 9, 7, 30, 31, 40]), torch.tensor([0, 1, 2, 3, 4, 3])
LAYOUT = PackedLayout.build([(3, (2, 1))], device=CPU)


def adapted(policy: Policy) -> Policy:
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return Policy(peft.get_peft_model(copy.deepcopy(policy.model), config), policy.tokenizer)


@torch.no_grad()
def assert_same_hidden(policy: Policy) -> None:
    lean = fused_cpu_forward(policy)
    assert lean is not None
    ours = lean.hidden(TOKENS, POSITIONS, LAYOUT)
    torch.testing.assert_close(ours, policy.hidden(TOKENS, POSITIONS, LAYOUT), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "key_heads"), [("llama", 1), ("llama", 2), ("llama", 4), ("qwen2", 2)])
def test_hidden_states_are_those_of_the_module(kind: str, key_heads: int) -> None:
    assert_same_hidden(policy_of(small_model(kind, key_heads=key_heads)))


def test_adapters_are_folded_in(small_policy: Policy) -> None:
    assert_same_hidden(adapted(small_policy))


def test_a_model_of_another_kind_is_left_to_its_module() -> None:
    assert fused_cpu_forward(policy_of(small_model("qwen3"))) is None


def test_a_policy_that_computes_something_else_is_left_to_itself(small_policy: Policy) -> None:
    hidden = small_policy.hidden
    small_policy.hidden = lambda *args: 1.01 * hidden(*args)  # type: ignore[method-assign]
    assert fused_cpu_forward(small_policy) is None


@pytest.mark.parametrize("with_adapter", [False, True])
def test_an_engine_follows_the_weights_as_they_are_trained(
    small_policy: Policy, with_adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = adapted(small_policy) if with_adapter else small_policy
    asked, sampling = [Request(prompt=(5, 6, 7), seeds=(1, 2, 3))], Sampling(max_tokens=12)
    engine = Engine(policy, EngineConfig())
    (before,) = engine.generate(asked, sampling)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    (after,) = engine.generate(asked, sampling)
    assert [c.tokens for c in after] != [c.tokens for c in before]
    monkeypatch.setattr(cpu_runner, "fused_cpu_forward", lambda *_: None)
    (plain,) = Engine(policy, EngineConfig()).generate(asked, sampling)
    assert [c.tokens for c in after] == [c.tokens for c in plain]
    assert [c.logprobs for c in after] == [pytest.approx(c.logprobs, abs=1e-4) for c in plain]


def test_layers_are_not_left_unfused_because_memory_was_short(small_policy):
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    small_policy.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        fused_cpu_forward(small_policy)
