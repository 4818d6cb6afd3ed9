"""Families beyond the plain decoder on the device: both paths, against plain transformers in float32.

Windows are 12 tokens and rows up to 30, so that windows move and prompts leave them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.learner.micro_batch import own_logprobs, pack
from groupwise.model.attention.hf_interface import AttentionVariant
from groupwise.model.attention.packed import PackedLayout
from groupwise.records import Request, Sampling
from tests.support.cuda_checks import DEVICE, relative
from tests.support.small_models import policy_of
from tests.support.tiny_families import ragged_samples, tiny_model

FAST = ("mistral", "gemma2", "gpt_oss", "gemma3_text", "gemma4_text", "deepseek_v3", "nanochat", "stablelm")
GENERAL = ("gptj", "lfm2", "qwen3_next", "mamba2", "rwkv")


@pytest.mark.parametrize("family", [*FAST, *GENERAL])
def test_answers_have_the_log_probabilities_of_plain_transformers(family: str) -> None:
    policy, plain = policy_of(tiny_model(family).to(DEVICE)), tiny_model(family).to(DEVICE)
    assert (policy.general is None) == (family in FAST)
    asked = [Request(prompt=tuple(range(20, 34)), seeds=(1, 2, 3)), Request(prompt=(40, 50), seeds=(4,))]
    engine = Engine(policy, EngineConfig())
    for request, group in zip(asked, engine.generate(asked, Sampling(max_tokens=16)), strict=True):
        for answer in group:
            tokens = torch.tensor(request.prompt + answer.tokens, device=DEVICE)
            with torch.no_grad():
                rows = plain(tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
            first = len(request.prompt)
            expected = [float(rows[at - 1, tokens[at]]) for at in range(first, len(tokens))]
            assert answer.logprobs == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("family", [*FAST, *GENERAL])
def test_gradients_are_those_of_plain_passes(family: str) -> None:
    plain, policy = tiny_model(family).to(DEVICE), policy_of(tiny_model(family).to(DEVICE))
    samples = ragged_samples()
    batch = pack(samples, device=DEVICE)
    logprobs_N, _ = own_logprobs(policy, batch, Sampling(), entropy_gradient=False)
    logprobs_N.sum().backward()
    for sample in samples:
        tokens = torch.tensor(sample.tokens, device=DEVICE)
        logits = plain(tokens[None], use_cache=False).logits[0, sample.prefix - 1 : -1]
        logits.log_softmax(-1).gather(1, tokens[sample.prefix :, None]).sum().backward()
    for (name, ours), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None, name
            assert (ours.grad - theirs.grad).norm() <= 5e-3 * theirs.grad.norm() + 1e-4, name


VARIANTS = {
    "window": AttentionVariant(window=40),
    "short window": AttentionVariant(window=2),
    "cap": AttentionVariant(cap=5.0),
    "window and cap": AttentionVariant(window=40, cap=5.0),
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_flash_kernel_with_windows_and_sinks_is_plain_attention(name: str, sinks: bool) -> None:
    """Training attention in bfloat16, forward and backward, against float64 on a CPU."""
    layout = PackedLayout.build([(100, (60, 7, 130)), (3, (90,)), (50, ())], device=DEVICE)
    total = 100 + 60 + 7 + 130 + 3 + 90 + 50
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, total, 64) for heads in (8, 2, 2)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    exact.append(torch.randn(8, generator=generator, dtype=torch.float64))
    weights = torch.randn(1, total, 8, 64, generator=generator, dtype=torch.float64)

    def computed(tensors: list[Any], layout: PackedLayout, weights: Any) -> list[torch.Tensor]:
        tensors = [x.detach().requires_grad_() for x in tensors]
        variant = VARIANTS[name]
        variant = AttentionVariant(variant.window, variant.cap, tensors[3] if sinks else None)
        output = layout.attend(*tensors[:3], layer=0, scale=0.125, variant=variant)
        (output * weights).sum().backward()
        return [output.detach(), *(x.grad for x in tensors[: 4 if sinks else 3])]

    rounded = [x.to(DEVICE, torch.bfloat16) for x in exact]
    cpu = PackedLayout.build([(100, (60, 7, 130)), (3, (90,)), (50, ())], device=torch.device("cpu"))
    ours = computed(rounded, layout, weights.to(DEVICE, torch.bfloat16))
    for got, expected in zip(ours, computed([x.double().cpu() for x in rounded], cpu, weights), strict=True):
        assert relative(got.double().cpu(), expected) < 2e-2
