"""Tasksets of verifiers (its v1 API) as tasks: single-turn, with tools, or with an `Env` that plays the user.

    task = gw.verifiers_task(MyTaskset(MyConfig()))             # one turn, or the tools of its toolsets
    task = gw.verifiers_task(MyTaskset(MyConfig()), env=MyEnv)  # MyEnv.run talks to the policy

The reward is the sum of what the taskset records. Toolsets run in this process, with their rollout's state.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any

from groupwise.errors import ConfigError
from groupwise.isolation.worker import in_process
from groupwise.records import Example, Message, Rollout, Turn
from groupwise.rewards.runner import completed
from groupwise.rollout.environment import Reply, event_loop_here
from groupwise.rollout.tools import Tool
from groupwise.tasks.task import Task


def verifiers_task(taskset: Any, *, env: Any = None, limit: int = 1000) -> Task:
    """Return a taskset as a task.

    env: an `Env` class or object whose `run(task, agents)` talks to an agent as its user
    limit: number of tasks to read from an endless taskset
    """
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        raise ConfigError("verifiers tasksets require: pip install 'groupwise[verifiers]'") from None
    tasks = list(islice(taskset, None if taskset.bounded else limit))
    rows = [{"task": number, "prompt": messages_of(task)} for number, task in enumerate(tasks)]
    about: dict[str, Any] = {"name": type(taskset).__name__, "examples": rows}
    if env is not None:
        player: Any = object.__new__(env) if isinstance(env, type) else env
        return Task(**about, environment=partial(VerifiersEpisode, player, tasks))
    toolsets = type(tasks[0]).toolsets(tasks[0].config)
    return Task(
        **about,
        prompt=lambda example: example["prompt"],
        rewards={"score": in_process(partial(score_conversation, tasks))},
        tools=[tool for toolset in toolsets for tool in tools_of(toolset)],
        state=lambda example: new_trace(tasks[example["task"]]),
    )


def messages_of(task: Any, opening: str | None = None) -> list[Message]:
    """Return the prompt of a task as chat messages."""
    system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
    prompt = task.data.prompt if opening is None else opening
    if prompt is None or isinstance(prompt, str):
        return [*system, {"role": "user", "content": prompt or ""}]
    return [*system, *(message.model_dump(exclude_none=True) for message in prompt)]


def new_trace(task: Any) -> Any:
    """Return the trace of a task before the first turn, with its kind of state."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, TraceTask

    about = TraceTask(type=type(task).__name__, data=task.data)
    trace = vf.Trace(task=about, agent=AgentInfo(config=vf.AgentConfig()), state=state_cls(type(task))())
    prompt = task.data.prompt
    for message in [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or ():
        record(trace, message)
    return trace


def record(trace: Any, message: Any, *, sampled: bool = False) -> None:
    """Append a message to a trace."""
    from verifiers.v1.graph import MessageNode

    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))


async def score_conversation(tasks: Sequence[Any], rollout: Rollout, example: Example) -> float:
    """Return the sum of the taskset's rewards for a rollout."""
    import verifiers.v1 as vf

    task = tasks[example["task"]]
    trace = rollout.state or new_trace(task)  # a task without tools has no state
    for number, turn in enumerate(rollout.turns or [Turn(text=rollout.text)]):
        calls = {f"{number}-{n}": call for n, call in enumerate(turn.calls)}
        made = [
            vf.ToolCall(id=key, name=call.name, arguments=json.dumps(dict(call.arguments)))
            for key, call in calls.items()
        ]
        record(trace, vf.AssistantMessage(content=turn.text, tool_calls=made or None), sampled=True)
        for key, call in calls.items():
            record(trace, vf.ToolMessage(tool_call_id=key, content=call.result, name=call.name))
    await task.score(trace)
    return float(trace.reward)


def tools_of(toolset: Any) -> list[Callable[..., Any]]:
    """Return the tools of a toolset, with the schemas that its MCP server would advertise."""
    from mcp.server.mcpserver import MCPServer
    from verifiers.v1.mcp.server import _call_state
    from verifiers.v1.utils.decorators import discover_decorated

    server = MCPServer(type(toolset).__name__)
    toolset.register(server)
    functions = {getattr(f, "tool_name", None) or f.__name__: f for f in discover_decorated(toolset, "tool")}

    def as_tool(listed: Any) -> Callable[..., Any]:
        def call(state: Any, **arguments: Any) -> Any:
            token = _call_state.set(state.state)  # what `self.state` of the toolset returns
            try:
                return completed(functions[listed.name](**arguments))
            finally:
                _call_state.reset(token)

        call.__name__ = listed.name
        call.tool = Tool.of_schema(  # type: ignore[attr-defined]
            call, listed.name, listed.description, listed.input_schema, takes_state=True
        )
        return call

    return [as_tool(listed) for listed in completed(server.list_tools())]


class VerifiersEpisode:
    """An `Env.run` in which the policy plays every agent: it runs until it waits for an agent's turn."""

    def __init__(self, env: Any, tasks: Sequence[Any]) -> None:
        self.env, self.tasks = env, tasks

    def reset(self, example: Example) -> list[Message]:
        self.task, self.loop = self.tasks[example["task"]], event_loop_here()
        self.trace = new_trace(self.task)
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.running = asyncio.run_coroutine_threadsafe(self.play(), self.loop)
        return messages_of(self.task, self.next_said().text or None)

    def reply(self, text: str) -> Reply:
        self.loop.call_soon_threadsafe(self.heard.put_nowait, text)
        return self.next_said()

    def close(self) -> None:
        self.running.cancel()

    def next_said(self) -> Reply:
        said = asyncio.run_coroutine_threadsafe(self.said.get(), self.loop).result()
        if isinstance(said, Exception):
            raise said
        return Reply(said) if isinstance(said, str) else Reply(reward=float(self.trace.reward), done=True)

    async def play(self) -> None:
        """Run the episode; its end (None) or its failure is the last thing said."""
        try:
            self.said.put_nowait(await self.env.run(self.task, AnyAgent(self)))
        except Exception as error:
            self.said.put_nowait(error)

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[VerifiersEpisode]:
        yield self
        await task.score(self.trace)

    async def turn(self, message: str | None = None) -> Any:
        """Say a message to the policy and return its turn, as verifiers' `Interaction.turn` does."""
        import verifiers.v1 as vf
        from verifiers.v1.agent import Segment

        if message is not None:
            record(self.trace, vf.UserMessage(content=message))
        self.said.put_nowait(message or "")
        answer = vf.AssistantMessage(content=await self.heard.get())
        record(self.trace, answer, sampled=True)
        return Segment(messages=[answer])


class AnyAgent:
    def __init__(self, episode: VerifiersEpisode) -> None:
        self.episode = episode

    def __getattr__(self, role: str) -> VerifiersEpisode:
        return self.episode
