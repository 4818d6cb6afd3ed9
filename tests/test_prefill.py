"""Prompts computed bit by bit, and turns that go on from the cache, write what whole prompts write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from groupwise.config.schema import EngineConfig
from groupwise.engine import prefill
from groupwise.engine.engine import Engine
from groupwise.engine.kv_cache import Prefix
from groupwise.engine.prefill import Forward, Prefill, Segment, next_pass
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling
from groupwise.seeds import derive_seed
from test_engine import assert_same, requests

SAMPLING = Sampling(max_tokens=6)
TOOL = (9, 8, 7, 6, 5)
"""What is read between two turns."""


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the segments of every pass."""
    lengths: list[list[int]] = []
    original = Prefill._pass

    def noted(self: Prefill, segments: Sequence[Segment], forward: Forward) -> None:
        lengths.append([segment.length for segment in segments])
        original(self, segments, forward)

    monkeypatch.setattr(Prefill, "_pass", noted)
    return lengths


def prompt(tokens: int, *, done: int = 0) -> Prefix:
    return Prefix(tokens=tuple(range(tokens)), blocks=[0], done=done)


def segments(prefixes: Sequence[Prefix]) -> list[tuple[int, int, int]]:
    return [(prefixes.index(s.prefix), s.start, s.end) for s in next_pass(prefixes)]


def test_a_pass_takes_whole_prompts_while_they_fit_and_long_ones_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 10)
    assert segments([prompt(4), prompt(5), prompt(3)]) == [(0, 0, 4), (1, 0, 5)]
    assert segments([prompt(25), prompt(3)]) == [(0, 0, 10)]
    assert segments([prompt(25, done=20), prompt(3)]) == [(0, 20, 25), (1, 0, 3)]
    without_blocks = Prefix(tokens=(1, 2))
    assert segments([without_blocks, prompt(3)]) == [(1, 0, 3)]


@pytest.mark.parametrize("size", [1, 7, 16, 33])
def test_passes_of_any_size_write_the_same(
    small_policy: Policy, size: int, computed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Engine(small_policy, EngineConfig()).generate(requests(), SAMPLING)
    computed.clear()
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", size)
    assert_same(Engine(small_policy, EngineConfig()).generate(requests(), SAMPLING), whole)
    assert max(map(sum, computed)) <= size
    assert sum(map(sum, computed)) == sum(len(request.prompt) for request in requests())


@dataclass
class Continuing:
    """Reads `TOOL` after each turn but the last, and asks for one more."""

    asked: list[Request]
    turns: int
    told: bool
    """Whether it says what its prompts continue."""
    answers: dict[tuple[int, int, int], Completion] = field(default_factory=dict)
    """By first request, member and turn."""
    later: list[tuple[tuple[int, int, int], tuple[int, ...]]] = field(default_factory=list)
    """Whose turn each later request is, and its prompt."""
    waiting: list[Request] = field(default_factory=list)

    def finished(self, request: int, member: int, completion: Completion) -> None:
        whose: tuple[int, int, int] = (request, member, 0)
        if request < len(self.asked):
            prompt = self.asked[request].prompt
        else:
            whose, prompt = self.later[request - len(self.asked)]
        self.answers[whose] = completion
        first, which, turn = whose
        if turn + 1 < self.turns:
            following = (*prompt, *completion.tokens, *TOOL)
            self.later.append(((first, which, turn + 1), following))
            seed, continues = derive_seed(1, first, which, turn), (request, member) if self.told else None
            self.waiting.append(Request(prompt=following, seeds=(seed,), continues=continues))

    def ready(self, *, wait: bool) -> list[Request]:
        ready, self.waiting = self.waiting, []
        return ready


def converse(engine: Engine, asked: list[Request], *, turns: int, told: bool) -> Continuing:
    sink = Continuing(asked=asked, turns=turns, told=told)
    engine.converse(asked, SAMPLING, sink, tokens=turns * (6 + len(TOOL)), turns=turns)
    return sink


def same_answers(one: Continuing, other: Continuing) -> None:
    assert one.answers.keys() == other.answers.keys()
    assert_same([list(one.answers.values())], [[other.answers[whose] for whose in one.answers]])


@pytest.mark.parametrize("settings", [{}, {"max_sequences": 3}, {"kv_tokens": 96}, {"block_size": 4}])
def test_a_turn_goes_on_from_what_the_cache_has_and_writes_the_same(
    small_policy: Policy, settings: dict[str, Any], computed: list[list[int]]
) -> None:
    asked = requests((5, 16, 37), (2, 1, 3))
    fresh = converse(Engine(small_policy, EngineConfig(**settings)), asked, turns=3, told=False)
    in_full = sum(map(sum, computed))
    computed.clear()
    reused = converse(Engine(small_policy, EngineConfig(**settings)), asked, turns=3, told=True)
    assert len(reused.answers) == 6 * 3
    same_answers(reused, fresh)
    assert sum(map(sum, computed)) <= in_full  # with little room, some is computed again
    if settings in ({}, {"block_size": 4}):
        # Three prompts whole; then each turn computes what was read, and the last token that was written.
        assert sum(map(sum, computed)) == 5 + 16 + 37 + 6 * 2 * (len(TOOL) + 1)
