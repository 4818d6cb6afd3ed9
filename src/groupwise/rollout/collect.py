"""Turn examples into groups of rollouts: build requests, generate, and join prompts with completions.

Works with anything that implements `Generate`. Rollouts with tools or an environment are multi-turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from groupwise.config.schema import ToolsConfig
from groupwise.errors import RolloutError
from groupwise.invariants import check_stream_exact, check_token_exact
from groupwise.records import Completion, Example, Group, Message, Request, Rollout, Sampling
from groupwise.rollout.environment import EnvironmentExecutor, EnvironmentFactory
from groupwise.rollout.multi_turn import ConversationLimits, Conversations, Trajectory
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.seeds import derive_seed

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
class Tools:
    """The tools and the environment of a task, with the limits and state of its conversations."""

    toolbox: ToolExecutor
    limits: ConversationLimits
    overlap: bool | None
    """Whether tools run in threads while the engine generates. None: only if the tools are asynchronous or
    the engine is not bit-reproducible anyway."""
    state: Callable[[Example], Any] | None = None
    """Creates the state that the tools of one rollout operate on."""
    environments: EnvironmentExecutor | None = None
    original: Callable[[Example], Example] | None = None
    """Returns the example of the task, where `collect` is given others with prompts of their own."""

    @classmethod
    def of(
        cls,
        functions: Sequence[Callable[..., Any]],
        config: ToolsConfig,
        *,
        state: Callable[[Example], Any] | None = None,
        environment: EnvironmentFactory | None = None,
    ) -> Tools | None:
        """Prepare a task's tools and environment; return None for a task without either."""
        if not functions and environment is None:
            return None
        environments = None
        if environment is not None:
            environments = EnvironmentExecutor(
                environment, seconds=config.seconds, characters=config.result_characters
            )
        return cls(
            environments=environments,
            toolbox=ToolExecutor.of(functions, seconds=config.seconds, characters=config.result_characters),
            limits=ConversationLimits(
                turns=config.max_turns, calls=config.max_calls, tokens=config.max_tokens
            ),
            overlap=config.overlap,
            state=state,
        )

    @property
    def asynchronous(self) -> bool:
        return self.toolbox.asynchronous or (self.environments is not None and self.environments.asynchronous)

    def trajectories(
        self, example: Example, *, prompt: Prompt, tokens: tuple[int, ...], members: int
    ) -> list[Trajectory]:
        """Start the rollouts of one example, each with its own state and environment."""
        about = example if self.original is None else self.original(example)
        streams = []
        for member in range(members):
            stream = Trajectory(tokens, prompt, member, None if self.state is None else self.state(about))
            if self.environments is not None:
                try:
                    stream.episode = self.environments.start(about)
                except RolloutError as error:
                    stream.error = str(error)  # its first turn is generated with its group, and ends it
            streams.append(stream)
        return streams

    def check_openings(self, streams: Sequence[Trajectory]) -> None:
        """Fail rollouts whose environment began with another text than the prompt of their group."""
        episodes = [stream.episode for stream in streams if stream.episode is not None]
        if not episodes or self.environments is None:
            return
        expected = streams[0].prompt_messages if self.original is None else episodes[0].opening
        for stream in streams:
            if stream.episode is not None and stream.episode.opening != expected:
                stream.error = (
                    "environment: reset returned different texts for one example; derive all randomness from "
                    "the example"
                )
                self.environments.close(stream.episode)
                stream.episode = None


def collect(
    examples: Sequence[Example],
    *,
    ask: Callable[[Example], str | Sequence[Message]],
    codec: PromptCodec,
    engine: Generate,
    sampling: Sampling,
    group_size: int,
    seed_parts: tuple[int | str, ...],
    tools: Tools | None = None,
    share: slice = slice(None),
) -> list[Group]:
    """Generate one group for each example in `share`; other processes generate the rest.

    A member's seed derives from `seed_parts` (run seed, step, …), the example, the member and the turn, so it
    does not depend on the rest of the batch.
    """
    example_ids = list(_numbered(examples))[share]
    examples = examples[share]
    if tools is not None:
        return collect_turns(
            examples,
            example_ids=example_ids,
            ask=ask,
            codec=codec,
            engine=engine,
            sampling=sampling,
            group_size=group_size,
            seed_parts=seed_parts,
            tools=tools,
        )
    prompts, requests = prompts_and_requests(
        examples, ask=ask, codec=codec, group_size=group_size, seed_parts=seed_parts, example_ids=example_ids
    )
    return groups_from_completions(
        examples, prompts, requests, engine.generate(requests, sampling), codec=codec
    )


def prompts_and_requests(
    examples: Sequence[Example],
    *,
    ask: Callable[[Example], Prompt],
    codec: PromptCodec,
    group_size: int,
    seed_parts: tuple[int | str, ...],
    example_ids: Sequence[tuple[str, int]] | None = None,
) -> tuple[list[Prompt], list[Request]]:
    """Return the prompt and the request of each example: the part of `collect` before generation.

    `example_ids` identify the examples within the whole batch; by default, `examples` are the whole batch.
    """
    example_ids = list(_numbered(examples)) if example_ids is None else example_ids
    prompts = [ask(example) for example in examples]
    requests = [
        Request(
            prompt=codec.encode(prompt),
            seeds=tuple(derive_seed(*seed_parts, *example_id, member) for member in range(group_size)),
        )
        for prompt, example_id in zip(prompts, example_ids, strict=True)
    ]
    return prompts, requests


def groups_from_completions(
    examples: Sequence[Example],
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    completions: Sequence[Sequence[Completion]],
    *,
    codec: PromptCodec,
) -> list[Group]:
    """Build the groups from the engine's completions: the part of `collect` after generation."""
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


def collect_turns(
    examples: Sequence[Example],
    *,
    example_ids: Sequence[tuple[str, int]],
    ask: Callable[[Example], str | Sequence[Message]],
    codec: Any,
    engine: Generate,
    sampling: Sampling,
    group_size: int,
    seed_parts: tuple[int | str, ...],
    tools: Tools,
) -> list[Group]:
    """Generate groups of multi-turn rollouts, which may call tools or talk to an environment."""
    prompts = [ask(example) for example in examples]
    encoded = [codec.encode(prompt, tools=tools.toolbox.schemas) for prompt in prompts]
    streams = [
        tools.trajectories(example, prompt=prompt, tokens=tokens, members=group_size)
        for example, prompt, tokens in zip(examples, prompts, encoded, strict=True)
    ]
    for members in streams:
        tools.check_openings(members)

    def seed(request: int, member: int, turn: int) -> int:
        later = (turn,) if turn else ()
        return derive_seed(*seed_parts, *example_ids[request], member, *later)

    requests = [
        Request(prompt=members[0].prompt, seeds=tuple(seed(r, m, 0) for m in range(group_size)))
        for r, members in enumerate(streams)
    ]
    overlap = tools.overlap
    if overlap is None:
        overlap = tools.asynchronous or bool(getattr(engine, "unrepeatable", False))
    conversations = Conversations(
        streams,
        seed,
        tools.toolbox,
        codec,
        tools.limits,
        sampling,
        overlap=overlap,
        environments=tools.environments,
    )
    converse = getattr(engine, "converse", None)
    try:
        if converse is None:
            in_rounds(engine, requests, sampling, conversations)
        else:
            converse(requests, sampling, conversations, tokens=tools.limits.tokens, turns=tools.limits.turns)
    finally:
        conversations.close()
    groups = []
    for example, members in zip(examples, streams, strict=True):
        rollouts = tuple(stream.rollout() for stream in members)
        for stream, rollout in zip(members, rollouts, strict=True):
            check_stream_exact(rollout, stream.completions, end_tokens=codec.end_tokens)
        groups.append(Group(example=example, rollouts=rollouts))
    return groups


def in_rounds(
    engine: Generate, requests: Sequence[Request], sampling: Sampling, conversations: Conversations
) -> None:
    """Run conversations on an engine without `converse`: generate all next turns, then run all tools."""
    submitted = 0
    while requests:
        for number, members in enumerate(engine.generate(requests, sampling), start=submitted):
            for member, completion in enumerate(members):
                conversations.finished(number, member, completion)
        submitted += len(requests)
        requests = conversations.ready(wait=True)
        while conversations.waiting:
            requests += conversations.ready(wait=True)


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
