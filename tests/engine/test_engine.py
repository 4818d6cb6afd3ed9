"""The engine against plain transformers, and against itself under every other way of batching."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import weakref
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import peft
import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.engine.sampler import uniforms
from groupwise.errors import ConfigError, InvariantError
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling
from tests.support.generation import assert_same, requests, tokens
from tests.support.naive_distribution import naive_logprobs
from tests.support.small_models import VOCABULARY, Scripted, policy_of, small_model, tiny_tokenizer


def generate(
    policy: Policy, asked: list[Request], sampling: Sampling, **engine: Any
) -> list[list[Completion]]:
    return Engine(policy, EngineConfig(**engine)).generate(asked, sampling)


@torch.no_grad()
def assert_parity(
    reference: Any, asked: list[Request], answers: list[list[Completion]], sampling: Sampling
) -> None:
    """The log-probabilities are those of one plain forward pass over prompt and completion."""
    for request, group in zip(asked, answers, strict=True):
        assert len(group) == len(request.seeds)
        for completion in group:
            row = torch.tensor([request.prompt + completion.tokens])
            logits_TV = reference(row).logits[0, len(request.prompt) - 1 : -1]
            expected_TV = [naive_logprobs(logits_V, sampling) for logits_V in logits_TV]
            chosen = [expected[t] for expected, t in zip(expected_TV, completion.tokens, strict=True)]
            assert completion.logprobs == pytest.approx(chosen, abs=1e-5)
            entropies = [-sum(math.exp(x) * x for x in row if x > -math.inf) for row in expected_TV]
            assert completion.entropies == pytest.approx(entropies, abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(temperature=1.8),
        Sampling(top_p=0.8),
        Sampling(top_k=5),
        Sampling(min_p=0.1),
        Sampling(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
        Sampling(temperature=0.0),
    ],
    ids=str,
)
def test_logprobs_equal_a_plain_forward_pass_under_the_sampling_distribution(small_policy, sampling):
    sampling, asked = replace(sampling, max_tokens=20), requests()
    assert_parity(small_model(), asked, generate(small_policy, asked, sampling), sampling)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logprobs_equal_a_plain_forward_pass_for_every_architecture(kind, key_heads):
    sampling, asked = Sampling(max_tokens=18), requests((1, 16, 23), (2, 3, 1))
    policy = policy_of(small_model(kind, key_heads=key_heads))
    answers = generate(policy, asked, sampling)
    assert_parity(small_model(kind, key_heads=key_heads), asked, answers, sampling)


def test_logprobs_equal_a_plain_forward_pass_when_long_and_short_prompts_meet(small_policy):
    sampling, asked = Sampling(max_tokens=5), requests((700, 1, 512), (2, 2, 1))
    assert_parity(small_model(), asked, generate(small_policy, asked, sampling), sampling)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_logprobs_equal_a_plain_forward_pass_for_any_block_size(small_policy, block_size):
    sampling, asked = Sampling(max_tokens=9), requests((6, 1, 7), (2, 1, 3))
    answers = generate(small_policy, asked, sampling, block_size=block_size)
    assert_parity(small_model(), asked, answers, sampling)


def test_greedy_writes_what_transformers_generate_writes(small_policy):
    asked = requests(groups=(1,) * 5)
    answers = generate(small_policy, asked, Sampling(temperature=0.0, max_tokens=24))
    for request, (completion,) in zip(asked, answers, strict=True):
        prompt = torch.tensor([request.prompt])
        output = small_model().generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
        )
        assert completion.tokens == tuple(output[0, len(request.prompt) :].tolist())


@pytest.mark.parametrize(
    "engine",
    [
        {"max_sequences": 1},
        {"max_sequences": 4},
        {"block_size": 1},
        {"block_size": 7},
        {"block_size": 64},
        {"max_sequences": 6, "block_size": 5},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_they_are_batched(small_policy, engine):
    sampling, asked = Sampling(max_tokens=30), requests()
    assert_same(generate(small_policy, asked, sampling, **engine), generate(small_policy, asked, sampling))


@pytest.mark.parametrize(("kv_tokens", "block_size"), [(72, 4), (96, 8), (120, 4)])
def test_preempted_sequences_write_the_same_when_they_start_over(small_policy, kv_tokens, block_size):
    sampling, asked = Sampling(max_tokens=30), requests()
    tight = Engine(small_policy, EngineConfig(kv_tokens=kv_tokens, block_size=block_size))
    answers = tight.generate(asked, sampling)
    assert tight.preempted > 0
    roomy = Engine(small_policy, EngineConfig())
    assert_same(answers, roomy.generate(asked, sampling))
    assert roomy.preempted == 0


def test_tokens_do_not_depend_on_who_shares_the_batch(small_policy):
    sampling, asked = Sampling(max_tokens=30), requests()
    together = generate(small_policy, asked, sampling)
    for request, group in zip(asked, together, strict=True):
        assert_same([group], generate(small_policy, [request], sampling))
    last = replace(asked[-1], seeds=asked[-1].seeds[-1:])
    assert_same([together[-1][-1:]], generate(small_policy, [last], sampling))
    assert_same(together[::-1], generate(small_policy, asked[::-1], sampling))


def test_members_of_a_group_differ_and_seeds_decide_how(small_policy):
    sampling = Sampling(max_tokens=12)
    (group,) = tokens(generate(small_policy, requests((9,), (6,)), sampling))
    assert len(set(group)) == 6
    assert tokens(generate(small_policy, requests((9,), (6,), step=1), sampling)) != [group]
    twice = replace(requests((9,), (1,))[0], seeds=(5, 5))
    ((one, other),) = tokens(generate(small_policy, [twice], sampling))
    assert one == other


def test_each_token_is_drawn_with_the_noise_of_its_own_seed_and_position(small_policy):
    torch.nn.init.zeros_(small_policy.head_weight)  # every token is equally likely
    seeds = (3, 14)
    (group,) = generate(small_policy, [Request(prompt=(1, 2, 3), seeds=seeds)], Sampling(max_tokens=20))
    for seed, completion in zip(seeds, group, strict=True):
        positions = np.arange(len(completion.tokens), dtype=np.uint64)
        noise = uniforms(np.full(len(positions), seed, dtype=np.uint64), positions)
        assert completion.tokens == tuple((noise * VOCABULARY).astype(int).tolist())


def test_no_requests_give_no_completions(small_policy):
    assert generate(small_policy, [], Sampling()) == []


# How completions end.


def written(small_policy: Policy, script: str | list[int], sampling: Sampling) -> Completion:
    """What the engine makes of a policy that is sure to write this."""
    wanted = tiny_tokenizer()(script)["input_ids"] if isinstance(script, str) else script
    policy = Scripted(small_policy, [*wanted, *[0] * sampling.max_tokens])
    ((completion,),) = generate(policy, [Request(prompt=(65,), seeds=(0,))], sampling)
    return completion


def text(completion: Completion) -> str:
    return tiny_tokenizer().decode(completion.tokens, skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_token_is_included_and_last(small_policy, temperature):
    end = tiny_tokenizer().eos_token_id
    completion = written(small_policy, [10, 11, end, 12], Sampling(max_tokens=9, temperature=temperature))
    assert completion.tokens == (10, 11, end)
    assert completion.finish == "end"


@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17])
def test_an_endless_answer_has_exactly_max_tokens(small_policy, max_tokens):
    completion = written(small_policy, [10] * 40, Sampling(max_tokens=max_tokens))
    assert completion.tokens == (10,) * max_tokens
    assert completion.finish == "length"


def test_an_end_token_in_the_last_place_counts_as_the_end(small_policy):
    end = tiny_tokenizer().eos_token_id
    assert written(small_policy, [10, end], Sampling(max_tokens=2)).finish == "end"


@pytest.mark.parametrize(
    ("script", "stop", "expected"),
    [
        ("abc.def", (".",), "abc."),
        ("one END two", ("END",), "one END"),  # split over three tokens
        ("wait →\nthen", ("→",), "wait →"),  # one character of three tokens
        ("größer", ("ße",), "größe"),  # two characters of three tokens
        ("is 🙂🙃 it", ("🙃",), "is 🙂🙃"),
        ("aaab", ("aab", "zzzzzzzz"), "aaab"),  # the longer stop string does not hide the shorter
        ("x</answer>y", ("</answer>",), "x</answer>"),  # one token of nine characters
        ("x</answer>y", ("x</ans",), "x</answer>"),  # ends inside a token: the token stays whole
        ("x</answer>y", ("nsw",), "x</answer>"),  # inside one token
    ],
)
def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(small_policy, script, stop, expected):
    completion = written(small_policy, script, Sampling(max_tokens=20, stop=stop))
    assert text(completion) == expected
    assert completion.finish == "stop"


def test_tokens_without_text_inside_a_stop_string_do_not_hide_it(small_policy):
    start, unknown = tiny_tokenizer().convert_tokens_to_ids("<|im_start|>"), 271
    e, n, d = tiny_tokenizer()("END")["input_ids"]
    script = [e, start, start, start, unknown, n, unknown, start, unknown, d, e]
    completion = written(small_policy, script, Sampling(max_tokens=20, stop=("END",)))
    assert completion.tokens == tuple(script[:-1])
    assert completion.finish == "stop"


def test_half_a_character_is_not_a_stop_string(small_policy):
    script = tiny_tokenizer()("é")["input_ids"]
    sampling = Sampling(max_tokens=4, stop=("é",))
    assert written(small_policy, script[:1], sampling).finish == "length"
    assert written(small_policy, script, sampling).finish == "stop"


def test_a_stop_string_in_the_prompt_does_not_count(small_policy):
    prompt = tuple(tiny_tokenizer()("...")["input_ids"])
    policy = Scripted(small_policy, [0, 0, *[10] * 9])
    asked = [Request(prompt=prompt, seeds=(0,))]
    ((completion,),) = generate(policy, asked, Sampling(max_tokens=5, stop=(".", "..")))
    assert completion.finish == "length"


def test_stop_strings_found_in_free_text_cut_it_where_they_first_appear(small_policy):
    asked, sampling = requests(), Sampling(max_tokens=40, temperature=1.5)
    free = generate(small_policy, asked, sampling)
    stop = tuple(
        {text(c)[3:5] for group in free for c in group if len(text(c)) > 5 and "\ufffd" not in text(c)[3:5]}
    )
    assert stop
    stopped = generate(small_policy, asked, replace(sampling, stop=stop))
    for before, after in zip(chain(*free), chain(*stopped), strict=True):
        assert after.tokens == before.tokens[: len(after.tokens)]
        if after.finish == "stop":
            assert any(s in text(after) for s in stop)
            shorter = tiny_tokenizer().decode(after.tokens[:-1], skip_special_tokens=True)
            assert not any(s in shorter for s in stop)
        else:
            assert after.tokens == before.tokens
            assert not any(s in text(after) for s in stop)
    assert any(c.finish == "stop" for group in stopped for c in group)


# What the engine leaves behind.


def test_the_model_keeps_its_modes_and_its_parameters(small_policy):
    model = small_policy.model
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: p.clone() for name, p in model.named_parameters()}
    generate(small_policy, requests(), Sampling(max_tokens=4))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_the_model_keeps_its_modes_when_generation_fails(small_policy):
    small_policy.model.train()
    with torch.no_grad():
        small_policy.head_weight[3] = math.nan
    with pytest.raises(InvariantError, match="entropy"):
        generate(small_policy, requests(), Sampling(max_tokens=4))
    assert small_policy.model.training


@pytest.fixture
def frozen_when_asked(monkeypatch):
    """How many objects the garbage collector left alone at each call of the model."""
    counts = []
    hidden = Policy.hidden

    def watched(self, *args, **kwargs):
        counts.append(gc.get_freeze_count())
        return hidden(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "hidden", watched)
    return counts


def test_the_garbage_collector_leaves_alone_what_was_there_until_a_call_ends(small_policy, frozen_when_asked):
    Engine(small_policy, EngineConfig()).generate(requests((3,), (1,)), Sampling(max_tokens=2))
    assert min(frozen_when_asked) > 1000
    assert gc.get_freeze_count() == 0
    with torch.no_grad():
        small_policy.head_weight[3] = math.nan
    with pytest.raises(InvariantError, match="entropy"):
        Engine(small_policy, EngineConfig()).generate(requests((3,), (1,)), Sampling(max_tokens=2))
    assert gc.get_freeze_count() == 0


def test_what_a_program_has_frozen_stays_frozen(small_policy, frozen_when_asked):
    gc.freeze()
    try:
        Engine(small_policy, EngineConfig()).generate(requests((3,), (1,)), Sampling(max_tokens=2))
        assert min(frozen_when_asked) > 1000
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_dropout_plays_no_part_in_generation():
    asked, sampling = requests(), Sampling(max_tokens=12)
    policy = policy_of(small_model(attention_dropout=0.5))
    policy.model.train()
    assert_same(generate(policy, asked, sampling), generate(policy_of(small_model()), asked, sampling))


def test_global_random_state_is_neither_read_nor_changed(small_policy):
    torch.manual_seed(1)
    one = generate(small_policy, requests(), Sampling(max_tokens=6))
    state = torch.get_rng_state()
    other = generate(small_policy, requests(), Sampling(max_tokens=6))
    assert torch.equal(torch.get_rng_state(), state)
    assert one == other


def test_a_second_call_gives_what_a_fresh_engine_gives(small_policy):
    sampling = Sampling(max_tokens=10)
    engine = Engine(small_policy, EngineConfig())
    engine.generate(requests((40, 40), (9, 9)), sampling)
    cache = engine.runner
    again = engine.generate(requests(), sampling)
    assert engine.runner is cache
    assert again == generate(small_policy, requests(), sampling)


def test_the_cache_grows_when_a_call_needs_more(small_policy):
    engine = Engine(small_policy, EngineConfig())
    engine.generate(requests((3,), (1,)), Sampling(max_tokens=4))
    larger = engine.generate(requests(), Sampling(max_tokens=30))
    assert larger == generate(small_policy, requests(), Sampling(max_tokens=30))


def test_what_lies_in_the_cache_from_before_is_never_read(small_policy):
    engine, sampling = Engine(small_policy, EngineConfig(block_size=4)), Sampling(max_tokens=10)
    first = engine.generate(requests(), sampling)
    assert engine.runner is not None
    engine.runner.cache.keys.fill_(30.0)
    engine.runner.cache.values.fill_(-30.0)
    assert engine.generate(requests(), sampling) == first


def test_changed_weights_are_seen_at_once_and_completely(small_policy):
    engine, sampling = Engine(small_policy, EngineConfig()), Sampling(max_tokens=10)
    before = engine.generate(requests(), sampling)
    with torch.no_grad():
        for parameter in small_policy.model.parameters():
            parameter.mul_(1.1)
    after = engine.generate(requests(), sampling)
    assert tokens(after) != tokens(before)
    assert after == generate(small_policy, requests(), sampling)


# What the user is told.


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused(small_policy):
    assert generate(small_policy, requests((1020,), (1,)), Sampling(max_tokens=4))
    with pytest.raises(ConfigError) as refused:
        generate(small_policy, requests((1, 1020), (1, 1)), Sampling(max_tokens=5))
    assert str(refused.value) == (
        "a prompt of 1020 tokens and rollout.max_tokens=5 exceed the model's context of 1024 tokens; "
        "lower rollout.max_tokens"
    )


def test_a_prompt_longer_than_the_context_is_refused_with_a_remedy_that_can_help(small_policy):
    with pytest.raises(ConfigError) as refused:
        generate(small_policy, requests((1024,), (1,)), Sampling(max_tokens=1))
    assert str(refused.value) == (
        "a prompt of 1024 tokens leaves no room for a completion in the model's context of 1024 tokens; "
        "shorten the prompt or use a model with a longer context"
    )


def test_a_cache_too_small_for_the_longest_sequence_is_refused_with_the_size_it_needs(small_policy):
    asked, sampling = requests((1, 9), (2, 2)), Sampling(max_tokens=8)
    with pytest.raises(ConfigError) as refused:
        generate(small_policy, asked, sampling, block_size=4, kv_tokens=19)
    assert str(refused.value) == (
        "engine.kv_tokens=19 cannot hold the longest prompt and rollout.max_tokens=8; "
        "set engine.kv_tokens to at least 20"
    )
    assert_same(
        generate(small_policy, asked, sampling, block_size=4, kv_tokens=20),
        generate(small_policy, asked, sampling),
    )


def test_adapters_are_folded_into_the_weights_for_generation_and_the_weights_come_back_bit_for_bit(
    small_policy: Policy,
) -> None:
    adapted = peft.get_peft_model(
        copy.deepcopy(small_policy.model),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    policy = Policy(adapted, small_policy.tokenizer)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    trainable = set(policy.trainable())
    request = Request(prompt=(5, 6, 7), seeds=(1, 2, 3))
    (merged_adapters,) = Engine(policy, EngineConfig()).generate([request], Sampling(max_tokens=12))
    assert all(torch.equal(before[name], p) for name, p in adapted.named_parameters())
    assert set(policy.trainable()) == trainable
    policy.merged_adapters = contextlib.nullcontext  # type: ignore[method-assign]
    (on_the_fly,) = Engine(policy, EngineConfig()).generate([request], Sampling(max_tokens=12))
    assert [c.tokens for c in merged_adapters] == [c.tokens for c in on_the_fly]
    assert [c.logprobs for c in merged_adapters] == [pytest.approx(c.logprobs, abs=1e-4) for c in on_the_fly]


def test_a_released_engine_frees_its_cache_at_once(small_policy: Policy) -> None:
    engine = Engine(small_policy, EngineConfig())
    engine.generate(requests(), Sampling(max_tokens=3))
    assert engine.runner is not None
    cache = weakref.ref(engine.runner.cache)
    gc.disable()
    try:
        engine.release()
        assert cache() is None
    finally:
        gc.enable()


def test_room_is_made_on_a_gpu_only_where_it_is_short(
    small_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(small_policy, EngineConfig())
    engine.generate(requests(), Sampling(max_tokens=3))
    engine.make_room(1 << 60)
    assert engine.runner is not None, "on a CPU nothing is taken that an update could miss"
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    monkeypatch.setattr("groupwise.engine.engine.free_memory", lambda device: 1000)
    engine.make_room(1000)
    assert engine.runner is not None
    engine.make_room(1001)
    assert engine.runner is None


def test_memory_that_runs_out_while_generating_is_a_sentence(small_policy, monkeypatch) -> None:
    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(small_policy, "logits", fail)
    with pytest.raises(ConfigError, match=r"out of memory while generating; lower engine.max_sequences"):
        generate(small_policy, requests((5,), (1,)), Sampling(max_tokens=2))
