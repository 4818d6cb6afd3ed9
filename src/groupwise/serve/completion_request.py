"""Parse and validate OpenAI requests for chat and plain completions.

Also converts tool calls between OpenAI's format and the text format that models read and write
(`rollout.tool_calls`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.engine.sampler import MOST_ALTERNATIVES, Penalties
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.errors import ConfigError
from groupwise.model.tokenizer import TokenizerCodec, knows_tools
from groupwise.records import Message, Sampling, derive_seed
from groupwise.rewards.extraction import END_THINK
from groupwise.rollout.multi_turn import HERMES
from groupwise.rollout.tool_calls import CLOSE, OPEN, ParsedToolCall, is_bare_call, read_call, read_calls
from groupwise.rollout.tools import as_declared
from groupwise.serve.http_server import HTTPError
from groupwise.serve.structured_output import answer_grammar


def for_template(message: Message, *, knows_calls: bool) -> Message:
    """Convert a message for the chat template.

    Tool calls are passed as values if the template supports them, otherwise they are written into the text.
    """
    if not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    plain = [{"name": call["name"], "arguments": arguments_of(call)} for call in calls]
    if knows_calls:
        return {**message, "tool_calls": [{"type": "function", "function": call} for call in plain]}
    written = [f"{OPEN}\n{json.dumps(call)}\n{CLOSE}" for call in plain]
    content = [message["content"]] if message.get("content") else []
    return {"role": message["role"], "content": "\n".join([*content, *written])}


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return a call's arguments as a value; OpenAI clients send them as a JSON string."""
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def template_messages(messages: Sequence[Message], codec: TokenizerCodec) -> list[Message]:
    """Convert the messages of a chat for the model's chat template.

    Templates of other formats than Hermes may require ids of nine letters (Mistral), the name of the tool
    with its result (Gemma), or arguments as text (DeepSeek).
    """
    if (style := codec.tool_format) == HERMES:
        knows = codec.tokenizer.chat_template is not None and knows_tools(codec.tokenizer)
        return [for_template(message, knows_calls=knows) for message in messages]
    converted: list[Message] = []
    known: dict[Any, tuple[str, str]] = {}
    for message in messages:
        made = []
        for call in message.get("tool_calls") or ():
            name, arguments, own = (
                call["function"]["name"],
                arguments_of(call["function"]),
                f"call{len(known):05d}",
            )
            known[call.get("id") or own] = own, name
            function = {
                "name": name,
                "arguments": json.dumps(arguments) if style == "deepseek" else arguments,
            }
            made.append({"id": own, "type": "function", "function": function})
        if made:
            message = {**message, "tool_calls": made} | ({"content": None} if style == "deepseek" else {})
        elif message["role"] == "tool":
            own, name = known.get(message.get("tool_call_id"), ("call00000", message.get("name", "tool")))
            message = {**message, "tool_call_id": own, "name": name}
        converted.append(message)
    return converted


MARKS = {
    "qwen_xml": ("<tool_call>", "<function="),
    "llama": ("<|python_tag|>", "{"),
    "pythonic": ("<|python_start|>", "[", "{"),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "harmony": ("<|channel|>commentary", "<|start|>assistant to=functions", "to=functions."),
    "gemma": ("<start_function_call>", "<|tool_call>"),
}
"""What the calls in an answer begin with, by format. For Hermes see `read_answer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallReader:
    """Reads the tool calls of answers in the format of the chat template."""

    style: str = HERMES
    properties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schemas of the arguments of each tool."""
    decode: Callable[[Sequence[int]], str] = str
    """Decodes tokens with the special ones, which delimit calls in some formats."""
    special: Sequence[str] = ()
    """Special tokens, which are no content."""

    @classmethod
    def of(cls, codec: TokenizerCodec, tools: Sequence[Any]) -> ToolCallReader:
        functions = [tool["function"] for tool in tools]
        parameters = {one["name"]: one.get("parameters") or {} for one in functions}
        return cls(
            style=codec.tool_format,
            properties={name: each.get("properties") or {} for name, each in parameters.items()},
            decode=codec.decode_calls,
            special=codec.tokenizer.all_special_tokens,
        )

    def read(self, text: str, tokens: Sequence[int]) -> tuple[str, list[dict[str, str]]]:
        """Split an answer into its text and its tool calls; malformed calls remain text.

        Calls in Hermes format are read from every model.
        """
        whole = text if self.style == HERMES else self.decode(tokens)
        calls = [call for call in read_calls(whole, self.style) if call.error is None]
        if self.style == HERMES or not calls:
            return read_answer(text)
        thought, ended, answer = whole.rpartition(END_THINK)
        begins = [answer.find(mark) for mark in MARKS[self.style] if mark in answer]
        content = thought + ended + answer[: min(begins, default=0)]
        for token in self.special:
            content = content.replace(token, "")
        return content.strip(), [{"name": one.name, "arguments": self._arguments(one)} for one in calls]

    def _arguments(self, call: ParsedToolCall) -> str:
        arguments = dict(call.arguments)
        if call.untyped:
            arguments = as_declared(arguments, self.properties.get(call.name, {}))
        return json.dumps(arguments)

    def streamable(self, text: str) -> int:
        """Return how many characters of an unfinished answer cannot be part of a tool call.

        Calls that begin with a special token cannot be seen in the text: such an answer is sent at its end.
        """
        if self.style == HERMES:
            return streamable_length(text)
        answer = text.rpartition(END_THINK)[2]
        thought = len(text) - len(answer)
        if self.style in ("llama", "pythonic"):
            begins = answer.lstrip()[:1]
            return streamable_length(text) if begins and begins not in "{[<" else thought
        return thought


def read_answer(text: str) -> tuple[str, list[dict[str, str]]]:
    """Split an answer into its text and its tool calls; malformed calls remain text."""
    thought, ended, answer = text.rpartition(END_THINK)
    if is_bare_call(answer):
        content, calls = thought + ended, [read_call(answer)]
    else:
        content, calls = thought + ended, []
        first, *parts = answer.split(OPEN)
        content += first
        for part in parts:
            body, closed, after = part.partition(CLOSE)
            call = read_call(body)
            if closed and call.error is None:
                calls.append(call)
                content += after
            else:
                content += OPEN + part
    valid = [{"name": c.name, "arguments": json.dumps(c.arguments)} for c in calls if c.error is None]
    return (content.strip(), valid) if valid else (text, [])


def streamable_length(text: str) -> int:
    """Return how many characters of an unfinished answer cannot be part of a tool call."""
    answer = text.rpartition(END_THINK)[2]
    content = "" if answer.lstrip().startswith("{") else answer.partition(OPEN)[0]
    half = next((size for size in range(len(OPEN) - 1, 0, -1) if content.endswith(OPEN[:size])), 0)
    end = len(text) - len(answer) + len(content) - half
    return len(text[:end].rstrip())  # whitespace before a tool call is not content


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    # vLLM's extensions:
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
"""Unsupported parameters, with the values that are accepted because they have no effect."""

MOST_ANSWERS, MOST_PROMPTS, MOST_BIASES = 32, 1024, 1024
COLDEST = 1e-4
"""Temperatures below this decode greedily: only the most likely token has any probability left, and smaller
divisors overflow the logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A parsed request for one or more completions."""

    chat: bool
    jobs: tuple[Job, ...]
    """One for each prompt."""
    stream: bool
    usage: bool
    """Whether the stream ends with token counts (`stream_options.include_usage`)."""
    logprobs: bool
    echo: tuple[str, ...]
    """Text that the completions of each prompt begin with: the prompt, or an empty string."""
    silent: bool
    """Whether only the prompt is returned (`echo` with `max_tokens=0`)."""
    tools: ToolCallReader | None
    """Parses tool calls in the completions; None: they are text."""
    token_ids: bool = False
    """Whether to return the ids of prompt and completion (`return_token_ids`, as vLLM names it)."""

    @property
    def count(self) -> int:
        """The number of completions."""
        return sum(len(job.seeds) for job in self.jobs)


def parse_completion_request(
    body: Mapping[str, Any], codec: TokenizerCodec, *, chat: bool, context: int, model: str
) -> CompletionRequest:
    """Parse the body of a chat or plain completion request."""
    for name, accepted in UNSUPPORTED.items():
        if body.get(name) not in accepted:
            raise HTTPError(400, f"{name} is not supported")
    if body.get("echo" if chat else "top_logprobs"):
        raise HTTPError(400, "echo requires plain completions" if chat else "top_logprobs requires a chat")
    named = typed(body, "model", str, model)
    if named != model:
        message = f"this server has no model {named!r}; use {model!r}"
        raise HTTPError(404, message, code="model_not_found", param="model")
    tools = typed(body, "tools", list, []) if chat and body.get("tool_choice") != "none" else []
    prompts = [chat_tokens(body, codec, tools, context)] if chat else plain_prompts(body, codec, context)
    count = typed(body, "n", int, 1)
    if not 1 <= count <= MOST_ANSWERS:
        raise HTTPError(400, f"n must be between 1 and {MOST_ANSWERS}")
    seed = typed(body, "seed", int, secrets.randbits(62))
    alternatives = read_alternatives(body, chat=chat)
    penalties = read_penalties(body, codec.vocabulary)
    grammar = answer_grammar(body, tools, codec)
    echo = typed(body, "echo", bool, False)
    silent = echo and body.get("max_tokens") == 0
    if silent:
        body = {**body, "max_tokens": 1}  # one token is sampled, but not returned
    jobs = (
        Job(
            prompt=prompt,
            seeds=tuple(derive_seed(seed, "serve", number * count + member) for member in range(count)),
            sampling=read_sampling(body, chat=chat, room=context - len(prompt)),
            alternatives=alternatives or 0,
            scores_prompt=echo and alternatives is not None,
            penalties=penalties,
            grammar=grammar,
        )
        for number, prompt in enumerate(prompts)
    )
    return CompletionRequest(
        chat=chat,
        jobs=tuple(jobs),
        stream=typed(body, "stream", bool, False),
        usage=bool(typed(body, "stream_options", dict, {}).get("include_usage")),
        logprobs=alternatives is not None,
        echo=tuple(codec.decode(prompt) if echo else "" for prompt in prompts),
        silent=silent,
        tools=ToolCallReader.of(codec, tools) if tools else None,
        token_ids=typed(body, "return_token_ids", bool, False),
    )


def read_sampling(body: Mapping[str, Any], *, chat: bool, room: int) -> Sampling:
    """Parse the sampling settings; without `max_tokens`, a chat may use the rest of the context."""
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    texts = isinstance(stop, list) and all(isinstance(string, str) and string for string in stop)
    if not texts or len(stop) > 16:
        raise HTTPError(400, "stop must be a non-empty string or a list of up to 16 of them")
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise HTTPError(400, "max_tokens must be an integer of at least 1")
    temperature = number(body, "temperature", 1.0, 0.0, 10.0)
    sampling = Sampling(
        temperature=0.0 if temperature < COLDEST else temperature,
        top_p=number(body, "top_p", 1.0, 1e-6, 1.0),
        top_k=int(number(body, "top_k", 0, 0, 1e9, whole=True)),
        min_p=number(body, "min_p", 0.0, 0.0, 1.0),
        max_tokens=limit or (max(1, room) if chat else 16),
        stop=tuple(stop),
    )
    return sampling


def read_penalties(body: Mapping[str, Any], vocabulary: int) -> Penalties | None:
    """Parse penalties and logit biases; None if no logit changes."""
    bias: dict[Any, Any] = typed(body, "logit_bias", dict, {})
    if len(bias) > MOST_BIASES:
        raise HTTPError(400, f"logit_bias has {len(bias)} entries; send at most {MOST_BIASES}")
    penalties = Penalties(
        bias=tuple(
            {
                token_id(name, vocabulary): number(bias, name, 0.0, -100.0, 100.0, of="logit_bias of token ")
                for name in bias
            }.items()
        ),
        repetition=number(body, "repetition_penalty", 1.0, 0.01, 100.0),
        frequency=number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        presence=number(body, "presence_penalty", 0.0, -2.0, 2.0),
    )
    return None if penalties == Penalties() else penalties


def token_id(name: Any, vocabulary: int) -> int:
    """Parse a token id that is a key of a JSON object."""
    if not (isinstance(name, str) and name.isdecimal() and len(name) < 10 and int(name) < vocabulary):
        raise HTTPError(400, f"the keys of logit_bias must be token ids below {vocabulary}; got {name!r}")
    return int(name)


def read_alternatives(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return how many alternatives to report per token; None if no log-probabilities are requested."""
    name = "top_logprobs" if chat else "logprobs"
    count: int | None = typed(body, name, int, None)
    if count is not None and not 0 <= count <= MOST_ALTERNATIVES:
        raise HTTPError(400, f"{name} must be between 0 and {MOST_ALTERNATIVES}")
    if not chat:
        return count
    if typed(body, "logprobs", bool, False):
        return count or 0
    if count:
        raise HTTPError(400, "top_logprobs requires logprobs: true")
    return None


def chat_tokens(
    body: Mapping[str, Any], codec: TokenizerCodec, tools: Sequence[Any], context: int
) -> tuple[int, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HTTPError(400, "messages must be a list with at least one message")
    chat = [read_message(message) for message in messages]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise HTTPError(400, "every entry of tools must be {type: function, function: {name, …}}")
    try:
        return codec.encode(template_messages(chat, codec), tools=tools, most=context)
    except ConfigError as error:
        raise HTTPError(400, str(error)) from error
    except Exception as error:  # a template may raise any exception
        raise HTTPError(400, f"the model's chat template rejects these messages: {error}") from error


def read_message(message: Any) -> Message:
    """Validate one message and join content parts into one string."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise HTTPError(400, "each message needs a role and content")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise HTTPError(400, "only text content is supported: every part must be {type: text, text: …}")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise HTTPError(400, "the content of a message must be a string or a list of text parts")
    if content is None and not message.get("tool_calls"):
        raise HTTPError(400, "each message needs a role and content")
    role = "system" if message["role"] == "developer" else message["role"]  # OpenAI's newer name
    kept = {key: value for key, value in message.items() if value is not None}
    return kept | {"role": role, "content": content or ""}


def plain_prompts(body: Mapping[str, Any], codec: TokenizerCodec, context: int) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt: a string, token ids, or a list of strings or of token ids."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = prompt if isinstance(prompt, list) and several else [prompt]
    if len(prompts) > MOST_PROMPTS:
        raise HTTPError(400, f"prompt has {len(prompts)} entries; send at most {MOST_PROMPTS} per request")
    return [plain_tokens(prompt, codec, context) for prompt in prompts]


def plain_tokens(prompt: Any, codec: TokenizerCodec, context: int) -> tuple[int, ...]:
    if isinstance(prompt, str) and prompt:
        try:
            return codec.encode_text(prompt, most=context)
        except ConfigError as error:
            raise HTTPError(400, str(error)) from error
    if isinstance(prompt, list) and prompt:
        tokens = [token for token in prompt if type(token) is int and 0 <= token < codec.vocabulary]
        if len(tokens) == len(prompt):
            return tuple(tokens)
    raise HTTPError(
        400, "prompt must be a non-empty string, a list of this model's token ids, or a list of either"
    )


def typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise HTTPError(400, f"{name} must be of type {kind.__name__}")
    return value


def number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    low: float,
    high: float,
    *,
    whole: bool = False,
    of: str = "",
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise HTTPError(400, f"{of}{name} must be a number between {low:g} and {high:g}")
    if whole and value != int(value):
        raise HTTPError(400, f"{of}{name} must be an integer")
    return float(value)
