"""Resolve what the user wants to serve or chat with, and load a task's example and tools for a chat."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.config import Config, read_config
from groupwise.config.schema import NO_TASK, rank_known_to_vllm
from groupwise.errors import ConfigError
from groupwise.evaluate.target import Target, find_target
from groupwise.model.resolve import adapter_settings, local_folder, name_for_others
from groupwise.records import Example, Message
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.serve.chat_session import ToolSession
from groupwise.tasks import Task, load_task, without_data
from groupwise.tasks.self_test import check


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A run, checkpoint, adapter or model, resolved before any weights are loaded."""

    target: Target
    config: Config

    @property
    def vllm_command(self) -> str:
        """The command that serves the same with vLLM; it first merges adapters that vLLM does not support."""
        target, model = self.target, name_for_others(self.config.model.name)
        if not target.rank or target.trained is None:
            return shlex.join(["vllm", "serve", str(target.trained or model)])
        settings = adapter_settings(target.trained)
        unsupported = settings.get("use_dora") or settings.get("modules_to_save")
        if unsupported or (target.settings is not None and self.config.model.quantization):
            merge = shlex.join(["groupwise", "merge", target.name, "--output-path", "merged"])
            return f"{merge} && vllm serve merged"
        adapters = ["--enable-lora", "--max-lora-rank", str(rank_known_to_vllm(target.rank))]
        named = f"{Path(target.name).name}={target.trained}"
        return shlex.join(["vllm", "serve", model, *adapters, "--lora-modules", named])


def find_named(name: str, overrides: Sequence[str]) -> ResolvedModel:
    """Resolve the name of a run, checkpoint, adapter or model, and read its settings."""
    target = find_target(name)
    known = {} if target.base is None else {"model": target.base}
    config = read_config(target.settings, overrides=overrides, defaults=known)
    config = replace(config, model=replace(config.model, name=target.base or config.model.name))
    local_folder(config.model.name)
    return ResolvedModel(target=target, config=config.resolve())


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompt:
    """An example of a task, as the policy sees it."""

    task: Task
    example: Example

    @property
    def messages(self) -> Sequence[Message]:
        prompt = self.task.ask(self.example)
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    @property
    def question(self) -> str:
        return "\n".join(str(message["content"]) for message in self.messages)

    def verdict(self, answer: str, *, seconds: float, kit: ToolSession | None = None) -> str:
        """Score an answer, and the tool calls before it, with the task's rewards."""
        turns, state = (tuple(kit.turns), kit.state) if kit else ((), None)
        answer = turns[-1].text if turns else answer
        result = check(self.task, answer, self.example, seconds=seconds, turns=turns, state=state)
        parts = ", ".join(f"{name} {value:g}" for name, value in result.parts.items())
        return f"--- {'correct' if result.correct else 'incorrect'}: {parts or result.error}"


def system_of(prompt: TaskPrompt) -> str | None:
    """Return the system message of a task's prompt, or None."""
    first = prompt.messages[0]
    return str(first["content"]) if first["role"] == "system" else None


def tools_of(config: Config, task: Task, example: Example | None) -> ToolSession:
    """Prepare a task's tools and the state they operate on, which requires an example."""
    if not task.tools:
        raise ConfigError(
            f"task {task.name} has no tools: choose a task with tools, such as --task search_qa, "
            "or omit --tools"
        )
    if task.state is not None and example is None:
        raise ConfigError(f"the tools of task {task.name} need the state of an example: give --example")
    limits = config.tools
    toolbox = ToolExecutor.of(task.tools, seconds=limits.seconds, characters=limits.result_characters)
    return ToolSession(toolbox=toolbox, state=task.state(example) if task.state and example else None)


def held_out_example(config: Config, task: str | None, *, number: int) -> TaskPrompt:
    """Return held-out example `number`, counted from 1, of the given task or the run's own."""
    settings = config.task if task is None else without_data(replace(config.task, name=task, options={}))
    if settings.name == NO_TASK:
        raise ConfigError("no task is configured: give --task")
    loaded = load_task(replace(config, task=settings).resolve().task)
    rows = loaded.split(settings, config.run.seed).held_out
    if number > len(rows):
        raise ConfigError(
            f"task {loaded.name} has {len(rows)} held-out examples; number {number} is out of range"
        )
    return TaskPrompt(task=loaded, example=rows[number - 1])
