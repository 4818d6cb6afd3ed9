"""Several adapters on one base: a member in a mixed batch writes what it writes alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)
from groupwise.config.schema import EngineConfig
from groupwise.engine.cuda.graph_weights import MultiLoRAGraphWeight
from groupwise.engine.engine import Engine
from groupwise.engine.multi_lora import LoRABank, MultiLoRAEngine
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling
from tests.support.generation import EmulatedGPUEngine, assert_same, requests
from tests.support.small_models import policy_of, small_model

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def adapted(kind: str = "llama", **settings: Any) -> Policy:
    settings = {
        "r": 4,
        "lora_alpha": 2,
        "target_modules": "all-linear",
        "init_lora_weights": False,
        **settings,
    }
    torch.manual_seed(1)
    model = peft.get_peft_model(policy_of(small_model(kind)).model, peft.LoraConfig(**settings))
    return policy_with(model)


def policy_with(model: Any) -> Policy:
    from tests.support.small_models import tiny_tokenizer

    return Policy(model, tiny_tokenizer())


def population(policy: Policy, count: int = 3) -> LoRABank:
    """Members that differ in every weight."""
    members = LoRABank(policy)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count - 1):
        members.add(
            {
                name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
                for name, tensor in members.of(0).items()
            }
        )
    return members


def mixed(count: int = 3) -> list[Request]:
    """Prompts of many lengths, of members in no order."""
    return [
        replace(request, adapter=n * 2 % count)
        for n, request in enumerate(requests((1, 16, 32, 37, 5), (3, 1, 4, 2, 5)))
    ]


def alone(
    members: LoRABank, asked: list[Request], sampling: Sampling, **engine: Any
) -> list[list[Completion]]:
    """Every member by itself, its adapter mergedto the weights as for a policy that has no others."""
    answers: dict[int, list[Completion]] = {}
    for number in {request.adapter for request in asked}:
        members.put_in_place(number)
        own = [index for index, request in enumerate(asked) if request.adapter == number]
        found = Engine(members.policy, EngineConfig(**engine)).generate([asked[i] for i in own], sampling)
        answers.update(zip(own, found, strict=True))
    return [answers[index] for index in range(len(asked))]


class TogetherOnGPU(MultiLoRAEngine):
    def __init__(self, members: LoRABank, config: EngineConfig) -> None:
        super().__init__(members, config)
        self._shared = EmulatedGPUEngine(members.policy, config, members)
        self._alone = EmulatedGPUEngine(members.policy, config)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("engine", [{}, {"max_sequences": 4}, {"kv_tokens": 64, "block_size": 4}], ids=str)
def test_a_member_in_a_mixed_batch_writes_what_it_writes_alone(kind, engine):
    members, sampling = population(adapted(kind)), Sampling(max_tokens=12)
    together = MultiLoRAEngine(members, EngineConfig(**engine))
    assert together.batched
    answers = together.generate(mixed(), sampling)
    assert_same(answers, alone(members, mixed(), sampling, **engine))
    assert len({a[0].tokens for a in answers}) == len(answers)


def test_members_write_different_things_to_the_same_prompt():
    members = population(adapted())
    asked = [replace(requests((9,), (2,))[0], adapter=number) for number in range(3)]
    answers = MultiLoRAEngine(members, EngineConfig()).generate(asked, Sampling(max_tokens=12))
    assert len({completion.tokens for group in answers for completion in group}) == 6


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj", "up_proj"]], ids=str)
def test_layers_without_adapters_are_the_bases(targets):
    members, sampling = population(adapted(target_modules=targets)), Sampling(max_tokens=8)
    answers = MultiLoRAEngine(members, EngineConfig()).generate(mixed(), sampling)
    assert_same(answers, alone(members, mixed(), sampling))


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=3), Sampling(max_tokens=3, top_k=9)], ids=str)
@pytest.mark.parametrize("engine", [MultiLoRAEngine, TogetherOnGPU])
def test_every_member_has_a_temperature_of_its_own(engine, sampling):
    members = population(adapted())
    heats = (0.5, 1.0, 1.7)
    asked = [replace(r, temperature=heats[r.adapter]) for r in mixed()[:3]]
    answers = engine(members, EngineConfig()).generate(asked, sampling)
    for request, group in zip(asked, answers, strict=True):
        heated = replace(sampling, temperature=heats[request.adapter])
        assert_same([group], alone(members, [replace(request, temperature=None)], heated))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_the_gpu_way_of_mixing_members_writes_what_the_cpu_writes_alone(kind):
    members, sampling = population(adapted(kind)), Sampling(max_tokens=3)
    together = TogetherOnGPU(members, EngineConfig())
    assert together.batched
    asked = mixed()[:2]
    assert_same(together.generate(asked, sampling), alone(members, asked, sampling))
    with torch.no_grad():
        for tensor in members.of(2).values():
            tensor.mul_(1.3)
    assert_same(together.generate(asked, sampling), alone(members, asked, sampling))


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"modules_to_save": ["norm"]}], ids=str)
def test_adapters_that_are_more_than_a_product_take_turns(settings):
    members, sampling = population(adapted(**settings)), Sampling(max_tokens=6)
    together = MultiLoRAEngine(members, EngineConfig())
    assert not together.batched
    assert_same(together.generate(mixed(), sampling), alone(members, mixed(), sampling))


def test_the_base_is_held_once_and_its_numbers_stay():
    policy = adapted()
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    members = population(policy)
    MultiLoRAEngine(members, EngineConfig()).generate(mixed(), Sampling(max_tokens=3))
    members.put_in_place(0)
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters())
    attention = policy.decoder.layers[0].self_attn
    storages = {getattr(attention, f"{x}_proj").base_layer.weight.untyped_storage().data_ptr() for x in "qkv"}
    assert len(storages) == 1


@pytest.mark.parametrize("engine", [MultiLoRAEngine, TogetherOnGPU])
def test_a_broken_member_loses_its_own_answers_only(engine):
    members, sampling = population(adapted()), Sampling(max_tokens=3)
    asked = mixed()[:3]
    together = engine(members, EngineConfig())
    expected = together.generate(asked, sampling)
    next(iter(members.of(1).values())).fill_(math.nan)
    assert not members.finite(1)

    def work(engine, numbers):
        own = [request for request in asked if request.adapter in numbers]
        groups = engine.generate(own, sampling)
        return {request.adapter: group for request, group in zip(own, groups, strict=True)}

    answers, broken = together.contained((0, 1, 2), work)
    assert list(broken) == [1]
    assert set(answers) == {0, 2}
    for request, other in zip(asked, expected, strict=True):
        if request.adapter != 1:
            assert_same([answers[request.adapter]], [other])


def test_a_dropped_member_leaves_its_number_to_the_next():
    members = population(adapted())
    members.drop(1)
    assert members.add(members.of(2)) == 1
    assert all(torch.equal(a, b) for a, b in zip(members.of(1).values(), members.of(2).values(), strict=True))
    assert len(members) == 3


def test_members_are_batched_also_while_the_policy_holds_on_to_an_anchor():
    policy = adapted()
    members = population(policy)
    policy.anchor = {name: 2 * tensor for name, tensor in members.of(1).items()}
    together = MultiLoRAEngine(members, EngineConfig())
    assert together.batched
    answers = together.generate(mixed(), Sampling(max_tokens=4))
    assert_same(answers, alone(members, mixed(), Sampling(max_tokens=4)))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=str)
def test_the_gpus_product_is_each_rows_own_at_any_number_of_rows_and_members(targets):
    policy = adapted("qwen2", r=16, target_modules=targets)
    members = population(policy, 9)  # 144 columns of adapters: more than a program takes at once
    members.drop(4)
    attention = policy.decoder.layers[0].self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    matrix = MultiLoRAGraphWeight(*parts, like=policy.head_weight, members=members)
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(70, 32, generator=generator)
    adapter_T = torch.tensor([(7 * row) % 9 for row in range(70)])
    adapter_T[adapter_T == 4] = 8
    with torch.no_grad():
        y_TO = matrix(x_TI, adapter_T)
        for row, number in enumerate(adapter_T.tolist()):
            members.put_in_place(number)
            expected_O = torch.cat([part(x_TI[row]) for part in parts])
            torch.testing.assert_close(y_TO[row], expected_O, rtol=1e-4, atol=1e-4)
        members.put_in_place(0)
        with policy.without_adapter():
            base_TO = torch.cat([part(x_TI) for part in parts], dim=1)
        torch.testing.assert_close(matrix(x_TI), base_TO)
