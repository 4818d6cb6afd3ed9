"""`groupwise chat`: talk to a run, a checkpoint, an adapter or a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.config.coerce import between
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.model.policy import Policy
    from groupwise.records import Sampling
    from groupwise.serve.chat_session import Answering, ChatSession, ToolSession
    from groupwise.serve.load_target import TaskPrompt

HELP = "type your message; /reset begins anew, /quit or Ctrl-D ends"


def chat(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, checkpoint, adapter or model: folder or name.")
    ] = "tiny",
    words: Annotated[list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Ask this and end; -: what comes in.")] = None,
    example: Annotated[
        int | None, typer.Option(help="Ask this held-out example of the task, from 1, and score the answer.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A task; for a run, its own by default.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0: always the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this much probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    strategy: Annotated[
        str | None, typer.Option(help="Spend more on an answer, such as self-consistency:8.")
    ] = None,
    tools: Annotated[bool, typer.Option("--tools", help="Let it call the tools of its task.")] = False,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> None:
    """Talk to a model; answers are shown while they are written."""
    between("--temperature", temperature, 0.0)
    between("--top-p", top_p, 1e-6, 1.0)
    between("--top-k", top_k, 0)
    between("--max-tokens", max_tokens, 1)
    between("--example", example, 1)
    if prompt is not None and example is not None:
        raise ConfigError("--prompt and --example both say what to ask; give one of them")
    if tools and strategy is not None:
        raise ConfigError("--tools and --strategy do not go together; give one of them")
    if task and not (example or tools):
        raise ConfigError("--task says whose example or tools to take: give --example or --tools with it")
    from groupwise.serve.load_target import find_named, held_out_example, tools_of

    named = find_named(target, words or [])
    config = named.config
    asked = held_out_example(config, task, number=example or 1) if example or tools else None
    kit = tools_of(config, asked.task, asked.example if example else None) if tools and asked else None
    from groupwise.model.load import load_for_generation

    policy = load_for_generation(config.model, rank=named.target.rank, trained=named.target.trained)
    sampling = sampling_for(policy, temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens)
    with ExitStack() as stack:
        if strategy is not None:
            answering = strategist(strategy, policy, sampling, config=config, seed=seed)
        else:
            answering = streamer(policy, sampling, stack, config=config, kit=kit, seed=seed)
        if example and asked:
            print(f"{asked.question}\n---")
            text = show(answering(asked.messages))
            print(asked.verdict(text, seconds=config.task.reward_seconds, kit=kit))
            return
        talk = conversation(answering, system=system, asked=asked)
        if prompt is not None:
            show(talk.ask(readable(sys.stdin.read() if prompt == "-" else prompt)))
        else:
            converse(talk, title=target)


def sampling_for(
    policy: Policy, *, temperature: float, top_p: float, top_k: int, max_tokens: int
) -> Sampling:
    """How tokens are drawn; half of a model's context is left to what is asked."""
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
    kit: ToolSession | None,
    seed: int,
) -> Answering:
    """Answers that are shown while they are written, with tools where there is a kit of them."""
    from groupwise.serve.chat_session import StreamingAnswers, ToolAnswers

    streaming = StreamingAnswers(policy, sampling, seed=seed)
    stack.callback(streaming.close)
    return streaming if kit is None else ToolAnswers(streaming, kit, limits=config.tools)


def conversation(answering: Answering, *, system: str | None, asked: TaskPrompt | None) -> ChatSession:
    """A conversation; one with tools begins as its task's prompts do."""
    from groupwise.serve.chat_session import ChatSession, ToolAnswers, ToolChatSession
    from groupwise.serve.load_target import system_of

    if isinstance(answering, ToolAnswers):
        assert asked is not None, "tools are a task's"
        return ToolChatSession(answering, system=system or system_of(asked))
    return ChatSession(answering, system=system)


def strategist(strategy: str, policy: Policy, sampling: Sampling, *, config: Config, seed: int) -> Answering:
    from groupwise.serve.chat_session import by_strategy

    drawn = replace(sampling, temperature=sampling.temperature or 0.7)  # several equal answers say nothing
    return by_strategy(strategy, policy, drawn, engine=config.engine, seed=seed)


def converse(talk: ChatSession, *, title: str) -> None:
    print(f"{title}: {HELP}")
    for line in questions():
        if line == "/reset":
            talk.reset()
            continue
        try:
            show(talk.ask(line))
        except ConfigError as error:  # a full context, a tool that fails: what was said before is kept
            print(error)


def questions() -> Iterator[str]:
    """Yield what the user types, until they have had enough."""
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
    """Text as the user typed it; what is no UTF-8 is replaced, as a terminal shows it."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def show(parts: Iterator[str]) -> str:
    """Print an answer as it comes, and return it; Ctrl-C ends the answer, not the conversation."""
    shown: list[str] = []
    try:
        for part in parts:
            shown.append(part)
            print(part, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    except ConfigError:
        if shown:
            print()  # the reason gets a line of its own
        raise
    print()
    return "".join(shown)
