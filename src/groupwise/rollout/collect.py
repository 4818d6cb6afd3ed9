"""From examples to groups of rollouts, through anything that can generate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from groupwise.engine.sampler import derive_seed
from groupwise.invariants import check_token_exact
from groupwise.records import Completion, Example, Group, Message, Request, Rollout, Sampling


class Generate(Protocol):
    """Anything that continues prompts: our engine, a remote server, a test double."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]: ...


class Codec(Protocol):
    """Between prompts and tokens."""

    end_tokens: frozenset[int]

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


def collect(
    examples: Sequence[Example],
    *,
    ask: Callable[[Example], str | Sequence[Message]],
    codec: Codec,
    engine: Generate,
    sampling: Sampling,
    group_size: int,
    seed_parts: tuple[int | str, ...],
) -> list[Group]:
    """Return one group for each example.

    A member's noise derives from `seed_parts` (run seed, step, …), the example and the member, so it
    does not depend on what else is generated beside it.
    """
    prompts = [ask(example) for example in examples]
    requests = [
        Request(
            prompt=codec.encode(prompt),
            seeds=tuple(derive_seed(*seed_parts, *which, member) for member in range(group_size)),
        )
        for prompt, which in zip(prompts, _numbered(examples), strict=True)
    ]
    completions = engine.generate(requests, sampling)
    return [
        Group(
            example=example,
            rollouts=tuple(
                as_rollout(request, completion, prompt=prompt, member=member, codec=codec)
                for member, completion in enumerate(members)
            ),
        )
        for example, prompt, request, members in zip(examples, prompts, requests, completions, strict=True)
    ]


def _numbered(examples: Sequence[Example]) -> Iterator[tuple[str, int]]:
    """Each example's fingerprint, and how many equal ones came before: a repeat gets noise of its own."""
    seen: Counter[str] = Counter()
    for example in examples:
        fingerprint = example.fingerprint
        yield fingerprint, seen[fingerprint]
        seen[fingerprint] += 1


def as_rollout(
    request: Request, completion: Completion, *, prompt: str | Sequence[Message], member: int, codec: Codec
) -> Rollout:
    """Join prompt and completion into one stream: only what was sampled is trained, all of it."""
    before = len(request.prompt)
    rollout = Rollout(
        prompt=prompt,
        text=codec.decode(completion.tokens),
        tokens=(*request.prompt, *completion.tokens),
        trained=(False,) * before + (True,) * len(completion.tokens),
        logprobs=(0.0,) * before + completion.logprobs,
        entropies=(0.0,) * before + completion.entropies,
        prompt_length=before,
        finish=completion.finish,
        member=member,
    )
    check_token_exact(rollout, completion, end_tokens=codec.end_tokens)
    return rollout
