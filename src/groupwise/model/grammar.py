"""Constrained decoding: grammars and JSON schemas that restrict which token may come next, by llguidance.

A grammar is a text in llguidance's dialect of Lark. `json_grammar` makes one from a JSON schema. The tokens
that it allows depend on the answer's tokens so far and on nothing else. The sampler and the trainer therefore
compute the same masks, and the trained log-probabilities account for them.

A mask has one bit per token: bit t % 32 of word t // 32 belongs to token t. End tokens are allowed exactly
where the grammar accepts the answer.

Axes: N rows, W words of 32 tokens.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.model.device import our_cores
from groupwise.model.tokenizer import TokenizerCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MISSING = (
    "constrained decoding requires the package llguidance; install it: pip install 'groupwise[structured]'"
)
LONGEST_SCHEMA = 64 * 1024
"""Characters of a JSON schema; longer ones may take many seconds to compile."""
COUNTS, MOST_ITEMS = ("minItems", "maxItems", "minProperties", "maxProperties"), 2000
"""Bounds on the items of an array, and the largest: each item up to a bound is a rule of the grammar."""
LARGEST_GRAMMAR = 100_000
"""Symbols of a compiled grammar."""
MOST_LEXER_STATES = 50_000
"""States that computing masks may add, of about 1 kB each."""
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Free whitespace would let a weak model write line breaks without end."""
MOST_GRAMMARS = 64
"""Compiled grammars that are kept."""
MOST_THREADS = 16
COPIES_PER_THREAD = 2
"""Copies of a compiled grammar. Sequences that share a copy wait for each other's masks."""
SECONDS_FOR_COPIES = 0.25
"""What compiling the copies of one grammar may take; large grammars have fewer."""
IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{IN_STRING}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30)),
    f"{IN_STRING}+",
]
"""Classes of tokens that llguidance decides as a whole. Its own have up to 10, up to 30 and any number of
characters. With finer ones, the masks in strings of limited length take half the time."""


class GrammarError(ValueError):
    """A grammar or JSON schema that cannot be used; the message says why."""


def require_llguidance() -> None:
    if find_spec("llguidance") is None:
        raise ConfigError(MISSING)


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
                grammar = TokenGrammar(text, self._tokens)
            self._kept[text] = grammar  # the last one used is the last one dropped
            while len(self._kept) > MOST_GRAMMARS:
                del self._kept[next(iter(self._kept))]
        return grammar

    @cached_property
    def _tokens(self) -> GrammarTokens:
        return GrammarTokens(self._codec, self._end_tokens)


PROBE = '{"name": "Zoë", "list": [1, -2.5e3], "text": "a b\\n c — 日本"}\n\tend'
"""A text whose tokens llguidance and the model's tokenizer must read alike."""


def _readable_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a fast tokenizer as llguidance understands them.

    llguidance takes a chain of decoders with byte fallback for sentencepiece. Some versions of transformers
    write such a chain before a byte-level decoder when they read a GGUF file.
    """
    decoder = settings.get("decoder") or {}
    chain = decoder.get("decoders", [])
    byte_level = next((one for one in chain if one["type"] == "ByteLevel"), None)
    if byte_level is not None:
        settings = {**settings, "decoder": byte_level, "model": {**settings["model"], "byte_fallback": False}}
    return {**settings, "padding": None, "truncation": None}


class GrammarTokens:
    """A model's tokens as llguidance reads them, and the threads that compute masks."""

    def __init__(self, codec: TokenizerCodec, end_tokens: frozenset[int]) -> None:
        if find_spec("llguidance") is None:
            raise GrammarError(MISSING)
        from llguidance import LLExecutor, LLParserLimits, LLTokenizer

        backend = getattr(codec.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GrammarError("constrained decoding requires a model with a fast tokenizer (tokenizer.json)")
        if not end_tokens:
            raise GrammarError("constrained decoding requires a model with an end token")
        settings = _readable_settings(json.loads(backend.to_str()))
        self.ends = sorted(end_tokens)
        own = codec.tokenizer.eos_token_id
        self.end = own if own in end_tokens else self.ends[0]
        self.vocabulary = codec.vocabulary
        self._size = size = max(codec.vocabulary, len(codec.tokenizer))
        self._trimmed = size > codec.vocabulary
        self.words = -(-size // 32)
        try:
            self.tokenizer: LLTokenizer = LLTokenizer(
                json.dumps(settings), n_vocab=size, eos_token=self.end, slices=SLICES
            )
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise GrammarError(f"llguidance cannot read the model's tokenizer: {reason}") from error
        self._check_tokens(codec)
        # The limits on the work for one mask are llguidance's own, about 15 ms.
        self.limits = LLParserLimits(
            max_grammar_size=LARGEST_GRAMMAR, max_lexer_states=MOST_LEXER_STATES, verbose_errors=False
        )
        self.threads = max(1, min(MOST_THREADS, len(our_cores()) * 3 // 4))
        self.executor = LLExecutor(num_threads=self.threads)

    @cached_property
    def strings(self) -> StringTokens | None:
        """What the tokens do inside of JSON strings; None if the vocabulary lacks single characters."""
        texts = [self.tokenizer.decode_bytes([token]) for token in range(self._size)]
        tokens = {text: token for token, text in reversed(list(enumerate(texts)))}
        if not all(bytes([byte]) in tokens for byte in StringTokens.TEXT):
            return None
        return StringTokens([*texts, *[b""] * (32 * self.words - self._size)], tokens)

    def advance(self, rows: Sequence[MaskRow], masks_SW: NDArray[np.int32]) -> list[int]:
        """Add a token to each state and compute its next mask.

        Return the slots whose grammar needs too much work; only end tokens are left to them.
        """
        # Rows that share a copy of a grammar share a lock. Neighbours are computed by one thread.
        rows = sorted(rows, key=lambda row: row[0].copy)
        self.executor.consume_token_par([(state.matcher, token) for state, _, token in rows])
        rows = [row for row in rows if not self._follow_string(*row, masks_SW)]
        if not rows:
            return []
        matchers = [(state.matcher, slot) for state, slot, _ in rows]
        self.executor.unsafe_compute_mask_ptr(matchers, masks_SW.ctypes.data, 4 * self.words, len(masks_SW))
        self.finish_masks(masks_SW)
        failed = [slot for state, slot, _ in rows if state.matcher.is_error()]
        if failed:
            masks_SW[failed] = self.only_ends_W
        self._enter_strings([row for row in rows if row[0].grammar.plain_strings], masks_SW)
        return failed

    def _follow_string(self, state: GrammarState, slot: int, token: int, masks_SW: NDArray[np.int32]) -> bool:
        """Derive the mask after one more token inside of a JSON string; False if it must be computed."""
        if state.left is None:
            return False
        assert self.strings is not None, "`_enter_strings` has used them"
        inside = self.strings.inside[token]
        left, state.left = state.left - inside, None
        # In a full string, the next bytes are certain, and llguidance allows only their usual first token.
        if inside < 0 or left == 0 or not (state.exact or left >= self.strings.longest):
            return False
        state.left = left
        if left < self.strings.longest:
            masks_SW[slot] &= self.strings.fitting_KW[left]
        return True

    def _enter_strings(self, rows: Sequence[MaskRow], masks_SW: NDArray[np.int32]) -> None:
        """Find the states that are inside of a JSON string, and how many characters it may still get."""
        if not rows or self.strings is None:
            return
        inside_N = self.strings.allow_any_text(masks_SW[[slot for _, slot, _ in rows]])
        for (state, _, _), inside in zip(rows, inside_N.tolist(), strict=True):
            if inside:
                state.left = state.matcher.validate_tokens(self.strings.probe)
                state.exact = state.left < len(self.strings.probe)

    def _check_tokens(self, codec: TokenizerCodec) -> None:
        """Raise GrammarError if llguidance reads other text from tokens than the model's tokenizer does."""
        encoded = codec.tokenizer.encode(PROBE, add_special_tokens=False)
        tokens = [token for token in encoded if token != codec.tokenizer.unk_token_id]
        text, read = codec.decode(tokens), self.tokenizer.decode_bytes(tokens)
        # A sentencepiece tokenizer drops the space that it puts before a text.
        if read.decode("utf-8", "replace").strip() != text.strip():
            raise GrammarError(
                "llguidance reads the model's tokens differently from the model's tokenizer; constrained "
                "decoding is not supported with this model"
            )

    def finish_masks(self, masks_NW: NDArray[np.int32]) -> None:
        """Give every end token the bit of the first, and drop tokens that the model does not have."""
        if self._trimmed:
            last, rest = divmod(self.vocabulary, 32)
            masks_NW[:, last] &= (1 << rest) - 1
            masks_NW[:, last + 1 :] = 0
            masks_NW[~masks_NW.any(axis=1)] = self.only_ends_W
        if len(self.ends) > 1:
            accepted_N = masks_NW[:, self.end // 32] >> (self.end % 32) & 1
            for end in self.ends:
                self._set(masks_NW, end, accepted_N)

    @cached_property
    def only_ends_W(self) -> NDArray[np.int32]:
        """The mask that allows the end tokens alone."""
        mask_1W = np.zeros((1, self.words), dtype=np.int32)
        for end in self.ends:
            self._set(mask_1W, end, np.ones(1, dtype=np.int32))
        only_W: NDArray[np.int32] = mask_1W[0]
        return only_W

    @staticmethod
    def _set(masks_NW: NDArray[np.int32], token: int, bits_N: NDArray[np.int32]) -> None:
        word, bit = token // 32, np.uint32(1 << token % 32).view(np.int32)
        masks_NW[:, word] = np.where(bits_N != 0, masks_NW[:, word] | bit, masks_NW[:, word] & ~bit)


class TokenGrammar:
    """A grammar, compiled for one model's tokens."""

    def __init__(self, text: str, tokens: GrammarTokens) -> None:
        self.text, self.tokens = text, tokens
        started = time.perf_counter()
        self._copies: list[LLMatcher] = [self._compiled()]
        """Copies at the start of an answer. Sequences that start from one share its caches and its lock."""
        self.plain_strings = has_plain_strings(text)
        fitting = int(SECONDS_FOR_COPIES / (time.perf_counter() - started))
        self._most_copies = max(1, min(COPIES_PER_THREAD * tokens.threads, fitting))
        self._users = [0]
        first_1W = np.zeros((1, tokens.words), dtype=np.int32)
        matcher = self._copies[0].deep_copy()
        tokens.executor.unsafe_compute_mask_ptr([(matcher, 0)], first_1W.ctypes.data, 4 * tokens.words, 1)
        if matcher.is_error():
            raise GrammarError("no answer can match this grammar")
        tokens.finish_masks(first_1W)
        self.first_W = first_1W[0]
        """The mask of an answer's first token."""

    def _compiled(self) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self.tokens.tokenizer, self.text, log_level=0, limits=self.tokens.limits)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return matcher

    def start(self) -> GrammarState:
        """Return the state of an answer without tokens."""
        copy = int(np.argmin(self._users))
        if self._users[copy] and len(self._copies) < self._most_copies:
            copy = len(self._copies)
            self._copies.append(self._compiled())
            self._users.append(0)
        self._users[copy] += 1
        return GrammarState(self, self._copies[copy].deep_copy(), copy)

    def leave(self, state: GrammarState) -> None:
        """Forget a state that has ended."""
        self._users[state.copy] -= 1

    def masks(self, answers: Sequence[Sequence[int]]) -> NDArray[np.int32]:
        """Return the masks before each token of these answers, one answer after the other."""
        lengths_A = np.array([len(answer) for answer in answers])
        starts_A = np.cumsum(lengths_A) - lengths_A
        own_NW = np.zeros((int(lengths_A.sum()), self.tokens.words), dtype=np.int32)
        masks_AW = np.tile(self.first_W, (len(answers), 1))
        copies = np.arange(len(answers)) % len(self._copies)
        states = [GrammarState(self, self._copies[copy].deep_copy(), copy) for copy in copies.tolist()]
        for place in range(int(lengths_A.max(initial=0))):
            here = np.flatnonzero(lengths_A > place)
            own_NW[starts_A[here] + place] = masks_AW[here]
            if going := np.flatnonzero(lengths_A > place + 1).tolist():
                self.tokens.advance([(states[a], a, answers[a][place]) for a in going], masks_AW)
        return own_NW


class GrammarState:
    """What an unfinished answer allows next."""

    __slots__ = ("copy", "exact", "grammar", "left", "matcher")

    def __init__(self, grammar: TokenGrammar, matcher: LLMatcher, copy: int) -> None:
        self.grammar, self.matcher, self.copy = grammar, matcher, copy
        self.left: int | None = None
        """Characters that fit into the JSON string that is being written; None: in no string, or unknown."""
        self.exact = False
        """Whether no more than `left` characters fit."""


class StringTokens:
    """What each token does inside of a JSON string.

    Near the end of a string of limited length, llguidance needs up to 0.4 ms for a mask: it follows every
    token that is too long. But the mask after more text is the one before, without the tokens that no longer
    fit. This holds for strings that may have any text up to a length (`has_plain_strings`).
    """

    TEXT = bytes(set(range(0x20, 0x7F)) - {ord("\\")})
    """Printable characters, and the quote that ends a string."""

    def __init__(self, texts: Sequence[bytes], tokens: Mapping[bytes, int]) -> None:
        needed = [string_characters(text) for text in texts]
        self.inside = [count if whole else -1 for count, whole in needed]
        """Characters that a token adds to a string; -1: it ends the string, or has a part of a character."""
        needed_V = np.array([count for count, _ in needed])
        self.longest = int(needed_V.max())
        self.fitting_KW = np.stack([packed(needed_V <= k) for k in range(self.longest)])
        """Masks of the tokens that need at most k characters of the string."""
        text_V = np.zeros(len(texts), dtype=np.bool_)
        text_V[[tokens[bytes([byte])] for byte in self.TEXT]] = True
        self._text_W = packed(text_V)
        self._words = np.flatnonzero(self._text_W)
        self.probe = [tokens[b"a"]] * (self.longest + 32)

    def allow_any_text(self, masks_NW: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether masks allow every printable character and the end of a string."""
        wanted = self._text_W[self._words]
        return np.asarray(np.all(masks_NW[:, self._words] & wanted == wanted, axis=1))


def packed(flags_V: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return flags as bits of 32-bit words."""
    return np.packbits(flags_V, bitorder="little").view(np.int32)


WHOLE = re.compile(r'[^"\\\x00-\x1F\x7F\uD800-\uDFFF]*')
IN_STRING_BYTES = re.compile(rb'(?:\\.?|[^"\\])*', re.DOTALL)
CHARACTER = re.compile(rb"\\u[0-9a-fA-F]{0,4}|\\.?|[^\\\x80-\xbf]", re.DOTALL)
"""A character of a JSON string, escaped or not; bytes that continue a UTF-8 character do not count."""


def string_characters(text: bytes) -> tuple[int, bool]:
    """Return how many characters of a JSON string a token takes, up to a quote that ends the string.

    Also whether it lies inside of the string as a whole: no quote, no escape, and no part of a character.
    """
    inside = next(IN_STRING_BYTES.finditer(text))
    # Python marks each byte that is no part of a whole character as a lone surrogate.
    whole = re.fullmatch(WHOLE, text.decode(errors="surrogateescape"))
    return len(CHARACTER.findall(inside[0])), whole is not None


MaskRow = tuple[GrammarState, int, int]
"""A state, the slot of its mask, and the token that it gets."""
STRUCTURE = {
    *("$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default", "definitions"),
    *("description", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems"),
    *("maxLength", "maximum", "minItems", "minLength", "minimum", "multipleOf", "oneOf", "properties"),
    *("required", "title", "type", "x-guidance"),
}
"""Keywords of schemas whose strings have any text up to a length, or are one of a few values."""
MOST_VALUES = 50
"""Values of an enum: so few cannot begin with every printable character."""


def has_plain_strings(grammar: str) -> bool:
    """Whether every string of a JSON grammar has any text up to a length, or one of a few values.

    At most one kind of string may be possible at each place: no alternatives that differ in their strings.
    """
    try:
        return _is_plain(json.loads(grammar.removeprefix("start: %json ")))
    except (ValueError, TypeError, AttributeError, RecursionError):  # another grammar, or an odd schema
        return False


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or set(schema) - STRUCTURE:
        return False
    types, branches = _types(schema), [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    possible = (
        bool({"type", "enum", "const", "anyOf", "oneOf", "$ref"} & set(schema))
        and len(schema.get("enum", ())) <= MOST_VALUES
        and not ("object" in types and schema.get("additionalProperties") is not False)
        and not ("array" in types and "items" not in schema)
        and not (types and branches)
        and sum("string" in (_types(one) or {"string"}) for one in branches) <= 1
    )
    named = (schema.get(key, {}).values() for key in ("properties", "$defs", "definitions"))
    items = [schema["items"]] if "items" in schema else []
    return possible and all(map(_is_plain, (*branches, *items, *chain.from_iterable(named))))


def _types(schema: Any) -> set[str]:
    kind = schema.get("type", ()) if isinstance(schema, Mapping) else ()
    return {kind} if isinstance(kind, str) else set(kind)


def _reason(error: str) -> str:
    """Return the first line of llguidance's message, without the position in the generated grammar."""
    line = error.partition("\n")[0].rstrip(". ")
    for mark in ("failed to compile JSON schema: ", '%json": '):
        line = line.rpartition(mark)[2]
    return f"the schema or grammar is not supported: {line}"
