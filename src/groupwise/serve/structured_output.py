"""Which grammar an answer must match: `response_format`, forced tool calls (`tool_choice`), strict tools.

A forced call has the format in which the model's chat template writes calls. Exceptions: the pythonic format,
whose models also write JSON objects, and Gemma's, whose arguments are JSON here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import ConfigError
from groupwise.model.grammar import json_grammar, json_rule, require_llguidance
from groupwise.model.token_grammar import GrammarError
from groupwise.model.tokenizer import TokenizerCodec
from groupwise.rollout.tool_calls import CLOSE, OPEN
from groupwise.serve.http_server import HTTPError

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
NAME, ARGUMENTS = "⟨name⟩", "⟨arguments⟩"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written; `rollout.tool_calls` reads them."""

    call: str
    """One call, with places for the name and the arguments."""
    before: str = ""
    """Before the first call of a turn."""
    between: str | None = None
    """Between two calls; None: a turn has one call."""
    after: str = ""
    trigger: str = ""
    """What a call in a text is recognized by; empty if that is not possible."""


BARE = CallFormat(call=f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}')
"""A JSON object without marks around it."""
FORMATS = {
    "hermes": CallFormat(
        call=f'{OPEN}\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n{CLOSE}', between="\n", trigger=OPEN
    ),
    "qwen_xml": CallFormat(
        call=f"{OPEN}\n<function={NAME}>\n{ARGUMENTS}</function>\n{CLOSE}", between="\n", trigger=OPEN
    ),
    "llama": BARE,
    "pythonic": BARE,
    "mistral": CallFormat(
        before="[TOOL_CALLS][",
        call=f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}',
        between=", ",
        after="]",
        trigger="[TOOL_CALLS]",
    ),
    "deepseek": CallFormat(
        before="<｜tool▁calls▁begin｜>",
        call=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        between="",
        after="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    "harmony": CallFormat(call=f"<|channel|>commentary to=functions.{NAME} json<|message|>{ARGUMENTS}"),
    "gemma": CallFormat(
        call=f"<start_function_call>call:{NAME}{ARGUMENTS}<end_function_call>",
        between="",
        trigger="<start_function_call>",
    ),
}


class CallGrammar:
    """Writes the grammars of tool calls in a model's format."""

    def __init__(self, codec: TokenizerCodec) -> None:
        self.style = codec.tool_format
        self.format = FORMATS[self.style]
        added = codec.tokenizer.added_tokens_decoder.items()
        # llguidance takes added tokens such as <tool_call> for special ones, which no text contains.
        special = {token: kind for token, kind in added if kind.special or is_tag(kind.content)}
        self._marks = {kind.content: token for token, kind in special.items()}
        self._free = [token for token, kind in special.items() if not kind.special]

    def calls(self, tools: Sequence[Mapping[str, Any]], *, single: bool, answer: str | None = None) -> str:
        """Return the grammar of answers that only call tools; `single`: exactly once.

        `answer`: a rule that the answer may match instead.
        """
        start = "start: calls\n" if answer is None else f"start: calls | answer\nanswer: {answer}\n"
        return f"{start}calls: {self._turn('', single=single)}\n{self._rules(tools)}"

    def calls_in_text(self, tools: Sequence[Mapping[str, Any]], *, single: bool) -> str | None:
        """Return the grammar of text with well-formed calls; None if a call has no clear beginning."""
        trigger = self.format.trigger
        others = ",".join(str(token) for token in self._free if token != self._marks.get(trigger))
        anything = f"TEXT: /(.|\\n)*/\n{self._rules(tools)}"
        if self.format is BARE:  # a text that does not begin like a call
            plain = f"PLAIN (<[{others}]> TEXT)* | (<[{others}]> TEXT)+" if others else "PLAIN"
            return f"start: call | {plain} |\nPLAIN: /[^{{ \\t\\n](.|\\n)*/\n{anything}"
        if not trigger:
            return None
        tags = f"(TEXT <[{others}]>)* " if others else ""
        opened = "opened: TEXT" if trigger in self._marks else "opened[lazy]: TEXT"
        body = self._turn(trigger, single=single)
        start = f"start: {tags}(opened body)? TEXT\n{opened} {self._write(trigger)}\nbody: {body}\n"
        return f"{start}{anything}"

    def _turn(self, opened: str, *, single: bool) -> str:
        """Return the right-hand side of a turn with calls, of which `opened` has been written."""
        style = self.format
        before, first = style.before.removeprefix(opened), "call"
        if opened and not style.before:
            first = "rest"
        more = f" ({self._write(style.between)} call)*" if style.between is not None and not single else ""
        return f"{self._write(before)} {first}{more} {self._write(style.after)}"

    def _rules(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the rules `call`, one call of a tool, and `rest`, the same after the trigger."""
        numbers = range(len(tools))
        rules = ["call: " + " | ".join(f"call_{number}" for number in numbers)]
        rules.append("rest: " + " | ".join(f"rest_{number}" for number in numbers))
        for number, tool in enumerate(tools):
            function = tool["function"]
            # The name may stand in a JSON string.
            whole = self.format.call.replace(NAME, json.dumps(function["name"])[1:-1])
            for rule, written in (("call", whole), ("rest", whole.removeprefix(self.format.trigger))):
                opening, _, closing = written.partition(ARGUMENTS)
                parts = f"{self._write(opening)} arguments_{number} {self._write(closing)}"
                rules.append(f"{rule}_{number}: {parts}")
            schema = function.get("parameters") or NO_ARGUMENTS
            rules += (
                self._tagged(number, schema)
                if self.style == "qwen_xml"
                else [f"arguments_{number}: {json_rule(schema)}"]
            )
        return "\n".join(rules) + "\n"

    def _tagged(self, number: int, schema: Mapping[str, Any]) -> list[str]:
        """Return the rule of arguments in Qwen's XML: texts as they are, other values as JSON, in order."""
        names, rules, required = [], [], schema.get("required") or ()
        for place, (name, kind) in enumerate((schema.get("properties") or {}).items()):
            rule, kind = f"value_{number}_{place}", kind if isinstance(kind, Mapping) else {}
            names.append(rule if name in required else f"{rule}?")
            opening, closing = text(f"<parameter={name}>\n"), text("\n</parameter>\n")
            if kind.get("type") == "string" and "enum" not in kind and "const" not in kind:
                rules += [f"{rule}: {opening} {rule}_text", f"{rule}_text[lazy]: /(.|\\n)*/ {closing}"]
            elif all(isinstance(one, str) for one in kind.get("enum") or [0]):
                rules.append(f"{rule}: {opening} ({' | '.join(map(text, kind['enum']))}) {closing}")
            else:
                own = {**kind, **{key: schema[key] for key in ("$defs", "definitions") if key in schema}}
                rules.append(f"{rule}: {opening} {rule}_json {closing}\n{rule}_json: {json_rule(own)}")
        return [f"arguments_{number}: {' '.join(names)}", *rules]

    def _write(self, literal: str) -> str:
        """Return a text as a sequence of strings and of special tokens, where the model has them."""
        marks = sorted((mark for mark in self._marks if mark in literal), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", literal) if marks else [literal]
        return " ".join(f"<[{self._marks[one]}]>" if one in marks else text(one) for one in pieces if one)


def is_tag(content: str) -> bool:
    return content.startswith("<") and content.endswith(">")


def text(literal: str) -> str:
    """Return a string of the grammar."""
    return json.dumps(literal, ensure_ascii=False)


def answer_grammar(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], codec: TokenizerCodec
) -> str | None:
    """Return the grammar that the answers to a request must match; None if they are free."""
    try:
        schema = read_format(body.get("response_format"))
        called = forced_tools(body.get("tool_choice"), tools)
        single = body.get("parallel_tool_calls") is False or isinstance(body.get("tool_choice"), Mapping)
        strict = any(tool["function"].get("strict") for tool in tools)
        if not called and schema is None and not strict:
            return None
        require_llguidance()
        if called:
            return CallGrammar(codec).calls(called, single=single)
        if schema is None:
            return CallGrammar(codec).calls_in_text(tools, single=single)
        if tools:
            return CallGrammar(codec).calls(tools, single=single, answer=json_rule(schema))
        return json_grammar(schema)
    except (GrammarError, ConfigError) as error:
        raise HTTPError(400, str(error)) from None


def read_format(wanted: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema of a `response_format`; None: the answer is text."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise HTTPError(400, "response_format must have the type text, json_object or json_schema")
    named = wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise HTTPError(400, "response_format must be {type: json_schema, json_schema: {name, schema}}")
    return schema


def forced_tools(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the tools of which the answer must call one; none if it may answer otherwise."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not tools:
            raise HTTPError(400, "tool_choice: required needs tools")
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise HTTPError(
            400, "tool_choice must be auto, none, required or {type: function, function: {name: …}}"
        )
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise HTTPError(400, f"tool_choice names {name!r}, which is not in tools")
    return named
