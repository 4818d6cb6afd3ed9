"""Turn examples into groups of rollouts: build requests, generate, and join prompts with completions.

Works with anything that implements `Generate`. Rollouts with tools or an environment are multi-turn;
`agent_rollouts` has those of an agent.
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
from groupwise.rewards.runner import as_rollout_error
from groupwise.rollout.agent_rollouts import AgentRollouts
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
    def needs_example(self) -> bool:
        """Whether rollouts depend on the example itself, not only on its prompt."""
        return self.state is not None or self.environments is not None

    def pop_seconds(self) -> float:
        """Return the seconds that tools took since the last call."""
        return self.toolbox.pop_seconds()

    @property
    def asynchronous(self) -> bool:
        return self.toolbox.asynchronous or (self.environments is not None and self.environments.asynchronous)

    def trajectories(
        self, example: Example, *, prompt: Prompt, tokens: tuple[int, ...], members: int
    ) -> list[Trajectory]:
        """Start the rollouts of one example, each with its own state and environment.

        The first turn of a rollout that fails here is generated with its group, and ends it.
        """
        about = example if self.original is None else self.original(example)
        streams = []
        for member in range(members):
            state, failure = self._new_state(about)
            stream = Trajectory(tokens, prompt, member, state)
            stream.error = failure
            if self.environments is not None:
                try:
                    stream.episode = self.environments.start(about)
                except RolloutError as error:
                    stream.error = str(error)
            streams.append(stream)
        return streams

    def _new_state(self, example: Example) -> tuple[Any, str | None]:
        """Return the state of a rollout, or why it could not be made, which fails the rollout."""
        if self.state is None:
            return None, None
        try:
            return self.state(example), None
        except Exception as error:
            return None, f"state: {as_rollout_error(error)}"

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
    if isinstance(tools, AgentRollouts):
        return tools.generate_groups(wanted, codec=codec, engine=engine, sampling=sampling)
    if tools is not None:
        return _generate_turns(wanted, codec=codec, engine=engine, sampling=sampling, tools=tools)
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


def _generate_turns(
    wanted: Sequence[GroupRequest], *, codec: Any, engine: Generate, sampling: Sampling, tools: Tools
) -> list[Group]:
    """Generate groups of multi-turn rollouts, which may call tools or talk to an environment."""
    encoded = [codec.encode(one.prompt, tools=tools.toolbox.schemas) for one in wanted]
    streams = [
        tools.trajectories(one.example, prompt=one.prompt, tokens=tokens, members=one.size)
        for one, tokens in zip(wanted, encoded, strict=True)
    ]
    for members in streams:
        tools.check_openings(members)
    requests = [one.request(tokens) for one, tokens in zip(wanted, encoded, strict=True)]
    overlap = tools.overlap
    if overlap is None:
        overlap = tools.asynchronous or bool(getattr(engine, "unrepeatable", False))
    conversations = Conversations(
        streams,
        requests,
        lambda request, member, turn: wanted[request].seed(member, turn),
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
    for one, members in zip(wanted, streams, strict=True):
        rollouts = tuple(stream.rollout() for stream in members)
        for stream, rollout in zip(members, rollouts, strict=True):
            check_stream_exact(rollout, stream.completions, end_tokens=codec.end_tokens)
        groups.append(Group(example=one.example, rollouts=rollouts))
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
