"""Rollouts of several turns that call tools or talk to an environment.

`Tools` holds what a task's conversations need, and generates groups of them. `multi_turn` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupwise.config.schema import ToolsConfig
from groupwise.errors import RolloutError, as_rollout_error
from groupwise.invariants import check_stream_exact
from groupwise.records import Example, Group, Request, Sampling
from groupwise.rollout.environment import EnvironmentExecutor, EnvironmentFactory
from groupwise.rollout.multi_turn import ConversationLimits, Conversations, Trajectory
from groupwise.rollout.tool_executor import ToolExecutor

if TYPE_CHECKING:
    from groupwise.rollout.collect import Generate, GroupRequest, Prompt


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

    def generate_groups(
        self, wanted: Sequence[GroupRequest], *, codec: Any, engine: Generate, sampling: Sampling
    ) -> list[Group]:
        """Generate groups of multi-turn rollouts, which may call tools or talk to an environment."""
        encoded = [codec.encode(one.prompt, tools=self.toolbox.schemas) for one in wanted]
        streams = [
            self.trajectories(one.example, prompt=one.prompt, tokens=tokens, members=one.size)
            for one, tokens in zip(wanted, encoded, strict=True)
        ]
        for members in streams:
            self.check_openings(members)
        requests = [one.request(tokens) for one, tokens in zip(wanted, encoded, strict=True)]
        overlap = self.overlap
        if overlap is None:
            overlap = self.asynchronous or bool(getattr(engine, "unrepeatable", False))
        conversations = Conversations(
            streams,
            requests,
            lambda request, member, turn: wanted[request].seed(member, turn),
            self.toolbox,
            codec,
            self.limits,
            sampling,
            overlap=overlap,
            environments=self.environments,
        )
        converse = getattr(engine, "converse", None)
        try:
            if converse is None:
                in_rounds(engine, requests, sampling, conversations)
            else:
                converse(
                    requests, sampling, conversations, tokens=self.limits.tokens, turns=self.limits.turns
                )
        finally:
            conversations.close()
        groups = []
        for one, members in zip(wanted, streams, strict=True):
            rollouts = tuple(stream.rollout() for stream in members)
            for stream, rollout in zip(members, rollouts, strict=True):
                check_stream_exact(rollout, stream.completions, end_tokens=codec.end_tokens)
            groups.append(Group(example=one.example, rollouts=rollouts))
        return groups

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
