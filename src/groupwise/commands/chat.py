"""`groupwise chat`: chat with a run, a checkpoint, an adapter or a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.commands.options import Overrides, Target
from groupwise.config.coerce import between
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.model.policy import Policy
    from groupwise.records import Sampling
    from groupwise.serve.chat_session import Answering, ChatSession, TaskPrompt, ToolSession

HELP = "type a message; /reset starts a new conversation, /quit or Ctrl-D exits"


def chat(
    target: Target = "tiny",
    arguments: Overrides = None,
    prompt: Annotated[
        str | None, typer.Option(help="Answer this prompt and exit; -: read the prompt from stdin.")
    ] = None,
    example: Annotated[
        int | None, typer.Option(help="Answer and score this held-out example of the task, counted from 1.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Task for --example and --tools; by default, the task of the run.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling: cumulative probability to keep.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens to sample from; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Maximum response length in tokens.")] = 512,
    strategy: Annotated[
        str | None, typer.Option(help="Test-time strategy, such as self-consistency:8.")
    ] = None,
    tools: Annotated[bool, typer.Option("--tools", help="Let the model call the tools of its task.")] = False,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
) -> None:
    """Chat with a model in the terminal; responses are streamed."""
    between("--temperature", temperature, 0.0)
    between("--top-p", top_p, 1e-6, 1.0)
    between("--top-k", top_k, 0)
    between("--max-tokens", max_tokens, 1)
    between("--example", example, 1)
    if prompt is not None and example is not None:
        raise ConfigError("--prompt and --example are mutually exclusive; give only one of them")
    if task and not (example or tools):
        raise ConfigError("--task requires --example or --tools")
    from groupwise.evaluate.target import find_named
    from groupwise.serve.chat_session import held_out_example, tools_of

    named = find_named(target, arguments or [])
    config = named.config
    task_prompt = held_out_example(config, task, number=example or 1) if example or tools else None
    tool_session = (
        tools_of(config, task_prompt.task, task_prompt.example if example else None)
        if tools and task_prompt
        else None
    )
    from groupwise.model.load import load_for_generation

    policy = load_for_generation(config.model, rank=named.target.rank, trained=named.target.trained)
    sampling = sampling_for(policy, temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens)
    with ExitStack() as stack:
        if strategy is not None:
            prompted = task_prompt if tools else None
            answering = strategist(
                strategy, policy, sampling, config=config, seed=seed, prompted=prompted, session=tool_session
            )
        else:
            answering = streamer(policy, sampling, stack, config=config, tool_session=tool_session, seed=seed)
        if example and task_prompt:
            print(f"{task_prompt.question}\n---")
            text = show(answering(task_prompt.messages))
            print(task_prompt.verdict(text, seconds=config.task.reward_seconds, kit=tool_session))
            return
        session = conversation(answering, tool_session, system=system, task_prompt=task_prompt)
        if prompt is not None:
            show(session.ask(readable(sys.stdin.read() if prompt == "-" else prompt)))
        else:
            converse(session, title=target)


def sampling_for(
    policy: Policy, *, temperature: float, top_p: float, top_k: int, max_tokens: int
) -> Sampling:
    """Return the sampling settings; half of the context is reserved for the prompt."""
    from groupwise.records import Sampling
    from groupwise.serve.completion_request import COLDEST

    longest = min(max_tokens, max(1, policy.context_length // 2))
    temperature = 0.0 if temperature < COLDEST else temperature
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=longest)


def streamer(
    policy: Policy,
    sampling: Sampling,
    stack: ExitStack,
    *,
    config: Config,
    tool_session: ToolSession | None,
    seed: int,
) -> Answering:
    """Return the source of streamed responses, with tools if there is a tool session."""
    from groupwise.serve.chat_session import StreamingAnswers, ToolAnswers

    streaming = StreamingAnswers(policy, sampling, seed=seed, speculative=config.engine.speculative)
    stack.callback(streaming.close)
    return streaming if tool_session is None else ToolAnswers(streaming, tool_session, limits=config.tools)


def conversation(
    answering: Answering, tools: ToolSession | None, *, system: str | None, task_prompt: TaskPrompt | None
) -> ChatSession:
    """Start a conversation; with tools, the system message is that of the task."""
    from groupwise.serve.chat_session import ChatSession, ToolChatSession, system_of

    if tools is not None:
        assert task_prompt is not None, "tools belong to a task"
        return ToolChatSession(answering, tools, system=system or system_of(task_prompt))
    return ChatSession(answering, system=system)


def strategist(
    strategy: str,
    policy: Policy,
    sampling: Sampling,
    *,
    config: Config,
    seed: int,
    prompted: TaskPrompt | None,
    session: ToolSession | None,
) -> Answering:
    """Return the source of responses by a strategy; `prompted`: the example whose task has the tools."""
    from groupwise.serve.chat_session import by_strategy

    return by_strategy(
        strategy,
        policy,
        replace(sampling, temperature=sampling.temperature or 0.7),  # greedy samples would all be equal
        engine=config.engine.without_fp8(),
        seed=seed,
        tools=prompted.task.multi_turn(config.tools) if prompted else None,
        session=session,
        examples=[prompted.example] if prompted else (),
    )


def converse(session: ChatSession, *, title: str) -> None:
    print(f"{title}: {HELP}")
    for line in questions():
        if line == "/reset":
            session.reset()
            continue
        try:
            show(session.ask(line))
        except ConfigError as error:  # a full context or a failed tool: the conversation continues
            print(error)


def questions() -> Iterator[str]:
    """Yield what the user types until /quit, Ctrl-D or Ctrl-C."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/quit":
            return
        if line:
            yield readable(line)


def readable(text: str) -> str:
    """Replace bytes that are not valid UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def show(parts: Iterator[str]) -> str:
    """Print a response as it streams, and return it. Ctrl-C ends the response, not the conversation."""
    shown: list[str] = []
    try:
        for part in parts:
            shown.append(part)
            print(part, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    except ConfigError:
        if shown:
            print()  # the error message starts on a new line
        raise
    print()
    return "".join(shown)
