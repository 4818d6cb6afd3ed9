"""Turn examples into groups of rollouts: build requests, generate, and join prompts with completions.

Works with anything that implements `Generate`. Rollouts of several turns are generated in `tool_rollouts`
(with tools or an environment) and in `agent_rollouts` (by a program of the user).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from groupwise.invariants import check_token_exact
from groupwise.records import Completion, Example, Group, Message, Request, Rollout, Sampling, derive_seed
from groupwise.rollout.agent_rollouts import AgentRollouts
from groupwise.rollout.tool_rollouts import Tools

Prompt = str | Sequence[Message]


class Generate(Protocol):
    """Generates completions for prompts: the engine, a remote server, or a test double."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]: ...


class PromptCodec(Protocol):
    """Converts prompts to tokens and tokens to text."""

    end_tokens: frozenset[int]

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A group of rollouts to generate: the prompt, how many, and how they are sampled."""

    example: Example
    prompt: Prompt
    seed_parts: tuple[int | str, ...]
    """Seeds derive from these, the member and the turn."""
    size: int
    adapter: int = 0
    """Index of the adapter to generate with, if the engine has several."""
    temperature: float | None = None
    """Overrides the temperature of the call, unless that is greedy."""

    def seed(self, member: int, turn: int = 0) -> int:
        later = (turn,) if turn else ()
        return derive_seed(*self.seed_parts, member, *later)

    def request(self, tokens: tuple[int, ...]) -> Request:
        """Return the engine's request for the first turn of the group."""
        return Request(
            prompt=tokens,
            seeds=tuple(self.seed(member) for member in range(self.size)),
            adapter=self.adapter,
            temperature=self.temperature,
        )


def collect(
    examples: Sequence[Example],
    *,
    ask: Callable[[Example], Prompt],
    codec: PromptCodec,
    engine: Generate,
    sampling: Sampling,
    group_size: int,
    seed_parts: tuple[int | str, ...],
    tools: Tools | AgentRollouts | None = None,
    share: slice = slice(None),
) -> list[Group]:
    """Generate one group for each example in `share`; other processes generate the rest."""
    wanted = group_requests(examples, ask=ask, size=group_size, seed_parts=seed_parts, share=share)
    return generate_groups(wanted, codec=codec, engine=engine, sampling=sampling, tools=tools)


def group_requests(
    examples: Sequence[Example],
    *,
    ask: Callable[[Example], Prompt],
    size: int,
    seed_parts: tuple[int | str, ...],
    share: slice = slice(None),
    adapter: int = 0,
    temperature: float | None = None,
) -> list[GroupRequest]:
    """Return the groups to generate for the examples in `share`.

    A member's seed derives from `seed_parts` (run seed, step, …), the example, the member and the turn, so it
    does not depend on the rest of the batch.
    """
    example_ids = list(_numbered(examples))
    return [
        GroupRequest(
            example=example,
            prompt=ask(example),
            seed_parts=(*seed_parts, *example_id),
            size=size,
            adapter=adapter,
            temperature=temperature,
        )
        for example, example_id in zip(examples[share], example_ids[share], strict=True)
    ]


def generate_groups(
    wanted: Sequence[GroupRequest],
    *,
    codec: PromptCodec,
    engine: Generate,
    sampling: Sampling,
    tools: Tools | AgentRollouts | None = None,
) -> list[Group]:
    """Generate groups in one call of the engine. Its requests may use several adapters."""
    if tools is not None:
        return tools.generate_groups(wanted, codec=codec, engine=engine, sampling=sampling)
    requests = [one.request(codec.encode(one.prompt)) for one in wanted]
    completions = engine.generate(requests, sampling)
    return [
        Group(
            example=one.example,
            rollouts=tuple(
                as_rollout(request, completion, prompt=one.prompt, member=member, codec=codec)
                for member, completion in enumerate(members)
            ),
        )
        for one, request, members in zip(wanted, requests, completions, strict=True)
    ]


def _numbered(examples: Sequence[Example]) -> Iterator[tuple[str, int]]:
    """Yield each example's fingerprint and its number of earlier duplicates, which get other seeds."""
    seen: Counter[str] = Counter()
    for example in examples:
        fingerprint = example.fingerprint
        yield fingerprint, seen[fingerprint]
        seen[fingerprint] += 1


def as_rollout(
    request: Request,
    completion: Completion,
    *,
    prompt: str | Sequence[Message],
    member: int,
    codec: PromptCodec,
) -> Rollout:
    """Join prompt and completion into one rollout; all sampled tokens are trained, and no others."""
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
