"""Which grammar an answer must match: `response_format`, forced tool calls (`tool_choice`), strict tools.

A forced call has the format in which the model writes calls, if that is Hermes or a bare JSON object as in
Llama 3. Models of other formats get Hermes, which the server reads from every model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import ConfigError
from groupwise.model.grammar import GrammarError, json_grammar, json_rule, require_llguidance
from groupwise.model.tokenizer import TokenizerCodec
from groupwise.rollout.tool_calls import CLOSE, OPEN
from groupwise.serve.http_server import HTTPError

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
BARE = "llama"
"""The format whose calls are JSON objects without marks around them."""


class CallGrammar:
    """Writes the grammars of tool calls in a model's format."""

    def __init__(self, codec: TokenizerCodec) -> None:
        self.style = codec.tool_format
        added = codec.tokenizer.added_tokens_decoder.items()
        # llguidance takes added tokens such as <tool_call> for special ones, which no text contains.
        self._tags = {kind.content: token for token, kind in added if is_tag(kind.content)}
        self._free = [token for token, kind in added if is_tag(kind.content) and not kind.special]

    def mark(self, tag: str) -> str:
        """Return a tag: the token, if the model has one for it, else the text."""
        return f"<[{self._tags[tag]}]>" if tag in self._tags else text(tag)

    def calls(self, tools: Sequence[Mapping[str, Any]], *, single: bool, answer: str | None = None) -> str:
        """Return the grammar of answers that only call tools; `single`: exactly once.

        `answer`: a rule that the answer may match instead.
        """
        start = "start: calls\n" if answer is None else f"start: calls | answer\nanswer: {answer}\n"
        if self.style == BARE:
            return f"{start}calls: call\n{self._rules(tools)}"
        more = "" if single else f" ({text(chr(10))} marked)*"
        marked = f"{self.mark(OPEN)} {text(chr(10))} call {text(chr(10))} {self.mark(CLOSE)}"
        return f"{start}calls: marked{more}\nmarked: {marked}\n{self._rules(tools)}"

    def calls_in_text(self, tools: Sequence[Mapping[str, Any]], *, single: bool) -> str:
        """Return the grammar of free text with well-formed calls in it."""
        others = ",".join(str(token) for token in self._free if token != self._tags.get(OPEN))
        anything = f"TEXT: /(.|\\n)*/\n{self._rules(tools)}"
        if self.style == BARE:  # a text that does not begin like a call
            plain = f"PLAIN (<[{others}]> TEXT)* | (<[{others}]> TEXT)+" if others else "PLAIN"
            return f"start: call | {plain} |\nPLAIN: /[^{{ \\t\\n](.|\\n)*/\n{anything}"
        tags = f"(TEXT <[{others}]>)* " if others else ""
        opened = "opened: TEXT" if OPEN in self._tags else "opened[lazy]: TEXT"
        calls = f"(opened body){'?' if single else '*'}"
        body = f"{text(chr(10))} call {text(chr(10))} {self.mark(CLOSE)}"
        return f"start: {tags}{calls} TEXT\n{opened} {self.mark(OPEN)}\nbody: {body}\n{anything}"

    def _rules(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the rule `call`: a JSON object that calls one of these tools."""
        key = "parameters" if self.style == BARE else "arguments"
        rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
        for number, tool in enumerate(tools):
            function = tool["function"]
            opening = text(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
            rules.append(f"call_{number}: {opening} arguments_{number} {text('}')}")
            rules.append(f"arguments_{number}: {json_rule(function.get('parameters') or NO_ARGUMENTS)}")
        return "\n".join(rules) + "\n"


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
