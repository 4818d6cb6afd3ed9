"""Speculative decoding on the device: kernels against a plain memory, and the answers of plain steps."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine.cuda import graph_runner
from groupwise.engine.cuda.decode_attention import StepState
from groupwise.engine.cuda.graph_runner import GraphRunner
from groupwise.engine.cuda.speculation import Pace, Speculation, group_of
from groupwise.engine.engine import Engine
from groupwise.model.device import deterministic_kernels
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling, derive_seed
from tests.support.cuda_checks import DEVICE
from tests.support.small_models import policy_of, small_model
from tests.support.tiny_families import tiny_model


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class PlainMemory:
    """What followed each context, in Python: of several tokens the latest, then the largest."""

    def __init__(self) -> None:
        self.followed: dict[tuple[int, ...], tuple[int, int]] = {}

    def remember(self, position: int, group: int, context: list[int], token: int) -> None:
        for key in ((group, *context), (group, *context[1:]), (0, *context)):
            self.followed[key] = max(self.followed.get(key, (-1, -1)), (position, token))

    def recall(self, group: int, context: list[int]) -> int:
        keys = ((group, *context), (group, *context[1:]), (0, *context))
        return next((self.followed[key][1] for key in keys if key in self.followed), -1)


def test_lanes_are_drafted_and_counted_as_by_a_plain_memory():
    """Sequences of few different tokens, so that most contexts occur again, in several groups."""
    slots, width, page, limit = 12, 4, 4, 40
    random = np.random.default_rng(0)
    state = StepState(
        slots=slots,
        members=2,
        prompt_blocks=2,
        own_blocks=limit // page,
        idle_block=999,
        device=DEVICE,
        rows=64,
    )
    drafts, plain = Speculation(slots=slots, device=DEVICE), PlainMemory()
    prompts = [tuple(random.integers(0, 3, 6).tolist()) for _ in range(4) for _ in range(3)]
    for prompt in dict.fromkeys(prompts):
        drafts.read_prompt(prompt)
        for at in range(len(prompt) - 3):
            plain.remember(1, group_of(prompt), list(prompt[at : at + 3]), prompt[at + 3])
    drafts.begin(np.arange(slots), prompts)
    texts = [list(prompt) for prompt in prompts]
    room = random.integers(20, limit, slots)
    state.host_room[:slots], state.host_prompt_length[:slots] = room, 6
    state.host_table[:slots] = np.arange(slots * limit // page).reshape(slots, -1)
    state.set_rows(np.repeat(np.arange(slots), width), np.repeat(np.arange(slots) // 3, width))
    state.push()
    state.length[:slots], state.done[:slots] = 0, 0
    accepted = 0
    for step in range(12):
        drawn = random.integers(0, 3, (slots, width))
        ended = random.random((slots, width)) < 0.02
        if step == 0:  # the first token comes from the prompt's logits, in a plain step
            state.token[:slots], state.length[:slots] = ints(*drawn[:, 0]), 1
            drafts.remember(state, ints(*range(slots)), slots)
            for text, (token, *_), prompt in zip(texts, drawn, prompts, strict=True):
                plain.remember(1, group_of(prompt), text[-3:], int(token))
                text.append(int(token))
            continue
        done = state.done[:slots].tolist()
        drafts.open(state, slots, width=width, page=page)
        expected = []
        for slot, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            lanes, context = [text[-1]], text[-3:]
            for lane in range(1, width):
                token = plain.recall(group_of(prompt), context)
                if done[slot] or token < 0 or len(text) - 7 + lane >= room[slot]:
                    break
                lanes.append(token)
                context = [*context[1:], token]
            expected.append(lanes)
        lanes_SW = drafts.draft[: slots * width].view(slots, width).tolist()
        for slot, lanes in enumerate(expected):
            live = [] if done[slot] else lanes
            assert lanes_SW[slot] == [*live, *[-1] * (width - len(live))]
            rows = slice(slot * width, slot * width + len(lanes))
            last = len(texts[slot]) - 7
            assert state.tokens[rows].tolist() == lanes
            assert state.positions[rows].tolist() == [6 + last + lane for lane in range(len(lanes))]
            assert state.row_length[rows].tolist() == [last + lane + 1 for lane in range(len(lanes))]
            assert state.slot_mapping[rows].tolist() == [
                slot * limit + last + lane for lane in range(len(lanes))
            ]
            idle = state.slot_mapping[slot * width + len(lanes) : (slot + 1) * width]
            assert set((idle // page).tolist()) <= {999}
        drafts.token[: slots * width] = ints(*drawn.ravel())
        drafts.done[: slots * width] = ints(*ended.ravel().tolist())
        drafts.close(state, slots, width=width)
        new: list[Any] = []
        for slot, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            gained = 0
            while not done[slot]:
                token = int(drawn[slot, gained])
                new.append((len(text) - 6 + 1, group_of(prompt), text[-3:], token))
                text.append(token)
                gained += 1
                if (
                    ended[slot, gained - 1]
                    or gained == len(expected[slot])
                    or expected[slot][gained] != token
                ):
                    break
            assert int(drafts.results[1, slot]) == gained
            assert int(state.length[slot]) == len(text) - 6
            accepted += max(0, gained - 1)
        for one in new:
            plain.remember(*one)
    assert accepted > 20


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many steps had each number of lanes; speculation is never given up."""
    counts: Counter[int] = Counter()
    step = GraphRunner.step

    def counted(self: GraphRunner, *args: Any, width: int = 1, **options: Any) -> None:
        counts[width] += 1
        step(self, *args, width=width, **options)

    monkeypatch.setattr(GraphRunner, "step", counted)
    monkeypatch.setattr(Pace, "ROWS_TO_DOUBLE", 1e9)  # any right draft pays
    return counts


def asked(count: int) -> list[Request]:
    return [
        Request(
            prompt=tuple((7 * n + 13 * t * t) % 256 for t in range(length)),
            seeds=tuple(derive_seed(0, 0, n, member) for member in range(4)),
        )
        for n, length in enumerate((1, 16, 32, 37, 5)[:count])
    ]


def on_device(model: Any, dtype: torch.dtype = torch.float32) -> Policy:
    return policy_of(copy.deepcopy(model).to(DEVICE, dtype))


def tokens(groups: list[list[Completion]]) -> list[tuple[int, ...]]:
    return [one.tokens for group in groups for one in group]


LONG = 200 if DEVICE.type == "cuda" else 6


@pytest.mark.parametrize("temperature", [0.0, 0.2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_answers_are_those_of_plain_steps(
    family: str, temperature: float, widths: Counter[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(graph_runner, "drafts_may_pay", lambda policy: True)  # gpt_oss has sinks, and experts
    policy = on_device(tiny_model(family))
    sampling = Sampling(temperature=temperature, max_tokens=LONG)
    plain = Engine(policy, EngineConfig(speculative=False)).generate(asked(5), sampling)
    assert set(widths) == {1}
    drafted = Engine(policy, EngineConfig()).generate(asked(5), sampling)
    assert max(widths) > 2
    # Noise at the border between two tokens may fall on either side, by rounding; what follows then differs.
    differing = sum(one != other for one, other in zip(tokens(plain), tokens(drafted), strict=True))
    assert differing <= 2
    pairs = zip([c for g in plain for c in g], [c for g in drafted for c in g], strict=True)
    for one, other in pairs:
        if one.tokens == other.tokens:
            assert np.allclose(one.logprobs, other.logprobs, atol=5e-3)
            assert one.finish == other.finish


def test_log_probabilities_in_bfloat16_are_those_of_the_training_pass(widths: Counter[int]):
    from groupwise.model.attention.packed import PackedLayout

    policy = on_device(small_model("qwen2"), torch.bfloat16)
    groups = Engine(policy, EngineConfig()).generate(asked(5), Sampling(temperature=0.5, max_tokens=LONG))
    assert max(widths) > 2
    gaps = []
    for request, group in zip(asked(5), groups, strict=True):
        for completion in group:
            text = torch.tensor(request.prompt + completion.tokens, device=DEVICE)
            layout = PackedLayout.build([(len(text), [])], device=DEVICE)
            with torch.no_grad():
                hidden = policy.hidden(text, torch.arange(len(text), device=DEVICE), layout)
                logits = policy.logits(hidden[len(request.prompt) - 1 : -1]).float() / 0.5
            own_T = logits.log_softmax(-1).gather(1, text[len(request.prompt) :, None]).squeeze(1).cpu()
            gaps.append((torch.tensor(completion.logprobs) - own_T).abs())
    assert float(torch.cat(gaps).mean()) < 0.03


@pytest.mark.parametrize("deterministic", [True, False])
def test_calls_with_drafts_repeat(deterministic: bool, widths: Counter[int]):
    policy = on_device(small_model("qwen2"), torch.bfloat16)
    sampling = Sampling(temperature=0.5, max_tokens=LONG)
    with deterministic_kernels(DEVICE, on=deterministic):
        first = Engine(policy, EngineConfig()).generate(asked(5), sampling)
        engine = Engine(policy, EngineConfig())
        # With deterministic kernels not even a runner for more sequences may change the order of sums.
        before = [replace(one, seeds=one.seeds * 3) for one in asked(5)] if deterministic else asked(2)
        engine.generate(before, sampling)
        for _ in range(3):
            again = engine.generate(asked(5), sampling)
            assert tokens(again) == tokens(first)
            assert [c.logprobs for g in again for c in g] == [c.logprobs for g in first for c in g]
    assert max(widths) > 2


def test_drafts_are_dropped_where_they_are_wrong(monkeypatch: pytest.MonkeyPatch):
    """A random policy at a high temperature repeats nothing: nearly every step is a plain one."""
    lanes: Counter[int] = Counter()
    width = Pace.width

    def noted(self: Pace, sequences: int) -> int:
        chosen = width(self, sequences)
        lanes[chosen] += 1
        return chosen

    monkeypatch.setattr(Pace, "width", noted)
    policy = on_device(small_model("qwen2"))
    Engine(policy, EngineConfig()).generate(asked(2), Sampling(temperature=3.0, max_tokens=LONG))
    if DEVICE.type == "cuda":
        assert lanes[1] > 0.7 * lanes.total()
