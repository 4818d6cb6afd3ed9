"""Tasksets of verifiers (its v1 API) as tasks: single-turn, with tools, or with an `Env` that plays the user.

    task = gw.verifiers_task(MyTaskset(MyConfig()))                 # one turn, or the tools of its toolsets
    task = gw.verifiers_task(MyTaskset(MyConfig()), env=MyUser())   # MyUser.run talks to the policy

The reward is the sum of what the taskset records. Toolsets run in this process, with their rollout's state.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any

from groupwise.errors import ConfigError, requires
from groupwise.isolation.worker import in_process
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.trl_style import as_openai
from groupwise.rollout.environment import CoroutineEnvironment, Reply
from groupwise.tasks.external.mcp_tools import tools_here
from groupwise.tasks.task import Task


def verifiers_task(taskset: Any, *, env: Any = None, limit: int = 1000) -> Task:
    """Return a taskset as a task.

    env: an `Env`, or any object whose coroutine `run(task, agents)` talks to one agent as its user
    limit: number of tasks to read from an endless taskset
    """
    with requires("verifiers", "verifiers tasksets"):
        import verifiers.v1  # noqa: F401
    name = type(taskset).__name__
    tasks = list(islice(taskset, None if taskset.bounded else limit))
    if not tasks:
        raise ConfigError(f"{name}.load() returned no tasks; return some")
    if isinstance(env, type):
        raise ConfigError(f"env must be an object; pass {env.__name__}(…) instead of the class")
    toolsets = [*taskset.toolsets(taskset.config), *tasks[0].toolsets(tasks[0].config)]
    if ignored := list(hooks_ignored(tasks[0], toolsets, env)):
        raise ConfigError(
            f"{name} cannot be trained here: only verifiers itself runs {', '.join(ignored)}; remove that"
        )
    rows = [{"task": number, "prompt": messages_of(task)} for number, task in enumerate(tasks)]
    if env is not None:
        return Task(name=name, examples=rows, environment=partial(VerifiersEpisode, env, tasks))
    return Task(
        name=name,
        examples=rows,
        prompt=lambda example: example["prompt"],
        rewards={"score": in_process(partial(score_conversation, tasks))},
        tools=tools_of(toolsets) if toolsets else (),
        state=lambda example: new_trace(tasks[example["task"]]).state,
    )


def hooks_ignored(task: Any, toolsets: Sequence[Any], env: Any) -> Iterator[str]:
    """Yield what a rollout of verifiers would run and one of this package would not."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.decorators import discover_decorated

    if task.NEEDS_CONTAINER:
        yield "tasks with NEEDS_CONTAINER"
    if toolsets and env is not None:
        yield "toolsets beside an env"
    hooks = {vf.Task: "setup finalize runtime_env", vf.Toolset: "setup setup_task register"}
    for one in (task, env, *toolsets):
        for base, names in (hooks | {vf.Env: "setup finalize start stop"}).items():
            for name in names.split() if isinstance(one, base) else ():
                if getattr(type(one), name) is not getattr(base, name):
                    yield f"{type(one).__name__}.{name}"
    for hook in (*task.hooks("stop"), *discover_decorated(task, "intercept")):
        yield f"the hook {hook.__name__}"
    for reward in (*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())):
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            yield f"rewards that need a runtime ({reward.__name__})"


def messages_of(task: Any) -> list[Message]:
    """Return the prompt of a task as chat messages."""
    system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
    prompt = task.data.prompt or ()
    if isinstance(prompt, str):
        return [*system, {"role": "user", "content": prompt}]
    return [*system, *(message.model_dump(exclude_none=True) for message in prompt)]


def new_trace(task: Any, state: Any = None) -> Any:
    """Return an empty trace of a task, with its kind of state."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, TraceTask

    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    state = state_cls(type(task))() if state is None else state
    return vf.Trace(task=about, agent=AgentInfo(config=vf.AgentConfig()), state=state)


def record(trace: Any, *messages: Message, prompt: bool = False) -> None:
    """Append messages to a trace. The policy has sampled those of the assistant, except in a prompt."""
    from verifiers.v1.graph import MessageNode

    for message in messages:
        calls = [{**call, **call.get("function", {})} for call in message.get("tool_calls", ())]
        parent = len(trace.nodes) - 1 if trace.nodes else None
        sampled = message["role"] == "assistant" and not prompt
        message = {**message, "tool_calls": calls or None}
        trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))


async def score_conversation(tasks: Sequence[Any], rollout: Rollout, example: Example) -> float:
    """Return the sum of the taskset's rewards for a rollout."""
    task = tasks[example["task"]]
    trace = new_trace(task, rollout.state)
    prompt, completion = as_openai(rollout)
    record(trace, *prompt, prompt=True)
    record(trace, *completion)
    await task.score(trace)
    return float(trace.reward)


def tools_of(toolsets: Sequence[Any]) -> list[Callable[..., Any]]:
    """Return the tools of toolsets, as their MCP servers would advertise and call them."""
    from mcp.server.mcpserver import MCPServer
    from verifiers.v1.mcp.server import _call_state
    from verifiers.v1.utils.decorators import discover_decorated

    server = MCPServer("toolsets")
    for toolset in toolsets:
        prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        for function in discover_decorated(toolset, "tool"):
            name = prefix + (getattr(function, "tool_name", None) or function.__name__)
            server.add_tool(function, name=name, description=inspect.getdoc(function))
    return tools_here(server, _call_state.set)  # what `self.state` of a toolset returns


class VerifiersEpisode(CoroutineEnvironment):
    """An `Env.run` in which the policy plays the agent, whatever its name, of one interaction."""

    trace: Any = None

    def __init__(self, env: Any, tasks: Sequence[Any]) -> None:
        self.env, self.tasks = env, tasks

    async def play(self, example: Example) -> Reply:
        returned = await self.env.run(self.tasks[example["task"]], AnyAgent(self))
        if returned is not None:
            raise TypeError(f"run must return None; got {returned!r:.80}; use trace.record_reward")
        return Reply(reward=float(self.trace.reward) if self.trace else 0.0, done=True)

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[VerifiersEpisode]:
        if self.trace is not None:
            raise RuntimeError("run may open one interaction: the policy plays one agent")
        self.task, self.trace = task, new_trace(task)
        yield self
        await task.score(self.trace)

    async def turn(self, message: str | None = None) -> Any:
        """Say a message to the policy and return its turn, as verifiers' `Interaction.turn` does."""
        from verifiers.v1.agent import Segment

        new = [] if self.trace.nodes else messages_of(self.task)
        new += [] if message is None else [{"role": "user", "content": message}]
        record(self.trace, *new, prompt=True)
        text = await self.ask(message if self.trace.num_turns else new)
        record(self.trace, {"role": "assistant", "content": text})
        return Segment(messages=[self.trace.nodes[-1].message])


class AnyAgent:
    def __init__(self, episode: VerifiersEpisode) -> None:
        self.episode = episode

    def __getattr__(self, role: str) -> VerifiersEpisode:
        return self.episode
