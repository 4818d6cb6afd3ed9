"""Reward functions in the style of TRL: recognize them, and make the arguments that TRL would pass.

A TRL-style function may name any of `prompts`, `completions`, `completion_ids`, `trainer_state`,
`log_metric`, `log_extra`, `environments` and the columns of the example, or take them all as `**kwargs`.
Columns are lists with one entry per rollout. `environments` has the object of each rollout whose methods were
its tools (`Task.environment_factory`), or the state of its tools; a task without either has none.

For a chat prompt a completion is `[{"role": "assistant", "content": …}]`, including any prefill; with tools,
calls and results are further messages. For a text prompt it is a string.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from groupwise.records import Example, Rollout, Turn

if TYPE_CHECKING:
    from groupwise.rewards.runner import RewardContext, RewardFunction

TEXT_COMPLETIONS = (
    "completions are strings because the task's prompt is a string; return a list of messages from "
    "`prompt` to get lists of messages"
)
BATCH_NAMES = frozenset({"prompts", "completions", "completion_ids"})
# TRL does not pass these columns on: the plural names above carry them.
RESERVED_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})


def is_trl_style(function: RewardFunction) -> bool:
    """Return whether a reward function is written in TRL style."""
    try:
        return _is_trl_style(function)
    except TypeError:  # an unhashable object cannot be cached
        return _is_trl_style.__wrapped__(function)


@lru_cache(maxsize=64)
def _is_trl_style(function: RewardFunction) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    by_keyword_only = all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    return by_keyword_only or any(p.name in BATCH_NAMES for p in parameters)


def batch_arguments(
    function: RewardFunction, rollouts: Sequence[Rollout], example: Example, context: RewardContext
) -> dict[str, Any]:
    """Return the keyword arguments that TRL would pass, restricted to those the function accepts."""
    prompts, completions = zip(*(as_trl(rollout) for rollout in rollouts), strict=True)
    available = {
        **{
            column: [value] * len(rollouts)
            for column, value in example.items()
            if column not in RESERVED_COLUMNS
        },
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": [list(rollout.tokens[rollout.prompt_length :]) for rollout in rollouts],
        "trainer_state": context.trainer_state,
        "log_metric": context.log_metric,
        "log_extra": partial(context.log_extra, rollouts),
    }
    if any(rollout.state is not None for rollout in rollouts):
        available["environments"] = [rollout.state for rollout in rollouts]
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return available
    return {name: values for name, values in available.items() if name in parameters}


def as_trl(rollout: Rollout) -> tuple[Any, Any]:
    """Return (prompt, completion) as TRL represents them, with a prefill moved to the completion.

    With tools or an environment, the completion is the whole conversation after the prompt.
    """
    if isinstance(rollout.prompt, str):
        return rollout.prompt, rollout.transcript
    messages = [dict(message) for message in rollout.prompt]
    prefill = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else ""
    completion: list[dict[str, Any]] = []
    for turn in rollout.turns or (Turn(text=rollout.text),):
        message: dict[str, Any] = {"role": "assistant", "content": prefill + turn.text}
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in turn.calls
            ]
        completion.append(message)
        completion += [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
        completion += [{"role": "user", "content": turn.observation}] if turn.observation else []
    return messages, completion


def as_openai(rollout: Rollout) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (prompt, completion) of a chat as OpenAI's API represents them: calls have ids and JSON text."""
    prompt, completion = as_trl(rollout)
    called, answered = count(), count()
    for message in completion:
        for call in message.get("tool_calls", ()):
            function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
            call |= {"id": f"call-{next(called)}", "function": function}
        if message["role"] == "tool":
            message["tool_call_id"] = f"call-{next(answered)}"
    return prompt, completion
