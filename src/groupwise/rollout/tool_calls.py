"""Parse and write tool calls in the format of the model's chat template.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>              Hermes, Qwen 2.5 and 3
    qwen_xml  <tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>   Qwen3-Coder, 3.5
    llama     {"name": …, "parameters": {…}}                                    Llama 3
    pythonic  [NAME(key="…"), …]                                                Llama 3.2 and 4
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}], or [TOOL_CALLS]NAME[ARGS]{…}
    deepseek  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>        V3.1; V3 with ```json
    harmony   <|channel|>commentary to=functions.NAME<|message|>{…}             gpt-oss
    gemma     <start_function_call>call:NAME{key:<escape>…<escape>}<end_function_call>

`TokenizerCodec.tool_format` says which one a template writes. A turn may contain several calls. Calls inside
the thinking section are ignored. Parsing never evaluates text; its time is linear in the length of the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.records import is_unicode
from groupwise.rewards.extraction import END_THINK

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_PYTHONIC = 20_000
"""Longest text that is parsed as a list of Python calls."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A parsed call; `error` says why it cannot be executed."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    untyped: bool = False
    """Whether the format writes every argument as text, to be read as the type that the tool declares."""


def read_calls(text: str, style: str = "hermes") -> list[ParsedToolCall]:
    """Return the calls of one turn in order, including malformed ones."""
    return list(READERS[style](text.rpartition(END_THINK)[2]))


def read_hermes(answer: str) -> Iterator[ParsedToolCall]:
    bodies = list(between(answer, OPEN, CLOSE))
    if not bodies and is_bare_call(answer):
        bodies = [answer]
    for body in bodies:
        yield ParsedToolCall(error=f"a call must end in {CLOSE}") if body is None else read_call(body)


def read_qwen_xml(answer: str) -> Iterator[ParsedToolCall]:
    for body in between(answer, "<function=", "</function>"):
        if body is None:
            yield ParsedToolCall(error="a call must end in </function>")
            continue
        name, _, rest = body.partition(">")
        arguments = {}
        for part in rest.split("<parameter=")[1:]:
            key, _, value = part.partition(">")
            arguments[key.strip()] = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        yield checked(name.strip(), arguments, untyped=True)


def read_llama(answer: str) -> Iterator[ParsedToolCall]:
    answer = answer.strip().removeprefix("<|python_tag|>").strip()
    if is_bare_call(answer):
        decoder, position = json.JSONDecoder(), 0
        while position < len(answer):
            try:
                _, end = decoder.raw_decode(answer, position)
            except (ValueError, RecursionError):
                yield read_call(answer[position:])
                return
            yield read_call(answer[position:end])
            position = end + len(answer[end:]) - len(answer[end:].lstrip("; \n"))


def read_pythonic(answer: str) -> Iterator[ParsedToolCall]:
    answer = answer.strip()
    answer = answer.removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if is_bare_call(answer):
        yield from read_llama(answer)
        return
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", answer) or not answer.endswith("]"):
        return
    malformed = ParsedToolCall(error='calls must be a list such as [search(query="…")]')
    try:
        if len(answer) > MAX_PYTHONIC:
            raise ValueError("too long")
        parsed = ast.parse(answer, mode="eval").body
        assert isinstance(parsed, ast.List)
        for node in parsed.elts:
            if not isinstance(node, ast.Call) or node.args:
                yield malformed
                continue
            values = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
            yield checked(ast.unparse(node.func), values)
    except (AssertionError, ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        yield malformed


def read_mistral(answer: str) -> Iterator[ParsedToolCall]:
    for body in answer.split("[TOOL_CALLS]")[1:]:
        name, with_arguments, arguments = body.partition("[ARGS]")
        if with_arguments:
            yield with_json(name.partition("[CALL_ID]")[0].strip(), arguments)
            continue
        try:
            listed = json.loads(body)
        except (ValueError, RecursionError):
            yield ParsedToolCall(error="calls must be a JSON list after [TOOL_CALLS]")
            continue
        for call in listed if isinstance(listed, list) else [listed]:
            yield read_call(json.dumps(call))


def read_deepseek(answer: str) -> Iterator[ParsedToolCall]:
    for body in between(answer, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        if body is None:
            yield ParsedToolCall(error="a call must end in <｜tool▁call▁end｜>")
            continue
        name, _, rest = body.partition("<｜tool▁sep｜>")
        if name.strip() == "function":  # V3 and R1: the name, then a block of JSON
            name, _, rest = rest.partition("\n")
            rest = rest.strip().removeprefix("```json").removesuffix("```")
        yield with_json(name.strip(), rest)


def read_harmony(answer: str) -> Iterator[ParsedToolCall]:
    for part in answer.split("to=functions.")[1:]:
        header, opened, body = part.partition("<|message|>")
        if opened:
            name = re.split(r"[\s<]", header, maxsplit=1)[0]
            yield with_json(name, re.split(r"<\|(?:call|end|return|start|channel)\|>", body, maxsplit=1)[0])


def read_gemma(answer: str) -> Iterator[ParsedToolCall]:
    for opening, closing, quote in GEMMA:
        for body in between(answer, opening, closing):
            if body is None:
                yield ParsedToolCall(error=f"a call must end in {closing}")
                continue
            name, _, arguments = body.strip().removeprefix("call:").partition("{")
            yield with_json(name.strip(), as_json("{" + arguments, quote))


GEMMA = (
    ("<start_function_call>", "<end_function_call>", "<escape>"),
    ("<|tool_call>", "<tool_call|>", '<|"|>'),
)
"""Beginning, end and quotation mark of a call: FunctionGemma, Gemma 4."""


def as_json(text: str, quote: str) -> str:
    """Return Gemma's notation as JSON: quote the keys, and what stands between quotation marks."""
    parts = text.split(quote)
    plain = [re.sub(r"([{,]\s*)([A-Za-z_]\w*)\s*:", r'\1"\2":', part) for part in parts[::2]]
    quoted = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(piece for pair in zip(plain, [*quoted, ""], strict=False) for piece in pair)


READERS: Mapping[str, Callable[[str], Iterator[ParsedToolCall]]] = {
    "hermes": read_hermes,
    "qwen_xml": read_qwen_xml,
    "llama": read_llama,
    "pythonic": read_pythonic,
    "mistral": read_mistral,
    "deepseek": read_deepseek,
    "harmony": read_harmony,
    "gemma": read_gemma,
}


def between(text: str, opening: str, closing: str) -> Iterator[str | None]:
    """Yield what stands between each pair of markers; None where the closing one is missing."""
    for part in text.split(opening)[1:]:
        body, closed, _ = part.partition(closing)
        yield body if closed else None


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Format a call in Hermes format, for templates that do not write calls."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"


def is_bare_call(text: str) -> bool:
    """Whether a whole turn is one JSON object with `name` and `parameters`."""
    text = text.strip()
    return text.startswith("{") and text.endswith("}") and '"name"' in text and '"parameters"' in text


def read_call(body: str) -> ParsedToolCall:
    """Parse one call: a JSON object with a name and arguments."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return ParsedToolCall(error='a call must be JSON such as {"name": "…", "arguments": {…}}')
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ParsedToolCall(error='a call must name a tool: {"name": "…", "arguments": {…}}')
    return checked(call["name"], call.get("arguments", call.get("parameters", {})))


def with_json(name: str, body: str) -> ParsedToolCall:
    """Return the call of a tool whose arguments are JSON."""
    try:
        return checked(name, json.loads(body.strip() or "{}"))
    except (ValueError, RecursionError):
        return ParsedToolCall(name, error="the arguments of a call must be a JSON object")


def checked(name: str, arguments: Any, *, untyped: bool = False) -> ParsedToolCall:
    if not isinstance(arguments, dict):
        return ParsedToolCall(name, error="the arguments of a call must be a JSON object")
    if not is_unicode({"name": name, **{str(key): value for key, value in arguments.items()}}):
        return ParsedToolCall(error="the text of a call must be Unicode")
    return ParsedToolCall(name, arguments, untyped=untyped)
