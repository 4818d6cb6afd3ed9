"""The GPU's way of generating, its kernels interpreted, against the CPU's."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)
from groupwise.config.schema import EngineConfig
from groupwise.engine import engine as engine_module
from groupwise.engine import prefill
from groupwise.engine.cuda import decode_attention, decode_loop
from groupwise.engine.cuda import graph_runner as cuda_runner
from groupwise.engine.cuda.decode_attention import DecodeLayout, StepState
from groupwise.engine.cuda.fused_layers import fused_forward
from groupwise.engine.cuda.graph_runner import can_be_captured
from groupwise.engine.engine import Engine
from groupwise.errors import InvariantError
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling
from tests.support.generation import EmulatedGPUEngine, assert_same, converse, requests, same_answers
from tests.support.small_models import SIZES, policy_of, small_model, tiny_tokenizer
from tests.support.tiny_families import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def both(
    policy: Policy, asked: list[Request], sampling: Sampling, **engine: Any
) -> tuple[EmulatedGPUEngine, list[list[Completion]]]:
    """Generate in both ways, and find them the same."""
    gpu = EmulatedGPUEngine(policy, EngineConfig(**engine))
    answers = gpu.generate(asked, sampling)
    assert_same(answers, Engine(policy, EngineConfig(**engine)).generate(asked, sampling))
    return gpu, answers


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_the_fused_forward_pass_writes_what_the_cpu_writes(kind, key_heads):
    policy = policy_of(small_model(kind, key_heads=key_heads))
    gpu, _ = both(policy, requests((1, 17), (2, 1)), Sampling(max_tokens=3))
    assert gpu.graph_runner is not None
    assert gpu.graph_runner.fused


SHAPE = {**SIZES, "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": None}


@pytest.mark.parametrize(
    ("config", "fused"),
    [
        (transformers.MistralConfig(**SHAPE, head_dim=8, sliding_window=None), True),
        (transformers.GPT2Config(vocab_size=272, n_embd=32, n_layer=2, n_head=4, n_positions=256), False),
        (transformers.PhiConfig(**SHAPE), False),
        (transformers.GemmaConfig(**SHAPE, head_dim=8), False),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_every_family_writes_what_the_cpu_writes_fused_or_not(config, fused):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    gpu, _ = both(policy_of(model), requests((3, 17), (2, 1)), Sampling(max_tokens=2))
    assert gpu.graph_runner is not None
    assert gpu.graph_runner.fused == fused


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gemma4_text"])
def test_windows_caps_sinks_and_uneven_heads_write_what_the_cpu_writes(family, monkeypatch):
    for name, value in {"PROMPT_BLOCK": 4, "LEAST": 4, "BLOCK": 4}.items():
        monkeypatch.setattr(decode_attention, name, value)
    gpu, _ = both(
        policy_of(tiny_model(family)), requests((14, 5), (2, 1)), Sampling(max_tokens=6), block_size=4
    )
    assert gpu.graph_runner is not None
    assert gpu.graph_runner.fused == (family == "mistral")


def test_a_model_that_is_not_fused_runs_as_it_is(small_policy, monkeypatch):
    monkeypatch.setattr(cuda_runner, "fused_forward", lambda *_, **__: None)
    gpu, _ = both(small_policy, requests((3, 17), (2, 1)), Sampling(max_tokens=3))
    assert gpu.graph_runner is not None
    assert not gpu.graph_runner.fused


def test_a_model_that_computes_something_else_is_not_fused(small_policy):
    layer = small_policy.model.model.layers[1]
    assert fused_forward(small_policy) is not None
    layer.mlp.act_fn = torch.nn.GELU()
    assert fused_forward(small_policy) is None


@pytest.mark.parametrize(
    ("family", "halves"),
    [("llama", True), ("qwen3", True), ("mistral", True), ("ernie4_5", False), ("helium", False)],
)
def test_families_that_turn_pairs_of_a_head_are_told_from_those_that_turn_halves(family, halves, caplog):
    caplog.set_level("INFO", logger="groupwise")
    assert (fused_forward(policy_of(tiny_model(family))) is not None) == halves
    assert ("interleaved rotary embeddings cannot be fused" in caplog.text) == (not halves)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.7), Sampling(top_k=9, top_p=0.9)], ids=str
)
def test_every_kind_of_sampling_draws_the_same(small_policy, sampling):
    sampling = Sampling(**{**{f: getattr(sampling, f) for f in sampling.__slots__}, "max_tokens": 3})
    both(small_policy, requests((5, 9), (2, 1)), sampling)


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=5), Sampling(max_tokens=5, stop=("a",), top_k=9)])
def test_a_sampling_rule_of_the_user_draws_the_same(small_policy, sampling):
    policy, seen = copy.copy(small_policy), set()
    end = min(policy.end_tokens)

    def rule(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        """No token twice in a row, and an end after a token that 7 divides."""
        seen.add(tuple(tokens))
        logits[tokens[-1]] = float("-inf")
        if tokens[-1] % 7 == 0:
            logits[end] += 50
        return logits

    policy.use_logits_processor("rule", rule)
    _, groups = both(policy, requests((5, 9, 2), (2, 1, 3)), sampling, max_sequences=3)
    answers = [one.tokens for group in groups for one in group]
    assert all(first != second for tokens in answers for first, second in pairwise(tokens))
    assert any(len(tokens) < 5 and tokens[-1] == end for tokens in answers)
    assert {len(tokens) for tokens in seen} > {5, 9, 2}


def test_long_prompts_and_answers_are_read_in_parts(small_policy, monkeypatch):
    for name, value in {"PROMPT_BLOCK": 4, "LEAST": 4, "BLOCK": 4}.items():
        monkeypatch.setattr(decode_attention, name, value)
    built: list[DecodeLayout] = []
    build = DecodeLayout.build

    def recorded(*args: Any, **settings: Any) -> DecodeLayout:
        built.append(build(*args, **settings))
        return built[-1]

    monkeypatch.setattr(DecodeLayout, "build", recorded)
    both(small_policy, requests((24, 5), (2, 1)), Sampling(max_tokens=7), block_size=4)
    assert {layout.own_splits for layout in built} == {1, 4}
    assert {layout.splits for layout in built} == {2}


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([100] * 400, 1),  # nobody has much to read
        ([500] * 400, 1),  # all the same, and enough to keep a GPU busy
        ([500] * 399 + [1000], 4),  # one would keep the others waiting
        ([500] * 8, 4),  # too few
        ([2000] * 8, 16),
    ],
)
def test_rows_are_split_when_there_are_few_of_them_or_some_are_much_longer(lengths, parts):
    assert decode_attention.own_splits(np.array(lengths), key_heads=2) == parts


def test_more_sequences_than_slots_take_turns(small_policy):
    asked = requests((5, 20, 3), (3, 2, 2))
    gpu, _ = both(small_policy, asked, Sampling(max_tokens=4), max_sequences=3)
    assert gpu.occupancy > 0.8


def test_preempted_sequences_write_the_same_when_they_start_over(small_policy):
    gpu, _ = both(small_policy, requests((4, 3), (2, 1)), Sampling(max_tokens=8), kv_tokens=20, block_size=4)
    assert gpu.preempted > 0


def test_answers_end_at_the_end_token_and_at_stop_strings(small_policy):
    torch.nn.init.zeros_(small_policy.head_weight)  # every token is equally likely
    small_policy.end_tokens = frozenset(range(0, 272, 9))
    _, answers = both(small_policy, requests((3, 4), (3, 2)), Sampling(max_tokens=8))
    assert {c.finish for group in answers for c in group} == {"end", "length"}
    text = tiny_tokenizer().decode(answers[0][0].tokens, skip_special_tokens=True)
    _, answers = both(small_policy, requests((3, 4), (3, 2)), Sampling(max_tokens=8, stop=(text[1],)))
    assert "stop" in {c.finish for group in answers for c in group}


def test_a_second_call_reuses_the_runner_and_sees_changed_weights(small_policy):
    gpu, before = both(small_policy, requests((3,), (2,)), Sampling(max_tokens=4))
    runner = gpu.graph_runner
    with torch.no_grad():
        for parameter in small_policy.model.parameters():
            parameter.mul_(1.1)
    after = gpu.generate(requests((3,), (2,)), Sampling(max_tokens=4))
    assert gpu.graph_runner is runner
    assert after != before
    assert_same(
        after, Engine(small_policy, EngineConfig()).generate(requests((3,), (2,)), Sampling(max_tokens=4))
    )
    gpu.release()
    assert gpu.graph_runner is None


@pytest.mark.parametrize(
    ("held", "free", "most", "blocks"),
    [
        (0, 80, 50, 50),  # all that is asked for
        (0, 80, 200, 80),  # all that fits
        (80, 16, 200, 80),  # a fifth more would fit: not worth a new cache and new graphs
        (80, 60, 200, 140),  # much more would
        (80, 16, 60, 60),  # the cache there is holds it
        (0, 2, 200, 10),  # what one answer needs, come what may
    ],
)
def test_the_cache_is_sized_by_what_is_free_and_kept_when_little_is_to_gain(
    small_policy, held, free, most, blocks, monkeypatch
):
    engine = EmulatedGPUEngine(small_policy, EngineConfig(block_size=4))
    monkeypatch.setattr(engine, "affordable_blocks", lambda: free)
    if held:
        engine.graph_runner = SimpleNamespace(capacity=SimpleNamespace(blocks=held))  # type: ignore[assignment]

    class Sized(Exception):
        """The size of the cache, before anything is computed."""

    def sized(count: int, *, block_size: int) -> None:
        raise Sized(count)

    monkeypatch.setattr(engine_module, "BlockPool", sized)
    # The prompt and each completion take 5 blocks, so one completion needs 10.
    with pytest.raises(Sized, match=f"^{blocks}$"):
        engine.generate(requests((20,), ((most - 5) // 5,)), Sampling(max_tokens=20))


def test_adapters_are_folded_into_copies_and_the_weights_are_not_touched(small_policy):
    adapted = peft.get_peft_model(
        copy.deepcopy(small_policy.model),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    policy = Policy(adapted, small_policy.tokenizer)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    gpu, _ = both(policy, requests((5,), (3,)), Sampling(max_tokens=4))
    assert gpu.graph_runner is not None
    assert gpu.graph_runner.fused
    assert all(torch.equal(before[name], p) for name, p in adapted.named_parameters())


@pytest.mark.parametrize(
    ("broken", "cut"),
    [(slice(3, 4), {}), (slice(None), {}), (slice(None), {"top_p": 0.9}), (slice(None), {"top_k": 5})],
    ids=["one", "all", "top-p", "top-k"],
)
def test_logits_that_are_not_finite_stop_the_run(small_policy, broken, cut):
    with torch.no_grad():
        small_policy.head_weight[broken] = math.nan
    with pytest.raises(InvariantError, match="entropy"):
        EmulatedGPUEngine(small_policy, EngineConfig()).generate(
            requests((3,), (1,)), Sampling(max_tokens=3, **cut)
        )


def test_a_model_that_looks_how_long_a_text_is_runs_uncaptured_and_not_fused(small_policy):
    assert can_be_captured(small_policy)
    small_policy.model.model.rotary_emb.rope_type = "dynamic"
    assert not can_be_captured(small_policy)
    assert fused_forward(small_policy) is None


def test_rows_are_captured_in_few_sizes_that_waste_little():
    sizes = {decode_attention.bucket(n) for n in range(1, 513)}
    assert len(sizes) <= 20
    assert all(n <= decode_attention.bucket(n) <= min(512, n + 63) for n in range(1, 513))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_with_deterministic_kernels_a_call_does_not_depend_on_the_calls_before_it(
    small_policy, monkeypatch, deterministic
):
    """A resumed run has not made the evaluation of a new one, whose prompts, groups and slots are larger."""
    monkeypatch.setattr(decode_attention, "PROMPT_BLOCK", 4)
    built: list[tuple[int, int, int]] = []
    build = DecodeLayout.build

    def recorded(*args: Any, **settings: Any) -> DecodeLayout:
        layout = build(*args, **settings)
        built.append((layout.rows, layout.splits, layout.state.members))
        return layout

    monkeypatch.setattr(DecodeLayout, "build", recorded)
    sampling = Sampling(max_tokens=3)
    step = requests((5, 9, 2), (2, 1, 2))

    def run(*calls: list[Request]) -> tuple[list[tuple[int, int, int]], Any]:
        engine = EmulatedGPUEngine(small_policy, EngineConfig(block_size=4))
        for call in calls:
            built.clear()
            groups = engine.generate(call, sampling)
        return sorted(built), groups

    alone, groups = run(step)
    later, again = run(requests((60, 5), (9, 14)), step)
    assert later == alone
    assert again == groups


@pytest.mark.parametrize("held", [0, 700])
def test_with_deterministic_kernels_the_cache_does_not_depend_on_the_cache_before_it(
    small_policy, monkeypatch, deterministic, held
):
    """700 blocks that the last call has left are as good as free."""
    engine = Engine(small_policy, EngineConfig(block_size=4))
    block = 2 * small_policy.layers * small_policy.key_heads * small_policy.head_size * 4 * 4
    monkeypatch.setattr(engine_module, "free_memory", lambda device: (1000 - held) * block)
    monkeypatch.setattr(engine_module, "total_memory", lambda device: 10_000 * block)
    if held:
        engine.graph_runner = SimpleNamespace(capacity=SimpleNamespace(blocks=held))
    assert engine._fitting(10_000, 5) == 800


def test_a_group_larger_than_a_tile_takes_several():
    state = StepState(
        slots=6, members=2, prompt_blocks=1, own_blocks=1, idle_block=9, device=torch.device("cpu")
    )
    state.host_prompt_length[[0, 2, 4, 5]] = [30, 30, 30, 31]
    state.set_rows(np.array([4, 0, 2, 5]), np.array([7, 7, 7, 8]))
    assert state.host_rows[:6].tolist() == [4, 0, 2, 5, 6, 6]
    # The slot whose prompt it is, the prompt's length, and the rows of its members.
    assert state.host_tiles.tolist()[:4] == [[4, 30, 0, 1], [2, 30, 2, -1], [5, 31, 3, -1], [-1] * 4]


@pytest.mark.parametrize("settings", [{"max_sequences": 2}, {"kv_tokens": 64}])
def test_turns_and_long_prompts_go_on_from_what_the_cache_has(small_policy, settings, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 9)
    monkeypatch.setattr(decode_loop, "PREFILL_TOKENS", 9)
    asked = requests((5, 20), (1, 2))
    gpu = converse(
        EmulatedGPUEngine(small_policy, EngineConfig(**settings)), asked, turns=2, reuse_cache=True
    )
    cpu = converse(Engine(small_policy, EngineConfig(**settings)), asked, turns=2, reuse_cache=False)
    assert len(gpu.answers) == 3 * 2
    same_answers(gpu, cpu)


def test_a_released_engine_frees_its_cache_at_once(small_policy):
    gpu, _ = both(small_policy, requests((5, 16), (2, 1)), Sampling(max_tokens=3))
    cache = weakref.ref(gpu.graph_runner.cache)
    gc.disable()
    try:
        gpu.release()
        assert cache() is None
    finally:
        gc.enable()


def test_layers_are_not_left_unfused_because_memory_was_short(small_policy):
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    small_policy.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        fused_forward(small_policy)
