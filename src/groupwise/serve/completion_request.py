"""Calls of tools as OpenAI's clients know them, and as models read and write them (`rollout.calls`)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.engine.sampler import MOST_ALTERNATIVES
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.errors import ConfigError
from groupwise.model.tokenizer import TokenizerCodec, knows_tools
from groupwise.records import Message, Sampling
from groupwise.rewards.extraction import END_THINK
from groupwise.rollout.tool_calls import CLOSE, OPEN, is_bare_call, read_call
from groupwise.seeds import derive_seed
from groupwise.serve.http_server import HTTPError


def for_template(message: Message, *, knows_calls: bool) -> Message:
    """A message as the model's template takes it: its calls as values, or written out in the text."""
    if not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    plain = [{"name": call["name"], "arguments": arguments_of(call)} for call in calls]
    if knows_calls:
        return {**message, "tool_calls": [{"type": "function", "function": call} for call in plain]}
    written = [f"{OPEN}\n{json.dumps(call)}\n{CLOSE}" for call in plain]
    said = [message["content"]] if message.get("content") else []
    return {"role": message["role"], "content": "\n".join([*said, *written])}


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Arguments as a value: OpenAI's clients send them as JSON in a string."""
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def read_answer(text: str) -> tuple[str, list[dict[str, str]]]:
    """Split an answer into what it says and the calls it makes; what is no proper call stays text."""
    thought, ended, spoken = text.rpartition(END_THINK)
    if is_bare_call(spoken):
        said, calls = thought + ended, [read_call(spoken)]
    else:
        said, calls = thought + ended, []
        first, *parts = spoken.split(OPEN)
        said += first
        for part in parts:
            body, closed, after = part.partition(CLOSE)
            call = read_call(body)
            if closed and call.error is None:
                calls.append(call)
                said += after
            else:
                said += OPEN + part
    made = [{"name": c.name, "arguments": json.dumps(c.arguments)} for c in calls if c.error is None]
    return (said.strip(), made) if made else (text, [])


def surely_said(text: str) -> int:
    """How many characters of an unfinished answer are said, whatever follows: no call can begin in them."""
    spoken = text.rpartition(END_THINK)[2]
    said = "" if spoken.lstrip().startswith("{") else spoken.partition(OPEN)[0]
    half = next((size for size in range(len(OPEN) - 1, 0, -1) if said.endswith(OPEN[:size])), 0)
    end = len(text) - len(spoken) + len(said) - half
    return len(text[:end].rstrip())  # the spaces before a call are no part of what is said


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    # Of vLLM's own:
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "bad_words": (None, []),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "structured_outputs": (None, {}),
    **{f"guided_{kind}": (None,) for kind in ("json", "regex", "choice", "grammar")},
}
"""Parameters that only these values are accepted of."""

MOST_ANSWERS = 32
COLDEST = 1e-4
"""A temperature below which only the likeliest token is left; logits divided by less than that overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request for one or more answers."""

    chat: bool
    job: Job
    stream: bool
    usage: bool
    """Whether a stream ends with the count of tokens."""
    logprobs: bool
    echo: str
    """What each answer begins with: the prompt, or nothing."""
    silent: bool
    """Whether nothing is to come after it."""
    tools: bool
    """Whether calls are to be read out of the answers."""


def read_asked(
    body: Mapping[str, Any], codec: TokenizerCodec, *, chat: bool, context: int, model: str
) -> CompletionRequest:
    """Read the body of a request for chat or plain completions."""
    for name, accepted in UNSUPPORTED.items():
        if body.get(name) not in accepted:
            raise HTTPError(400, f"{name} is not supported")
    if body.get("echo" if chat else "top_logprobs"):
        raise HTTPError(400, "echo is for plain completions" if chat else "top_logprobs is for chats")
    named = typed(body, "model", str, model)
    if named != model:
        raise HTTPError(404, f"the model {named!r} is not served here; {model!r} is")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise HTTPError(400, "tool_choice must be auto or none: the model decides whether it calls")
    tools = typed(body, "tools", list, []) if chat and choice != "none" else []
    prompt = chat_tokens(body, codec, tools, context) if chat else plain_tokens(body, codec, context)
    count = typed(body, "n", int, 1)
    if not 1 <= count <= MOST_ANSWERS:
        raise HTTPError(400, f"n must lie between 1 and {MOST_ANSWERS}")
    seed = typed(body, "seed", int, secrets.randbits(62))
    alternatives = read_alternatives(body, chat=chat)
    echo = typed(body, "echo", bool, False)
    silent = echo and body.get("max_tokens") == 0
    if silent:
        body = {**body, "max_tokens": 1}  # it is drawn and not told
    return CompletionRequest(
        chat=chat,
        job=Job(
            prompt=prompt,
            seeds=tuple(derive_seed(seed, "serve", member) for member in range(count)),
            sampling=read_sampling(body, chat=chat, room=context - len(prompt)),
            alternatives=alternatives or 0,
            scores_prompt=echo and alternatives is not None,
        ),
        stream=typed(body, "stream", bool, False),
        usage=bool(typed(body, "stream_options", dict, {}).get("include_usage")),
        logprobs=alternatives is not None,
        echo=codec.decode(prompt) if echo else "",
        silent=silent,
        tools=bool(tools),
    )


def read_sampling(body: Mapping[str, Any], *, chat: bool, room: int) -> Sampling:
    """Read how tokens are drawn; without a limit, a chat may use what is left of the context."""
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    texts = isinstance(stop, list) and all(isinstance(string, str) and string for string in stop)
    if not texts or len(stop) > 16:
        raise HTTPError(400, "stop must be text, or up to 16 of them")
    asked = body.get("max_completion_tokens")
    asked = body.get("max_tokens") if asked is None else asked
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise HTTPError(400, "max_tokens must be a whole number of at least 1")
    temperature = number(body, "temperature", 1.0, 0.0, 10.0)
    sampling = Sampling(
        temperature=0.0 if temperature < COLDEST else temperature,
        top_p=number(body, "top_p", 1.0, 1e-6, 1.0),
        top_k=int(number(body, "top_k", 0, 0, 1e9, whole=True)),
        min_p=number(body, "min_p", 0.0, 0.0, 1.0),
        max_tokens=asked or (max(1, room) if chat else 16),
        stop=tuple(stop),
    )
    return sampling


def read_alternatives(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """How many tokens to tell beside each that is drawn; None: no log-probabilities at all."""
    name = "top_logprobs" if chat else "logprobs"
    count: int | None = typed(body, name, int, None)
    if count is not None and not 0 <= count <= MOST_ALTERNATIVES:
        raise HTTPError(400, f"{name} must lie between 0 and {MOST_ALTERNATIVES}")
    if not chat:
        return count
    if typed(body, "logprobs", bool, False):
        return count or 0
    if count:
        raise HTTPError(400, "top_logprobs needs logprobs to be true")
    return None


def chat_tokens(
    body: Mapping[str, Any], codec: TokenizerCodec, tools: Sequence[Any], context: int
) -> tuple[int, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HTTPError(400, "messages must be a list of at least one message")
    chat = [read_message(message) for message in messages]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise HTTPError(400, "each of tools must be {type: function, function: {name, …}}")
    try:
        template = codec.tokenizer.chat_template
        knows = template is not None and knows_tools(codec.tokenizer)
        messages = [for_template(message, knows_calls=knows) for message in chat]
        return codec.encode(messages, tools=tools, most=context)
    except ConfigError as error:
        raise HTTPError(400, str(error)) from error
    except Exception as error:  # a template may refuse a chat in any way it likes
        raise HTTPError(400, f"the model's chat template refuses these messages: {error}") from error


def read_message(message: Any) -> Message:
    """Check one message; content in parts becomes text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise HTTPError(400, "each message needs a role and content")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise HTTPError(400, "only text is understood: every part must be {type: text, text: …}")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise HTTPError(400, "the content of a message must be text")
    if content is None and not message.get("tool_calls"):
        raise HTTPError(400, "each message needs a role and content")
    return {key: value for key, value in message.items() if value is not None} | {"content": content or ""}


def plain_tokens(body: Mapping[str, Any], codec: TokenizerCodec, context: int) -> tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        try:
            return codec.encode_text(prompt, most=context)
        except ConfigError as error:
            raise HTTPError(400, str(error)) from error
    if isinstance(prompt, list) and prompt:
        tokens = [token for token in prompt if type(token) is int and 0 <= token < codec.vocabulary]
        if len(tokens) == len(prompt):
            return tuple(tokens)
    raise HTTPError(400, "prompt must be text, or a list of token ids of this model; one for each request")


def typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise HTTPError(400, f"{name} must be of type {kind.__name__}")
    return value


def number(
    body: Mapping[str, Any], name: str, default: float, low: float, high: float, *, whole: bool = False
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise HTTPError(400, f"{name} must be a number between {low:g} and {high:g}")
    if whole and value != int(value):
        raise HTTPError(400, f"{name} must be a whole number")
    return float(value)
