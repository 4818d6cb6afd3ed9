"""Requests for an engine, an engine that takes the CPU for a GPU, and what must be equal between engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sample, Sampling, derive_seed

PROMPTS = (1, 16, 32, 37, 5)
"""Lengths: one token, one block, exact blocks, more, less."""


GROUPS = (3, 1, 4, 2, 5)


def requests(
    prompts: Sequence[int] = PROMPTS, groups: Sequence[int] = GROUPS, *, step: int = 0
) -> list[Request]:
    return [
        Request(
            prompt=tuple((7 * n + 13 * t * t) % 256 for t in range(length)),
            seeds=tuple(derive_seed(0, step, n, member) for member in range(members)),
        )
        for n, (length, members) in enumerate(zip(prompts, groups, strict=True))
    ]


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in group] for group in groups]


def assert_same(
    groups: list[list[Completion]], others: list[list[Completion]], *, within: float = 1e-5
) -> None:
    """The same tokens, and log-probabilities equal but for rounding."""
    assert tokens(groups) == tokens(others)
    for group, other in zip(groups, others, strict=True):
        for one, two in zip(group, other, strict=True):
            assert one.finish == two.finish
            assert one.logprobs == pytest.approx(two.logprobs, abs=within)
            assert one.entropies == pytest.approx(two.entropies, abs=within)


def drawn_samples(policy: Policy, sampling: Sampling) -> list[Sample]:
    """Return what a policy samples for two prompts, as the learner gets it, with advantages of 1."""
    asked = [Request(prompt=(5, 9, 14), seeds=(1, 2, 3)), Request(prompt=(7,), seeds=(4, 5))]
    answers = Engine(policy, EngineConfig()).generate(asked, sampling)
    return [
        Sample(
            tokens=request.prompt + one.tokens,
            trained=(False,) * len(request.prompt) + (True,) * len(one.tokens),
            logprobs=(0.0,) * len(request.prompt) + one.logprobs,
            entropies=(0.0,) * len(request.prompt) + one.entropies,
            advantages=(0.0,) * len(request.prompt) + (1.0,) * len(one.tokens),
            prefix=len(request.prompt),
            group=number,
        )
        for number, (request, group) in enumerate(zip(asked, answers, strict=True))
        for one in group
    ]


class EmulatedGPUEngine(Engine):
    """An engine that takes the CPU for a GPU."""

    accelerated = True

    def affordable_blocks(self, held: int = 0) -> int:
        return 1 << 20


SAMPLING = Sampling(max_tokens=6)


TOOL = (9, 8, 7, 6, 5)
"""What is read between two turns."""


@dataclass
class MultiTurnSink:
    """Reads `TOOL` after each turn but the last, and asks for one more."""

    asked: list[Request]
    turns: int
    reuse_cache: bool
    """Whether each later request names the completion that it continues."""
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
            seed, continues = (
                derive_seed(1, first, which, turn),
                (request, member) if self.reuse_cache else None,
            )
            self.waiting.append(Request(prompt=following, seeds=(seed,), continues=continues))

    def ready(self, *, wait: bool) -> list[Request]:
        ready, self.waiting = self.waiting, []
        return ready


def converse(engine: Engine, asked: list[Request], *, turns: int, reuse_cache: bool) -> MultiTurnSink:
    sink = MultiTurnSink(asked=asked, turns=turns, reuse_cache=reuse_cache)
    engine.converse(asked, SAMPLING, sink, tokens=turns * (6 + len(TOOL)), turns=turns)
    return sink


def same_answers(one: MultiTurnSink, other: MultiTurnSink) -> None:
    assert one.answers.keys() == other.answers.keys()
    assert_same([list(one.answers.values())], [[other.answers[whose] for whose in one.answers]])
