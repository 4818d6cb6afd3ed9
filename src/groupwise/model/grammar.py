"""Constrained decoding: grammars and JSON schemas that restrict which token may come next, by llguidance.

A grammar is a text in llguidance's dialect of Lark. `json_grammar` makes one from a JSON schema. The tokens
that it allows depend on the answer's tokens so far and on nothing else. The sampler and the trainer therefore
compute the same masks, and the trained log-probabilities account for them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.model.token_grammar import NO_LLGUIDANCE, GrammarError, MaskComputer, TokenGrammar
from groupwise.model.tokenizer import TokenizerCodec

LONGEST_SCHEMA = 64 * 1024
"""Characters of a JSON schema; longer ones may take many seconds to compile."""
COUNTS, MOST_ITEMS = ("minItems", "maxItems", "minProperties", "maxProperties"), 2000
"""Bounds on the items of an array, and the largest: each item up to a bound is a rule of the grammar."""
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Free whitespace would let a weak model write line breaks without end."""
MOST_GRAMMARS = 64
"""Compiled grammars that are kept."""


def require_llguidance() -> None:
    if find_spec("llguidance") is None:
        raise ConfigError(NO_LLGUIDANCE)


def rollout_grammar(config: Config, *, multi_turn: bool = False) -> str | None:
    """Return the grammar that the settings of a run name; raise ConfigError if it cannot be used."""
    schema, grammar = config.rollout.json_schema, config.rollout.grammar
    if schema is None and grammar is None:
        return None
    name = "rollout.json_schema" if grammar is None else "rollout.grammar"
    if schema is not None and grammar is not None:
        raise ConfigError("rollout.json_schema and rollout.grammar exclude each other; set one of them")
    if config.engine.kind != "own":
        raise ConfigError(f"{name} requires groupwise's own engine; set engine.kind=own")
    if multi_turn:
        raise ConfigError(f"{name} requires a task of one turn; this one has tools, turns or an agent")
    require_llguidance()
    if schema is None:
        return grammar if grammar is not None and "\n" in grammar else _text_of(name, grammar or "", "start:")
    try:
        return json_grammar(json.loads(_text_of(name, schema, "{")))
    except ValueError as error:
        raise ConfigError(f"{name} is not a JSON schema: {error}") from error


def _text_of(name: str, value: str, opening: str) -> str:
    """Return a text that is given as it is, recognized by its opening, or in a file."""
    if value.lstrip().startswith(opening):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{name} must be a file, or a text that begins with {opening}; got {value[:60]!r}"
        ) from error


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the right-hand side of a rule that a JSON value of this schema matches."""
    if not isinstance(schema, Mapping):
        raise GrammarError("a JSON schema must be an object")
    for name, value in _keywords(schema):
        if name in COUNTS and isinstance(value, int) and value > MOST_ITEMS:
            raise GrammarError(f"{name} may be at most {MOST_ITEMS} in a JSON schema; got {value}")
    text = json.dumps({**schema, "x-guidance": LAYOUT})
    if len(text) > LONGEST_SCHEMA:
        raise GrammarError(
            f"the JSON schema has {len(text)} characters; at most {LONGEST_SCHEMA} are supported"
        )
    return f"%json {text}"


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON values that match a schema."""
    return f"start: {json_rule(schema)}\n"


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of a schema with its value, at any depth."""
    open_values = [schema]
    while open_values:
        value = open_values.pop()
        if isinstance(value, Mapping):
            yield from value.items()
            open_values += value.values()
        elif isinstance(value, list):
            open_values += value


def compiled_grammar(
    config: Config, codec: TokenizerCodec, end_tokens: frozenset[int]
) -> TokenGrammar | None:
    """Return the grammar of a run's settings, compiled for its policy; None if they name none."""
    if (text := rollout_grammar(config)) is None:
        return None
    try:
        return GrammarCompiler(codec, end_tokens).compile(text)
    except GrammarError as error:
        name = "rollout.json_schema" if config.rollout.grammar is None else "rollout.grammar"
        raise ConfigError(f"{name}: {error}") from error


class GrammarCompiler:
    """Compiles grammars for one model's tokens, and keeps the last ones."""

    def __init__(self, codec: TokenizerCodec, end_tokens: frozenset[int]) -> None:
        self._codec, self._end_tokens = codec, end_tokens
        self._kept: dict[str, TokenGrammar] = {}
        self._lock = threading.Lock()

    def compile(self, text: str) -> TokenGrammar:
        """Return the compiled grammar; raise GrammarError if it cannot be used."""
        with self._lock:
            if (grammar := self._kept.pop(text, None)) is None:
                grammar = TokenGrammar(text, self._computer, plain_scalars=has_plain_scalars(text))
            self._kept[text] = grammar  # the last one used is the last one dropped
            while len(self._kept) > MOST_GRAMMARS:
                del self._kept[next(iter(self._kept))]
        return grammar

    @cached_property
    def _computer(self) -> MaskComputer:
        return MaskComputer(self._codec, self._end_tokens)


STRUCTURE = {
    *("$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default", "definitions"),
    *("description", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems"),
    *("maxLength", "maximum", "minItems", "minLength", "minimum", "multipleOf", "oneOf", "properties"),
    *("required", "title", "type", "x-guidance"),
}
"""Keywords of schemas whose strings have any text up to a length, or are one of a few values."""
MOST_VALUES = 50
"""Values of an enum: so few cannot begin with every printable character."""


def has_plain_scalars(grammar: str) -> bool:
    """Whether what may follow a string or number of a JSON grammar does not depend on its text.

    Strings have any text up to a length, or are one of a few values. Of the alternatives at a place, at most
    one is such a string and at most one is an object or array.
    """
    try:
        return _is_plain(json.loads(grammar.removeprefix("start: %json ")))
    except (ValueError, TypeError, AttributeError, RecursionError):  # another grammar, or an odd schema
        return False


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or set(schema) - STRUCTURE:
        return False
    types, branches = _types(schema), [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    kinds = [
        _types(branch) or {"string", *([] if _has_values(branch) else ["object"])} for branch in branches
    ]
    possible = (
        bool({"type", "enum", "const", "anyOf", "oneOf", "$ref"} & set(schema))
        and len(values) <= MOST_VALUES
        and not any(isinstance(value, (list, dict)) for value in values)
        and not ("object" in types and schema.get("additionalProperties") is not False)
        and not ("array" in types and "items" not in schema)
        and not (types and branches)
        and sum("string" in kind for kind in kinds) <= 1
        and sum(bool(kind & {"object", "array"}) for kind in kinds) <= 1
    )
    named = (schema.get(key, {}).values() for key in ("properties", "$defs", "definitions"))
    items = [schema["items"]] if "items" in schema else []
    return possible and all(map(_is_plain, (*branches, *items, *chain.from_iterable(named))))


def _has_values(schema: Any) -> bool:
    return isinstance(schema, Mapping) and bool({"enum", "const"} & set(schema))


def _types(schema: Any) -> set[str]:
    kind = schema.get("type", ()) if isinstance(schema, Mapping) else ()
    return {kind} if isinstance(kind, str) else set(kind)
