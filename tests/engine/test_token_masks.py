"""Answers constrained by a grammar: valid on every runner, the same on CPU and GPU, beside free answers."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.engine.sampler import TokenMasks
from groupwise.engine.scheduler import BlockPool
from groupwise.engine.serving.serving_scheduler import CPUSteps, Job, ServingScheduler
from groupwise.errors import InvariantError
from groupwise.model import grammar, token_grammar
from groupwise.model.grammar import GrammarCompiler, json_grammar
from groupwise.model.ops.logits import masked_logits
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling
from tests.support.generation import EmulatedGPUEngine, assert_same, requests
from tests.support.small_models import policy_of
from tests.support.tiny_families import tiny_model

pytest.importorskip("llguidance")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = json_grammar(SCHEMA)
SHORT = 'start: "a" ("b" | "cc")*'


def compiler(policy: Policy) -> GrammarCompiler:
    return GrammarCompiler(policy, policy.end_tokens)


def constrained(policy: Policy, text: str = GRAMMAR) -> Policy:
    policy.grammar = compiler(policy).compile(text)
    return policy


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["a", "b"] and 0 <= value["a"] <= 99 and value["b"] in ("x", "yy")


def test_a_mask_excludes_tokens_by_their_bits():
    masks_NW = torch.tensor([[0b101, 0], [-1, 1], [-(2**31), 0]], dtype=torch.int32)
    allowed = [row.isfinite().nonzero()[:, 0].tolist() for row in masked_logits(torch.zeros(3, 40), masks_NW)]
    assert allowed == [[0, 2], list(range(33)), [31]]


def test_every_answer_of_a_random_model_is_valid_or_cut_off(small_policy):
    policy = constrained(small_policy)
    answers = Engine(policy, EngineConfig()).generate(requests(), Sampling(max_tokens=40))
    texts = [policy.decode(one.tokens) for group in answers for one in group]
    assert all(is_valid(text) for text in texts)
    assert len(set(texts)) > 5
    assert all(one.finish == "end" for group in answers for one in group)
    (short,) = Engine(policy, EngineConfig()).generate(requests((3,), (2,)), Sampling(max_tokens=9))
    assert {one.finish for one in short} == {"length"}
    assert all(policy.decode(one.tokens).startswith('{"a": ') for one in short)


def test_the_end_token_is_allowed_only_where_the_grammar_accepts(small_policy):
    policy = constrained(small_policy, SHORT)
    (end,) = policy.end_tokens
    grammar = policy.grammar
    assert grammar is not None
    answer = [*policy.encode_text("abcc"), end]
    masks_NW = grammar.masks([answer])
    allowed = [
        {policy.tokenizer.convert_ids_to_tokens(int(token)) for token in np.flatnonzero(row)}
        for row in np.unpackbits(masks_NW.view(np.uint8), axis=1, bitorder="little")
    ]
    name = policy.tokenizer.eos_token
    assert allowed == [{"a"}, {"b", "c", name}, {"b", "c", name}, {"c"}, {"b", "c", name}]


def test_the_gpu_writes_what_the_cpu_writes(small_policy):
    import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)

    policy = constrained(small_policy)
    for sampling in (Sampling(max_tokens=24), Sampling(max_tokens=6, temperature=0.7, top_k=3)):
        asked = requests((5, 9), (2, 1))
        answers = EmulatedGPUEngine(policy, EngineConfig()).generate(asked, sampling)
        assert_same(answers, Engine(policy, EngineConfig()).generate(asked, sampling))


def test_sequences_that_take_turns_or_start_again_are_valid(small_policy):
    import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)

    policy, asked = constrained(small_policy, SHORT), requests((5, 6), (3, 2))
    settings = EngineConfig(block_size=4, max_sequences=3, kv_tokens=28)
    gpu, cpu = EmulatedGPUEngine(policy, settings), Engine(policy, settings)
    answers = gpu.generate(asked, Sampling(max_tokens=14))
    assert gpu.preempted
    assert_same(answers, cpu.generate(asked, Sampling(max_tokens=14)))


def test_a_model_on_the_general_path_writes_valid_answers():
    policy = constrained(policy_of(tiny_model("mamba")))
    assert policy.general is not None
    (group,) = Engine(policy, EngineConfig()).generate(requests((3,), (3,)), Sampling(max_tokens=40))
    assert all(is_valid(policy.decode(one.tokens)) for one in group)


def served(make: Any, policy: Policy, jobs: list[Job]) -> dict[Job, Completion]:
    scheduler = ServingScheduler(
        slots=4, pool=BlockPool(48, block_size=4), context=48, compiler=compiler(policy)
    )
    found: dict[Job, Completion] = {}
    with torch.no_grad():
        steps = make(policy, scheduler, policy.end_tokens)
        coming = list(jobs)
        while coming or scheduler.busy:
            if coming:
                job = coming.pop(0)
                scheduler.enter(job, scheduler.check(job))
            for sequence, completion in steps.advance():
                found[scheduler.forget(sequence)] = completion
    return found


def test_the_grammars_of_ended_and_cancelled_jobs_are_released(small_policy, monkeypatch):
    monkeypatch.setattr(grammar, "MOST_GRAMMARS", 0)  # the compiler keeps none
    scheduler = ServingScheduler(
        slots=1, pool=BlockPool(12, block_size=4), context=24, compiler=compiler(small_policy)
    )
    ended = Job(prompt=(40, 41), seeds=(1,), sampling=Sampling(max_tokens=2), grammar=SHORT)
    waiting, running = replace(ended, seeds=(2,)), replace(ended, seeds=(3,))
    compiled: list[weakref.ref[Any]] = []

    def enter(job: Job) -> None:
        own = scheduler.check(job)
        compiled.append(weakref.ref(own))
        scheduler.enter(job, own)

    with torch.no_grad():
        steps = CPUSteps(small_policy, scheduler, small_policy.end_tokens)
        enter(ended)
        enter(waiting)
        scheduler.drop(waiting)
        while scheduler.busy:
            steps.advance()
        enter(running)
        steps.advance()
        scheduler.drop(running)
        scheduler.enter(replace(ended, grammar=None))  # takes the slot, which remembers the last grammar
        while scheduler.busy:
            steps.advance()
    gc.collect()
    assert [own() for own in compiled] == [None] * 3


def graph_steps(*args: Any) -> Any:
    import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)
    from groupwise.engine.serving.cuda_serving import CUDASteps

    steps = CUDASteps(*args)
    steps.runner.refresh()
    return steps


@pytest.mark.parametrize("make", [CPUSteps, graph_steps])
def test_free_and_constrained_answers_share_steps(small_policy, make: Any):
    free = Job(prompt=(40, 41, 42), seeds=(1,), sampling=Sampling(max_tokens=12))
    jobs = [
        free,
        replace(free, grammar=GRAMMAR, sampling=Sampling(max_tokens=24)),
        replace(free, grammar=SHORT, seeds=(2,), alternatives=2),
        replace(free, grammar=SHORT, sampling=Sampling(max_tokens=12, temperature=0.0)),
        replace(free, seeds=(3,), sampling=Sampling(max_tokens=5, stop=("!",))),
        replace(free, grammar=SHORT, seeds=(4,), sampling=Sampling(max_tokens=9, stop=("cc",))),
    ]
    found = served(make, small_policy, jobs)
    for job in jobs:
        small_policy.grammar = job.grammar and compiler(small_policy).compile(job.grammar)
        request = Request(prompt=job.prompt, seeds=job.seeds)
        ((alone,),) = Engine(small_policy, EngineConfig(block_size=4)).generate([request], job.sampling)
        assert (found[job].tokens, found[job].finish) == (alone.tokens, alone.finish)
        assert found[job].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert is_valid(small_policy.decode(found[jobs[1]].tokens))


def test_a_grammar_that_becomes_too_complex_ends_the_answer_as_cut_off(small_policy):
    # Each further letter needs more states than the limit on the work for one mask allows.
    policy = constrained(small_policy, "start: /(a?){300}a{300}(.*a.{12})?/")
    (group,) = Engine(policy, EngineConfig()).generate(requests((3,), (2,)), Sampling(max_tokens=60))
    for one in group:
        assert one.finish == "length"
        assert len(one.tokens) < 60


def test_many_sequences_use_several_copies_of_a_grammar(small_policy, monkeypatch):
    monkeypatch.setattr(token_grammar, "SECONDS_FOR_COPIES", 60.0)
    monkeypatch.setattr(token_grammar, "COPIES_PER_THREAD", 3)
    monkeypatch.setattr(token_grammar, "MOST_THREADS", 1)
    policy = constrained(small_policy, SHORT)
    assert policy.grammar is not None
    masks = TokenMasks(8)
    states = [policy.grammar.start() for _ in range(8)]
    assert Counter(state.copy_index for state in states) == {0: 3, 1: 3, 2: 2}
    for state in states:
        policy.grammar.leave(state)
    for slot in range(8):
        masks.start(slot, policy.grammar)
    slots = np.arange(8)
    for token in policy.encode_text("abccb"):
        masks.update(slots, np.full(8, token))
    one = TokenMasks(1)
    one.start(0, policy.grammar)
    for token in policy.encode_text("abccb"):
        one.update(slots[:1], np.array([token]))
    assert (masks.words_SW == one.words_SW).all()
    masks.start(3, None)
    assert (masks.words_SW[3] == -1).all()
    assert not masks.constrained[3]


def test_a_token_that_the_grammar_excludes_stops_generation(small_policy):
    masks = TokenMasks(1)
    masks.start(0, constrained(small_policy).grammar)
    (brace, *_, seven) = small_policy.encode_text('{"a": 7')
    masks.update(np.array([0]), np.array([brace]))
    with pytest.raises(InvariantError, match=f"token {seven} was sampled, which the grammar"):
        masks.update(np.array([0]), np.array([seven]))
