"""Prompts computed bit by bit, and turns that go on from the cache, write what whole prompts write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from groupwise.config.schema import EngineConfig
from groupwise.engine import prefill
from groupwise.engine.engine import Engine
from groupwise.engine.prefill import Segment, next_pass
from groupwise.engine.scheduler import Prefix
from groupwise.model.policy import Policy
from tests.support.generation import SAMPLING, TOOL, assert_same, converse, requests, same_answers


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the segments of every pass."""
    lengths: list[list[int]] = []

    def noted(prefixes: Sequence[Prefix]) -> list[Segment]:
        segments = next_pass(prefixes)
        if segments:
            lengths.append([segment.length for segment in segments])
        return segments

    monkeypatch.setattr(prefill, "next_pass", noted)
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


@pytest.mark.parametrize("settings", [{}, {"max_sequences": 3}, {"kv_tokens": 96}, {"block_size": 4}])
def test_a_turn_goes_on_from_what_the_cache_has_and_writes_the_same(
    small_policy: Policy, settings: dict[str, Any], computed: list[list[int]]
) -> None:
    asked = requests((5, 16, 37), (2, 1, 3))
    fresh = converse(Engine(small_policy, EngineConfig(**settings)), asked, turns=3, reuse_cache=False)
    in_full = sum(map(sum, computed))
    computed.clear()
    reused = converse(Engine(small_policy, EngineConfig(**settings)), asked, turns=3, reuse_cache=True)
    assert len(reused.answers) == 6 * 3
    same_answers(reused, fresh)
    assert sum(map(sum, computed)) <= in_full  # with little room, some is computed again
    if settings in ({}, {"block_size": 4}):
        # Three prompts whole; then each turn computes what was read, and the last token that was written.
        assert sum(map(sum, computed)) == 5 + 16 + 37 + 6 * 2 * (len(TOOL) + 1)
