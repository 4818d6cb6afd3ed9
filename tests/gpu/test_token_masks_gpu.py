"""Constrained decoding on the device: the mask kernel, and valid answers from split CUDA graphs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.engine.serving.serving_engine import ServingEngine
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.learner.micro_batch import pack, row_logprobs
from groupwise.model.grammar import GrammarCompiler, json_grammar
from groupwise.model.ops.logits import masked_logits
from groupwise.model.policy import Policy
from groupwise.records import Request, Sample, Sampling, derive_seed
from tests.support.cuda_checks import DEVICE, assert_repeatable
from tests.support.small_models import policy_of, small_model

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
MANY = 24 if DEVICE.type == "cuda" else 3


def is_valid(text: str) -> bool:
    value = json.loads(text)
    strings = all(isinstance(item, str) and len(item) <= 6 for item in value["b"])
    return list(value) == ["a", "b"] and 0 <= value["a"] <= 99 and len(value["b"]) <= 3 and strings


def on_device(kind: str = "llama") -> Policy:
    return policy_of(copy.deepcopy(small_model(kind)).to(DEVICE))


def mask_kernel(vocabulary: int) -> tuple[Callable[[], list[torch.Tensor]], torch.Tensor]:
    """Return a call of the kernel on random logits and masks, and what it must compute."""
    from groupwise.engine.cuda import sampling_kernels as kernels
    from groupwise.engine.cuda.attention_kernels import launch

    words, rows = -(-vocabulary // 32) + 1, 5
    masks_SW = torch.randint(-(2**31), 2**31 - 1, (9, words), dtype=torch.int32, device=DEVICE)
    slots_R = torch.tensor([7, 0, 8, 3, 3], dtype=torch.int32, device=DEVICE)
    logits_RV = torch.randn(rows, vocabulary, device=DEVICE)

    def masked() -> list[torch.Tensor]:
        own_RV = logits_RV.clone()
        chunks = -(-vocabulary // kernels.CHUNK)
        launch(
            kernels.apply_masks,
            (rows, chunks),
            own_RV, masks_SW, slots_R, vocabulary, words,
            CHUNK=kernels.CHUNK,
            num_warps=4,
        )  # fmt: skip
        return [own_RV]

    return masked, masked_logits(logits_RV, masks_SW[slots_R.long()])


@pytest.mark.parametrize("vocabulary", [33, 4096, 9001])
def test_the_kernel_excludes_what_plain_torch_excludes(vocabulary: int):
    masked, expected_RV = mask_kernel(vocabulary)
    assert torch.equal(masked()[0], expected_RV)


def test_masking_gives_the_same_bits_every_time():
    assert_repeatable(mask_kernel(9001)[0])


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(temperature=0)]
)
def test_rollouts_are_valid_and_drawn_from_the_masked_distribution(sampling):
    policy = on_device()
    policy.grammar = GrammarCompiler(policy, policy.end_tokens).compile(json_grammar(SCHEMA))
    sampling = Sampling(
        temperature=sampling.temperature, top_k=sampling.top_k, max_tokens=60 if DEVICE.type == "cuda" else 6
    )
    asked = [
        Request(prompt=(5, 9, 14 + n), seeds=tuple(derive_seed(0, n, m) for m in range(MANY)))
        for n in range(2)
    ]
    answers = Engine(policy, EngineConfig(max_sequences=MANY + 1)).generate(asked, sampling)
    plain = small_model()
    for request, group in zip(asked, answers, strict=True):
        for one in group:
            if one.finish == "end":
                assert is_valid(policy.decode(one.tokens))
            tokens = torch.tensor([*request.prompt, *one.tokens])
            with torch.no_grad():
                logits_TV = plain(tokens[None]).logits[0, len(request.prompt) - 1 : -1]
            masks_TW = torch.from_numpy(policy.grammar.masks([one.tokens]))
            logits_TV = masked_logits(logits_TV, masks_TW) / (sampling.temperature or 1.0)
            if sampling.top_k and not sampling.greedy:
                least_T1 = logits_TV.topk(sampling.top_k).values[:, -1:]
                logits_TV = logits_TV.masked_fill(logits_TV < least_T1, float("-inf"))
            own_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
            assert one.logprobs == pytest.approx(own_T.tolist(), abs=2e-3)


def test_a_server_mixes_free_and_constrained_answers():
    policy, chunks = on_device("qwen2"), Queue[Any]()
    engine = ServingEngine(
        policy, slots=8, context=96, waiting=64, deliver=chunks.put, failed=lambda error: chunks.put(error)
    )
    engine.start()
    grammar = json_grammar(SCHEMA)
    limits = Sampling(max_tokens=64 if DEVICE.type == "cuda" else 12)
    jobs = [
        Job(prompt=(5, 9, n), seeds=(n,), sampling=limits, grammar=grammar if n % 3 else None)
        for n in range(MANY)
    ]
    for job in jobs:
        engine.submit(job)
    tokens: dict[Job, list[int]] = {job: [] for job in jobs}
    finish: dict[Job, str] = {}
    while len(finish) < len(jobs):
        news = chunks.get(timeout=120)
        assert not isinstance(news, Exception), news
        for chunk in news:
            tokens[chunk.job] += chunk.tokens
            if chunk.finish is not None:
                finish[chunk.job] = chunk.finish
    engine.close()
    ended = [job for job in jobs if job.grammar and finish[job] == "end"]
    assert all(is_valid(policy.decode(tokens[job])) for job in ended)
    assert DEVICE.type == "cpu" or len(ended) > MANY // 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95)])
def test_the_trainer_agrees_with_the_sampler_on_the_masks(sampling):
    policy = on_device("qwen2")
    policy.grammar = GrammarCompiler(policy, policy.end_tokens).compile(json_grammar(SCHEMA))
    asked = Request(prompt=(5, 9, 14), seeds=tuple(range(MANY)))
    (group,) = Engine(policy, EngineConfig()).generate([asked], replace(sampling, max_tokens=40))
    samples = [
        Sample(
            tokens=asked.prompt + one.tokens,
            trained=(False,) * 3 + (True,) * len(one.tokens),
            logprobs=(0.0,) * 3 + one.logprobs,
            entropies=(0.0,) * 3 + one.entropies,
            advantages=(0.0,) * 3 + (1.0,) * len(one.tokens),
            prefix=3,
            group=0,
        )
        for one in group
    ]
    logprobs_N, entropy_N = row_logprobs(
        policy, pack(samples, device=DEVICE), sampling, entropy_gradient=False
    )
    logprobs_N.sum().backward()
    assert logprobs_N.tolist() == pytest.approx([x for one in group for x in one.logprobs], abs=2e-3)
    assert entropy_N.tolist() == pytest.approx([x for one in group for x in one.entropies], abs=2e-3)
    assert policy.head_weight.grad is not None
    assert bool(policy.head_weight.grad.isfinite().all())
