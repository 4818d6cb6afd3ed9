"""Speculative decoding: the same tokens in fewer steps. Kernels are interpreted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)
from groupwise.config.schema import EngineConfig
from groupwise.engine.cuda import graph_runner, speculation
from groupwise.engine.cuda.attention_kernels import launch
from groupwise.engine.cuda.graph_runner import GraphRunner
from groupwise.engine.cuda.speculation import Pace, Speculation, group_of, sequences_of_a_step
from groupwise.engine.engine import Engine
from groupwise.model.policy import Policy
from groupwise.records import Request, Sampling
from tests.support.generation import EmulatedGPUEngine, assert_same, converse, requests, same_answers
from tests.support.small_models import policy_of, small_model
from tests.support.tiny_families import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
CPU = torch.device("cpu")


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many steps had each number of lanes."""
    counts: Counter[int] = Counter()
    step = GraphRunner.step

    def counted(self: GraphRunner, *args: Any, width: int = 1, **options: Any) -> None:
        counts[width] += 1
        step(self, *args, width=width, **options)

    monkeypatch.setattr(GraphRunner, "step", counted)
    return counts


@pytest.fixture
def four_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few lanes, and speculation that is never given up."""
    monkeypatch.setattr(Pace, "width", lambda self, sequences: 4)


def predictable(cycle: int = 3) -> Policy:
    """Return a policy that writes token t + 1 (in a cycle) after token t, whatever is before it."""
    model = small_model("llama", tie_word_embeddings=False)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding.copy_(torch.nn.functional.normalize(embedding, dim=-1))
        head.zero_()
        for token in range(cycle):
            head[(token + 1) % cycle] = 30 * embedding[token]
    return policy_of(model)


def test_a_predictable_text_takes_fewer_steps(widths):
    policy = predictable()
    asked = [Request(prompt=(0, 1, 2), seeds=(1, 2))]
    sampling = Sampling(max_tokens=40)
    answers = EmulatedGPUEngine(policy, EngineConfig()).generate(asked, sampling)
    assert answers[0][0].tokens == tuple(t % 3 for t in range(40))
    # The prompt has every pair of tokens but the last. Without drafts 39 steps follow the first token.
    assert sum(widths.values()) <= 12
    widths.clear()
    plain = EmulatedGPUEngine(policy, EngineConfig(speculative=False)).generate(asked, sampling)
    assert widths == {1: 39}
    assert_same(answers, plain)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12, temperature=0.0),
        Sampling(max_tokens=12, temperature=0.2),
        Sampling(max_tokens=8, temperature=0.5, top_k=5, top_p=0.9),
        Sampling(max_tokens=12, temperature=0.1, stop=("a", "\n")),
    ],
    ids=str,
)
def test_any_sampling_gives_the_tokens_of_the_cpu(small_policy, four_lanes, widths, sampling):
    asked = requests((5, 9), (2, 3))
    answers = EmulatedGPUEngine(small_policy, EngineConfig()).generate(asked, sampling)
    assert_same(answers, Engine(small_policy, EngineConfig()).generate(asked, sampling), within=1e-4)
    assert widths[4]


def test_end_tokens_end_answers_inside_of_the_lanes(four_lanes, widths):
    policy = predictable(cycle=7)
    policy.end_tokens = frozenset({5})
    answers = EmulatedGPUEngine(policy, EngineConfig()).generate(
        [Request(prompt=(0, 1, 2, 3, 4, 5, 6, 0), seeds=(1, 2)), Request(prompt=(3, 4), seeds=(3,))],
        Sampling(max_tokens=30),
    )
    assert [one.tokens for group in answers for one in group] == [(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (5,)]
    assert {one.finish for group in answers for one in group} == {"end"}
    assert set(widths) == {4}


@pytest.mark.parametrize("longest", [1, 2, 3, 17])
def test_an_answer_has_at_most_max_tokens(four_lanes, longest):
    policy = predictable()
    answers = EmulatedGPUEngine(policy, EngineConfig(block_size=2)).generate(
        [Request(prompt=(0, 1, 2, 0), seeds=(1,))], Sampling(max_tokens=longest)
    )
    assert len(answers[0][0].tokens) == longest
    assert answers[0][0].finish == "length"


def test_sequences_join_and_are_preempted_as_without_drafts(small_policy, four_lanes):
    sampling = Sampling(max_tokens=9, temperature=0.1)
    asked = requests((5, 9, 3), (2, 3, 2))
    for sizes in ({"max_sequences": 2}, {"kv_tokens": 36, "block_size": 4, "max_sequences": 4}):
        answers = EmulatedGPUEngine(small_policy, EngineConfig(**sizes)).generate(asked, sampling)
        assert_same(answers, Engine(small_policy, EngineConfig()).generate(asked, sampling), within=1e-4)


def test_turns_continue_from_the_cache(small_policy, four_lanes):
    asked = requests((3, 17), (2, 1))
    emulated = converse(EmulatedGPUEngine(small_policy, EngineConfig()), asked, turns=2, reuse_cache=True)
    same_answers(emulated, converse(Engine(small_policy, EngineConfig()), asked, turns=2, reuse_cache=True))


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_windows_and_sinks_hold_for_every_lane(family, four_lanes, widths, monkeypatch):
    monkeypatch.setattr(graph_runner, "drafts_may_pay", lambda policy: True)  # gpt_oss has sinks, and experts
    policy = policy_of(tiny_model(family))
    asked, sampling = requests((14, 5), (2, 1)), Sampling(max_tokens=8, temperature=0.1)
    answers = EmulatedGPUEngine(policy, EngineConfig(block_size=4)).generate(asked, sampling)
    assert_same(answers, Engine(policy, EngineConfig()).generate(asked, sampling), within=1e-4)
    assert widths[4] > 0


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_nothing_is_drafted_with_experts_of_which_more_rows_read_more(family, widths):
    policy = policy_of(tiny_model(family))
    EmulatedGPUEngine(policy, EngineConfig()).generate(requests((5,), (2,)), Sampling(max_tokens=6))
    assert set(widths) == {1}


def test_nothing_is_drafted_where_a_rule_of_the_user_needs_every_token(small_policy, widths):
    sampling = Sampling(max_tokens=6)
    small_policy.use_logits_processor("rule", lambda tokens, logits: logits)
    EmulatedGPUEngine(small_policy, EngineConfig()).generate(requests((5,), (2,)), sampling)
    assert set(widths) == {1}


def remembered(memory: Speculation, group: int, *context: int) -> int:
    """Return the draft after a context."""
    token = torch.zeros(1, dtype=torch.int32)
    where = torch.tensor([group, *context])
    launch(_recall_into, (1,), where, memory.memory, token)
    return int(token)


@speculation.triton.jit
def _recall_into(WHERE, MEMORY, TOKEN):
    tl = speculation.tl
    a, b, c = (
        tl.load(WHERE + 1).to(tl.int32),
        tl.load(WHERE + 2).to(tl.int32),
        tl.load(WHERE + 3).to(tl.int32),
    )
    tl.store(TOKEN, speculation.recall(MEMORY, tl.load(WHERE), a, b, c))


def test_a_prompt_is_remembered_for_its_group_and_for_all():
    memory = Speculation(slots=2, device=CPU)
    prompt = (5, 6, 7, 8, 9, 6, 7, 3)
    memory.read_prompt(prompt)
    group = group_of(prompt)
    assert remembered(memory, group, 5, 6, 7) == 8
    assert remembered(memory, group, 9, 6, 7) == 3
    assert remembered(memory, group, 4, 8, 9) == 6  # two tokens are enough within the group
    assert remembered(memory, group + 1, 5, 6, 7) == 8  # elsewhere, three
    assert remembered(memory, group + 1, 4, 8, 9) == -1
    assert remembered(memory, group, 1, 2, 3) == -1
    memory.forget()
    assert remembered(memory, group, 5, 6, 7) == -1


def test_the_larger_token_is_kept_in_whatever_order_two_follow_a_context():
    for tokens in ((8, 9), (9, 8)):
        memory = Speculation(slots=2, device=CPU)
        for token in tokens:
            memory.read_prompt((5, 6, 7, token))
        assert remembered(memory, 1, 5, 6, 7) == 9


def test_tokens_of_plain_steps_are_remembered_once():
    memory = Speculation(slots=3, device=CPU)
    memory.begin(np.array([2]), [(3, 4, 5)])
    assert memory.recent[:, 2].tolist() == [3, 4, 5]
    rows, length = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([1, 1, 1, 1], dtype=torch.int32)
    token = torch.tensor([0, 0, 7, 0], dtype=torch.int32)
    for _ in range(2):  # a sequence that has ended has the same length in the next step
        launch(
            speculation.remember_last,
            (2,),
            *(rows, length, token, memory.recent, memory.group, memory.known, memory.memory, 4),
        )
    assert memory.recent[:, 2].tolist() == [4, 5, 7]
    assert remembered(memory, group_of((3, 4, 5)), 0, 4, 5) == 7
    assert int((memory.memory > 0).sum()) == 3  # the idle slot, 3, is not remembered


@pytest.mark.parametrize(
    ("drafts", "drawn", "ended", "gained"),
    [
        ([-1, 11, 12], [11, 12, 13], [0, 0, 0], 3),
        ([-1, 11, 12], [11, 99, 13], [0, 0, 0], 2),
        ([-1, 99, 12], [11, 12, 13], [0, 0, 0], 1),
        ([-1, 11, -1], [11, 12, 13], [0, 0, 1], 2),
        ([-1, 11, 12], [11, 12, 13], [0, 1, 0], 2),
        ([-1, 11, 12], [11, 12, 13], [1, 0, 0], 1),
    ],
)
def test_lanes_count_up_to_the_first_wrong_draft_or_the_end(drafts, drawn, ended, gained):
    memory = Speculation(slots=2, device=CPU)
    memory.begin(np.array([1]), [(8, 9, 10)])

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows, length, token, done = ints(1, 1, 1), ints(0, 5, 0), ints(0, 10, 0), ints(1, 0, 1)
    memory.draft[:3], memory.token[:3], memory.done[:3] = ints(*drafts), ints(*drawn), ints(*ended)
    memory.logprob[:3] = torch.tensor([-0.1, -0.2, -0.3])
    launch(
        speculation.close_lanes,
        (1,),
        *(rows, length, token, done, memory.recent, memory.group, memory.known, memory.memory),
        *(memory.draft, memory.token, memory.done, memory.logprob, memory.entropy),
        *(*memory.parts, 3, memory.results.shape[1]),
        WIDTH=3,
    )
    assert length.tolist() == [0, 5 + gained, 0]
    assert int(token[1]) == drawn[gained - 1]
    assert int(done[1]) == max(ended[:gained])
    assert memory.recent[:, 1].tolist() == [8, 9, 10, *drawn[:gained]][-3:]
    ends, counts, tokens, logprobs, _ = memory.unpack(memory.results, 1)
    assert (ends[0], counts[0]) == (max(ended[:gained]), gained)
    assert tokens[:gained, 0].tolist() == drawn[:gained]
    assert logprobs[:gained, 0] == pytest.approx([-0.1, -0.2, -0.3][:gained])


def test_few_sequences_get_many_lanes_and_many_get_one():
    assert [Pace().width(n) for n in (1, 4, 8, 16, 32, 33, 64, 96)] == [8, 8, 8, 4, 4, 2, 2, 2]
    assert [Pace().width(n) for n in (97, 128, 512)] == [1, 1, 1]
    assert all(n <= sequences_of_a_step(n) < n + 32 for n in range(1, 200))


def test_the_width_is_that_of_most_tokens_in_the_time():
    """With a share p of right drafts, a width W gains 1 + p + … + p^(W-1); 220 rows double a step's time."""
    pace = Pace()
    assert pace.tokens(4) == pytest.approx(1 + 0.6 + 0.36 + 0.216)  # expected before anything is known
    pace.gained(np.array([1]), 8)  # right 1.2 → 0.96, wrong 0.8 → 0.64 + 1
    assert pace.tokens(2) == pytest.approx(1 + 0.96 / 2.6)
    pace.gained(np.array([2]), 8)  # right 0.768 + 1, wrong 1.312 + 1
    assert pace.tokens(2) == pytest.approx(1 + 1.768 / 4.08)
    # 16 sequences: 1.43 / (1 + 32/220) = 1.25, 1.70 / (1 + 64/220) = 1.32, 1.76 / (1 + 128/220) = 1.12
    assert pace.width(16) == 4


def test_speculation_rests_when_drafts_are_wrong_and_is_tried_again():
    pace, steps = Pace(), 0
    while (width := pace.width(8)) > 1:
        pace.gained(np.array([1, 1, 1]), width)
        steps += 1
    # The share of right drafts is now 0.161 / 4.597 = 0.035: 1.035 / (1 + 16/220) < 1 / (1 + 8/220).
    assert steps == 9
    pace.gained(np.array([1, 1, 1]), 2)  # a step that was still in flight
    assert [pace.width(8) for _ in range(Pace.REST - 1)] == [1] * (Pace.REST - 1)
    assert pace.width(8) == 8


def test_speculation_goes_on_while_most_drafts_are_right():
    pace = Pace()
    for _ in range(50):
        assert pace.width(8) == 8
        pace.gained(np.array([8, 8, 1, 5]), 8)


def test_with_deterministic_kernels_the_rows_of_a_step_do_not_depend_on_the_calls_before(
    small_policy, four_lanes, monkeypatch
):
    """A runner of a larger call has more slots; the order of sums depends on the rows of a product."""
    rows: list[tuple[int, int]] = []
    graph = GraphRunner._graph

    def recorded(self: GraphRunner, count: int, width: int, *rest: Any) -> Any:
        rows.append((count, width))
        return graph(self, count, width, *rest)

    monkeypatch.setattr(GraphRunner, "_graph", recorded)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    sampling = Sampling(max_tokens=8)
    EmulatedGPUEngine(small_policy, EngineConfig()).generate(requests((5,), (5,)), sampling)
    fresh = rows.copy()
    engine = EmulatedGPUEngine(small_policy, EngineConfig())
    engine.generate(requests((5, 9), (9, 9)), Sampling(max_tokens=2))
    rows.clear()
    engine.generate(requests((5,), (5,)), sampling)
    assert rows == fresh
    assert (32, 4) in rows  # four lanes of eight sequences, though the first runner has eight slots only


def test_a_call_does_not_depend_on_the_calls_before_it(small_policy, four_lanes, widths):
    engine, sampling = EmulatedGPUEngine(small_policy, EngineConfig()), Sampling(max_tokens=12)
    asked = requests((5, 9), (2, 1))
    first = engine.generate(asked, sampling)
    counts = dict(widths)
    widths.clear()
    again = engine.generate(asked, sampling)
    assert widths == counts
    assert [one.logprobs for group in again for one in group] == [
        one.logprobs for group in first for one in group
    ]
