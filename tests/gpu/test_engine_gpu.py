"""Generation on the device, whole: CUDA graphs, kernels and scheduling, against plain transformers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.engine.multi_lora import LoRABank, MultiLoRAEngine
from groupwise.engine.sampler import Penalties, pick, uniforms
from groupwise.engine.scheduler import BlockPool
from groupwise.engine.serving.cuda_serving import CUDASteps
from groupwise.engine.serving.serving_scheduler import CPUSteps, Job, ServingScheduler
from groupwise.errors import InvariantError
from groupwise.model.device import supports_fp8
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling, derive_seed
from tests.support.cuda_checks import DEVICE
from tests.support.small_models import policy_of, small_model, tiny_tokenizer
from tests.support.tiny_families import tiny_model

FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "smollm3", "phi3", "olmo2", "granite", "gemma2", "gemma3_text"),
    *("gemma4_text", "gpt_oss", "deepseek_v3", "mixtral", "qwen3_moe", "gpt_neox", "gpt2", "starcoder2"),
    *("stablelm", "cohere2", "gptj", "falcon", "bloom", "lfm2", "qwen3_next", "mamba2", "granitemoehybrid"),
)

FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if supports_fp8(DEVICE) else {}


def requests(*, step: int = 0) -> list[Request]:
    """Prompts of one token, whole blocks, and other lengths; groups of several sizes."""
    return [
        Request(
            prompt=tuple((7 * n + 13 * t * t) % 256 for t in range(length)),
            seeds=tuple(derive_seed(0, step, n, member) for member in range(members)),
        )
        for n, (length, members) in enumerate(zip((1, 16, 32, 37, 5), (3, 1, 4, 2, 9), strict=True))
    ]


def on_device(model: Any, dtype: torch.dtype = torch.float32) -> Policy:
    return policy_of(copy.deepcopy(model).to(DEVICE, dtype))


def assert_sampled_from(
    plain: Any, asked: list[Request], groups: list[list[Completion]], sampling: Sampling
) -> None:
    """Each token is the one that the noise picks from the plain model's distribution, with its log-prob."""
    wrong = total = 0
    for request, group in zip(asked, groups, strict=True):
        for seed, completion in zip(request.seeds, group, strict=True):
            tokens = torch.tensor(request.prompt + completion.tokens)
            with torch.no_grad():
                logits = plain(tokens[None]).logits[0, len(request.prompt) - 1 : -1].float()
            logprobs_TV = (logits / sampling.temperature).log_softmax(-1)
            sampled_T = tokens[len(request.prompt) :]
            own_T = logprobs_TV.gather(1, sampled_T[:, None]).squeeze(1)
            assert torch.allclose(torch.tensor(completion.logprobs), own_T, atol=2e-3)
            count = len(sampled_T)
            noise = uniforms(np.full(count, seed, np.uint64), np.arange(count, dtype=np.uint64))
            wrong += int((pick(logprobs_TV.exp(), torch.from_numpy(noise)) != sampled_T).sum())
            total += count
    # Noise at the border between two tokens may fall on either side, by rounding.
    assert wrong <= max(1, total // 200)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_samples_from_the_distribution_of_plain_transformers(family: str):
    plain = tiny_model(family).eval()
    sampling = Sampling(temperature=0.9, max_tokens=40)
    groups = Engine(on_device(plain), EngineConfig()).generate(requests(), sampling)
    assert_sampled_from(plain, requests(), groups, sampling)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_log_probabilities_in_bfloat16_are_those_of_the_training_pass(kind):
    from groupwise.model.attention.packed import PackedLayout

    policy = on_device(small_model(kind), torch.bfloat16)
    asked = requests()
    groups = Engine(policy, EngineConfig()).generate(asked, Sampling(max_tokens=64))
    gaps = []
    for request, group in zip(asked, groups, strict=True):
        for completion in group:
            tokens = torch.tensor(request.prompt + completion.tokens, device=DEVICE)
            layout = PackedLayout.build([(len(tokens), [])], device=DEVICE)
            with torch.no_grad():
                hidden = policy.hidden(tokens, torch.arange(len(tokens), device=DEVICE), layout)
                logprobs_TV = policy.logits(hidden[len(request.prompt) - 1 : -1]).float().log_softmax(-1)
            own_T = logprobs_TV.gather(1, tokens[len(request.prompt) :, None]).squeeze(1).cpu()
            gaps.append((torch.tensor(completion.logprobs) - own_T).abs())
    assert float(torch.cat(gaps).mean()) < 0.02


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in group] for group in groups]


@pytest.mark.parametrize(
    "engine", [{"max_sequences": 3}, {"kv_tokens": 160}, {"block_size": 32}], ids=lambda e: next(iter(e))
)
def test_other_batching_samples_from_the_same_distribution(engine: dict[str, Any]):
    plain = small_model()
    sampling = Sampling(max_tokens=40)
    made = Engine(on_device(plain), EngineConfig(**engine))
    groups = made.generate(requests(), sampling)
    assert_sampled_from(plain, requests(), groups, sampling)
    assert made.preempted > 0 or "kv_tokens" not in engine


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, max_tokens=30),
        Sampling(temperature=0.7, top_k=5, max_tokens=30),
        Sampling(top_p=0.8, max_tokens=30),
        Sampling(min_p=0.1, max_tokens=30),
        Sampling(max_tokens=30, stop=("e",)),
    ],
    ids=["greedy", "top_k", "top_p", "min_p", "stop"],
)
def test_every_kind_of_sampling_gives_what_the_cpu_gives(sampling: Sampling):
    plain = small_model()
    on_cpu = Engine(policy_of(copy.deepcopy(plain)), EngineConfig()).generate(requests(), sampling)
    on_gpu = Engine(on_device(plain), EngineConfig()).generate(requests(), sampling)
    same = [
        one == other
        for group, others in zip(tokens(on_cpu), tokens(on_gpu), strict=True)
        for one, other in zip(group, others, strict=True)
    ]
    assert sum(same) >= len(same) - 1  # rounding at the border between two tokens


def adapted(kind: str = "llama") -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(small_model(kind), config)


def policy_with(model: Any) -> Policy:
    model = copy.deepcopy(model).to(DEVICE)
    policy_of(model.get_base_model())
    return Policy(model, tiny_tokenizer())


@pytest.mark.parametrize("change", ["weights in place", "adapters", "new tensors", "released"])
def test_graphs_follow_the_weights_wherever_they_move(change: str):
    """A graph holds addresses: one that was captured before a change must not be used after it."""
    plain = adapted() if change == "adapters" else small_model()
    policy = policy_with(plain) if change == "adapters" else on_device(plain)
    engine, sampling = Engine(policy, EngineConfig()), Sampling(max_tokens=30)
    engine.generate(requests(), sampling)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for ours, theirs in zip(policy.model.parameters(), plain.parameters(), strict=True):
            if change == "adapters" and not theirs.requires_grad:
                continue
            theirs += 0.05 * torch.randn(theirs.shape, generator=noise)
            if change == "new tensors":
                ours.data = theirs.detach().to(DEVICE).clone()
            else:
                ours.copy_(theirs)
    if change == "released":
        engine.release()
        torch.cuda.empty_cache()
    asked = requests(step=1)
    assert_sampled_from(plain, asked, engine.generate(asked, sampling), sampling)


def test_members_of_a_population_share_a_batch_and_keep_their_own_adapters():
    plain = adapted()
    policy = policy_with(plain)
    members = LoRABank(policy)
    noise = torch.Generator().manual_seed(0)
    for _ in range(2):
        members.add(
            {
                name: tensor + 0.3 * torch.randn(tensor.shape, generator=noise).to(DEVICE)
                for name, tensor in members.of(0).items()
            }
        )
    engine = MultiLoRAEngine(members, EngineConfig())
    assert engine.batched
    asked = [replace(request, adapter=n % 3) for n, request in enumerate(requests())]
    sampling = Sampling(max_tokens=30)
    groups = engine.generate(asked, sampling)
    own = dict(plain.named_parameters())
    for number in range(3):
        with torch.no_grad():
            for name, tensor in members.of(number).items():
                own[name].copy_(tensor.cpu())
        mine = [n for n in range(len(asked)) if n % 3 == number]
        assert_sampled_from(plain, [asked[n] for n in mine], [groups[n] for n in mine], sampling)


@pytest.mark.parametrize("settings", [{}, FP8], ids=["bfloat16", "fp8"])
def test_the_same_call_gives_the_same_bits_every_time(settings: dict[str, str]):
    policy = on_device(small_model(), torch.bfloat16)
    engine = Engine(policy, EngineConfig(**settings))
    first = engine.generate(requests(), Sampling(max_tokens=60))
    for _ in range(20):
        assert engine.generate(requests(), Sampling(max_tokens=60)) == first


def test_logits_that_are_not_finite_stop_generation():
    policy = on_device(small_model())
    with torch.no_grad():
        next(policy.model.parameters())[5] = torch.nan
    with pytest.raises(InvariantError, match="entropy"):
        Engine(policy, EngineConfig()).generate([Request(prompt=(5, 5), seeds=(1,))], Sampling(max_tokens=4))


def test_a_prompt_longer_than_a_prefill_pass_is_read_whole(monkeypatch):
    from groupwise.engine import prefill

    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 48)
    plain = small_model()
    asked = [Request(prompt=tuple((3 * t * t) % 256 for t in range(300)), seeds=(1, 2, 3))]
    sampling = Sampling(max_tokens=20)
    assert_sampled_from(
        plain, asked, Engine(on_device(plain), EngineConfig()).generate(asked, sampling), sampling
    )


@pytest.mark.parametrize("budget", [48, 8192])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_prompts_read_in_bfloat16_give_the_first_token_of_plain_transformers(kind, budget, monkeypatch):
    """In one pass, and in passes of 48 tokens that attend to what is cached; against float32."""
    from groupwise.engine import prefill

    monkeypatch.setattr(prefill, "PREFILL_TOKENS", budget)
    plain = small_model(kind).to(torch.bfloat16).float()
    asked = [
        Request(prompt=tuple((3 * t * t + n) % 256 for t in range(length)), seeds=tuple(range(16)))
        for n, length in enumerate((1, 17, 300, 700))
    ]
    groups = Engine(on_device(small_model(kind), torch.bfloat16), EngineConfig()).generate(
        asked, Sampling(max_tokens=1)
    )
    for request, group in zip(asked, groups, strict=True):
        with torch.no_grad():
            logprobs_V = plain(torch.tensor([request.prompt])).logits[0, -1].log_softmax(-1)
        gaps = [abs(one.logprobs[0] - float(logprobs_V[one.tokens[0]])) for one in group]
        assert sum(gaps) / len(gaps) < 0.04, len(request.prompt)


def test_penalties_and_neighbours_without_them_share_graphs_and_write_what_plain_steps_write():
    penalties = Penalties(bias=((60, 4.0), (3, -100.0)), repetition=1.4, frequency=0.5, presence=0.3)
    jobs = [
        Job(
            prompt=tuple(range(40 + n, 60 + n)),
            seeds=tuple(range(3 * n, 3 * n + 1 + n % 3)),
            sampling=Sampling(max_tokens=24, temperature=(0.0, 0.8)[n % 2]),
            penalties=(penalties, None, replace(penalties, repetition=0.7))[n % 3],
        )
        for n in range(9)
    ]
    policy = on_device(small_model())

    def written(kind: Any) -> list[Completion]:
        scheduler = ServingScheduler(slots=6, pool=BlockPool(64, block_size=16), context=64)
        with torch.inference_mode():
            steps = kind(policy, scheduler, policy.end_tokens)
            if kind is CUDASteps:
                steps.runner.refresh()
            found: dict[tuple[int, int], Completion] = {}
            for job in jobs:
                scheduler.enter(job)
            while scheduler.busy:
                for sequence, completion in steps.advance():
                    found[jobs.index(scheduler.forget(sequence)), sequence.member] = completion
        return [found[key] for key in sorted(found)]

    wrong = 0
    for got, expected in zip(written(CUDASteps), written(CPUSteps), strict=True):
        same = got.tokens == expected.tokens
        wrong += not same  # rounding may move a draw across the border of two tokens
        if same:
            assert got.logprobs == pytest.approx(expected.logprobs, abs=2e-3)
    assert wrong <= 1


def gap(plain: Any, asked: list[Request], groups: list[list[Completion]]) -> float:
    """Return the mean distance between the sampler's log-probabilities and those of a model in float32."""
    gaps = []
    for request, group in zip(asked, groups, strict=True):
        for completion in group:
            tokens = torch.tensor(request.prompt + completion.tokens)
            with torch.no_grad():
                logits = plain(tokens[None]).logits[0, len(request.prompt) - 1 : -1]
            own_T = logits.log_softmax(-1).gather(1, tokens[len(request.prompt) :, None]).squeeze(1)
            gaps.append((own_T - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(gaps).mean())


@pytest.mark.skipif(not supports_fp8(DEVICE), reason="needs compute capability 9.0")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}, FP8],
    ids=["products", "cache", "both"],
)
def test_generation_in_fp8_stays_near_the_model_and_follows_its_weights(kind: str, settings: dict[str, str]):
    plain = copy.deepcopy(small_model(kind)).to(torch.bfloat16).float()
    policy = on_device(plain, torch.bfloat16)
    sampling = Sampling(max_tokens=40)
    half, engine = Engine(policy, EngineConfig()), Engine(policy, EngineConfig(**settings))
    for step in range(2):
        asked = requests(step=step)
        rounding = gap(plain, asked, half.generate(asked, sampling))
        assert rounding < gap(plain, asked, engine.generate(asked, sampling)) < 0.25
        with torch.no_grad():
            for ours, theirs in zip(policy.model.parameters(), plain.parameters(), strict=True):
                theirs.copy_(theirs.flip(0))
                ours.copy_(theirs)
    assert engine.graph_runner is not None
    assert engine.graph_runner.fused
    assert (engine.graph_runner.cache.keys.dtype == torch.float8_e4m3fn) == ("kv_cache_dtype" in settings)
