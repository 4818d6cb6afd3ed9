"""The tokens that a grammar allows next, as masks computed by llguidance and kept for other answers.

The answers of one grammar share a graph of places. A place has the mask of the next token and, for each token
that has followed, the next place. Only the first answer that reaches a place computes its mask.

Where the grammar permits it (`grammar.has_plain_scalars`), answers meet again after each string, number or
literal. An example, for a schema with a string `a` and a number `n`; P0, P1, … are places:

    {"a": "     P1, which begins a run: any text may follow, up to the limit of the string
    xy          P2 = P1.run.by_written[2], also reached by "z" and "q"; its mask is derived from that of P1
    ", "n":     P3 = P2.after_scalar[b'", "n":'], whatever the string was
    12          P4 = P3.next[token]; P4.after_scalar is that of all numbers that begin at P3
    }           P5 = P4.after_scalar[b"}"], whatever the number was

Bit t % 32 of word t // 32 of a mask belongs to token t. End tokens are allowed where the grammar accepts.
Axes: A answers, K characters, N rows, V tokens, W words of 32 tokens.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from groupwise.model.device import our_cores
from groupwise.model.tokenizer import TokenizerCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NO_LLGUIDANCE = (
    "constrained decoding requires the package llguidance; install it: pip install 'groupwise[structured]'"
)
LARGEST_GRAMMAR = 100_000
"""Symbols of a compiled grammar."""
MOST_LEXER_STATES = 50_000
"""States that computing masks may add, of about 1 kB each."""
MOST_MASK_BYTES = 64 << 20
"""Size of the masks that are kept for one grammar. Beyond it, new answers start an empty graph."""
MOST_THREADS = 16
COPIES_PER_THREAD = 2
"""Copies of a compiled grammar. Answers that share a copy wait for each other's masks."""
SECONDS_FOR_COPIES = 0.25
"""What compiling the copies of one grammar may take; large grammars have fewer."""
IN_STRING = r'[^"\\\x00-\x1F\x7F]'
STRING_PARTS = [f"{IN_STRING}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30)]
SLICES = [r"[\x20\x0A\x0D\x09]+", *STRING_PARTS, f"{IN_STRING}+"]
"""Classes of tokens that llguidance decides as a whole. Its own have up to 10, up to 30 and any number of
characters. With finer ones, the masks in strings of limited length take half the time."""
PROBE = '{"name": "Zoë", "list": [1, -2.5e3], "text": "a b\\n c — 日本"}\n\tend'
"""A text whose tokens llguidance and the model's tokenizer must read alike."""

Mask = NDArray[np.int32]


class GrammarError(ValueError):
    """A grammar or JSON schema that cannot be used; the message says why."""


OUTSIDE, QUOTED, ESCAPED = range(3)
"""Whether a JSON text ends outside of a string, inside, or inside after a backslash."""


class Place:
    """Where answers stand that a grammar continues alike."""

    __slots__ = ("after_scalar", "mask_W", "next", "quoting", "run", "scalars", "written")

    def __init__(self, mask_W: Mask) -> None:
        self.mask_W = mask_W
        """The tokens that may come next."""
        self.next: dict[int, Place] = {}
        """The place after each token that has followed, except for those inside of a run."""
        self.after_scalar: dict[bytes, Place] | None = None
        """Inside of a JSON string, number or literal: the places behind it, by the bytes from its end on. The
        token `xy",` leads to after_scalar[b'",']."""
        self.scalars: dict[bytes, dict[bytes, Place]] = {}
        """`after_scalar` of the numbers and literals that begin in the next token, by the bytes before."""
        self.quoting = OUTSIDE
        self.run: StringRun | None = None
        self.written = 0
        """Characters that the answers have written of the run."""


class StringRun:
    """The text of a JSON string from some place on, which may be any text up to a length.

    Near the end of a string, llguidance needs up to 0.4 ms for a mask: it follows every token that is too
    long. But the mask after more text is the one before, without the tokens that no longer fit.
    """

    __slots__ = ("by_written", "exact", "mask_W", "room")

    def __init__(self, mask_W: Mask, room: int, *, exact: bool) -> None:
        self.mask_W = mask_W
        self.room = room
        """Characters that fit at the beginning of the run; 0: masks cannot be derived."""
        self.exact = exact
        """Whether no more than `room` characters fit."""
        self.by_written: dict[int, Place] = {}
        """The place after so many characters."""


class GrammarState:
    """Where an unfinished answer stands in a grammar."""

    __slots__ = ("copy_index", "failed", "grammar", "matcher", "place", "unread")

    def __init__(self, grammar: TokenGrammar, matcher: LLMatcher, copy_index: int) -> None:
        self.grammar, self.matcher, self.copy_index = grammar, matcher, copy_index
        self.place = grammar.first
        self.unread: list[int] = []
        """Tokens that the matcher gets when a mask must be computed."""
        self.failed = False
        """Whether the grammar needs too much work for this answer; only end tokens are left to it."""


class NewStep(NamedTuple):
    """A token that follows the place of an answer for the first time."""

    state: GrammarState
    token: int
    shelf: dict[Any, Place]
    """Where the place after the token is kept: one of the dictionaries of its place."""
    key: Any


class TokenGrammar:
    """A grammar, compiled for one model's tokens."""

    def __init__(self, text: str, computer: MaskComputer, *, plain_scalars: bool) -> None:
        """`plain_scalars`: whether what may follow a JSON string or number does not depend on its text."""
        self.text, self.computer = text, computer
        self.plain_scalars = plain_scalars and computer.strings is not None
        started = time.perf_counter()
        self._copies: list[LLMatcher] = [self._compiled()]
        """Copies at the start of an answer. Answers that start from one share its caches and its lock."""
        fitting = int(SECONDS_FOR_COPIES / (time.perf_counter() - started))
        # With plain scalars, few masks are computed.
        wanted = 1 if self.plain_scalars else COPIES_PER_THREAD * computer.threads
        self._most_copies = max(1, min(wanted, fitting))
        self._users = [0]
        matcher = self._copies[0].deep_copy()
        first_1W = computer.compute([matcher])
        if matcher.is_error():
            raise GrammarError("no answer can match this grammar")
        self.first = Place(first_1W[0])
        """The place of an answer without tokens."""
        self.kept_bytes = 0

    def _compiled(self) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self.computer.tokenizer, self.text, log_level=0, limits=self.computer.limits)
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
        """Forget an answer that has ended."""
        self._users[state.copy_index] -= 1

    def masks(self, answers: Sequence[Sequence[int]]) -> Mask:
        """Return the masks before each token of these answers, one answer after the other."""
        lengths_A = np.array([len(answer) for answer in answers])
        starts_A = np.cumsum(lengths_A) - lengths_A
        own_NW = np.zeros((int(lengths_A.sum()), self.computer.words), dtype=np.int32)
        copies = np.arange(len(answers)) % len(self._copies)
        states = [GrammarState(self, self._copies[copy].deep_copy(), copy) for copy in copies.tolist()]
        for position in range(int(lengths_A.max(initial=0))):
            for a in np.flatnonzero(lengths_A > position).tolist():
                own_NW[starts_A[a] + position] = states[a].place.mask_W
            going = np.flatnonzero(lengths_A > position + 1).tolist()
            self.computer.advance([(states[a], answers[a][position]) for a in going])
        return own_NW

    def keep(self, shelf: dict[Any, Place], key: Any, place: Place) -> None:
        """Keep a place with a new mask for other answers."""
        shelf[key] = place
        self.kept_bytes += place.mask_W.nbytes
        if self.kept_bytes > MOST_MASK_BYTES:
            self.first, self.kept_bytes = Place(self.first.mask_W), 0


class MaskComputer:
    """Computes the masks of all grammars of a model, and finds the next places of their answers together."""

    def __init__(self, codec: TokenizerCodec, end_tokens: frozenset[int]) -> None:
        if find_spec("llguidance") is None:
            raise GrammarError(NO_LLGUIDANCE)
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

    def advance(self, rows: Sequence[tuple[GrammarState, int]]) -> None:
        """Add a token to each unfinished answer."""
        adds = () if self.strings is None else self.strings.adds
        missing: list[tuple[GrammarState, int]] = []
        for state, token in rows:
            state.unread.append(token)
            before = state.place
            if before.run is not None and adds[token] >= 0:
                place = before.run.by_written.get(before.written + adds[token])
            else:
                place = before.next.get(token)
            if place is None:
                missing.append((state, token))
            else:
                state.place = place
        if missing:
            self._find_places(missing)

    def _find_places(self, rows: Sequence[tuple[GrammarState, int]]) -> None:
        """Find the places after tokens that follow the places of their answers for the first time."""
        steps = [NewStep(state, token, *self._shelf(state.place, token)) for state, token in rows]
        unknown: dict[tuple[int, Any], list[NewStep]] = {}
        for step in steps:
            if step.key not in step.shelf and not self._derive(step):
                unknown.setdefault((id(step.shelf), step.key), []).append(step)
        if unknown:
            self._compute_places(list(unknown.values()))
        for state, token, shelf, key in steps:
            if (place := shelf.get(key)) is not None:  # otherwise its answer has failed
                if state.place.run is None or shelf is not state.place.run.by_written:
                    state.place.next[token] = place
                state.place = place

    def _shelf(self, place: Place, token: int) -> tuple[dict[Any, Place], Any]:
        """Return the dictionary that keeps the place after a token, and the key in it."""
        if place.after_scalar is None:
            return place.next, token
        assert self.strings is not None, "an answer has entered a string or number"
        text, added = self.strings.texts[token], self.strings.adds[token]
        if place.quoting == OUTSIDE:  # a number or literal goes on, or ends
            rest = text.lstrip(UNQUOTED)
            return (place.after_scalar, rest) if rest else (place.next, token)
        if place.run is not None and added >= 0:  # a string goes on
            return place.run.by_written, place.written + added
        _, closed = quoting_after(text, place.quoting)  # a string ends, or a part of a character follows
        return (place.after_scalar, text[closed:]) if closed >= 0 else (place.next, token)

    def _derive(self, step: NewStep) -> bool:
        """Derive the mask after more text of a string, if possible, and keep its place."""
        before, written = step.state.place, step.key
        if (run := before.run) is None or step.shelf is not run.by_written:
            return False
        assert self.strings is not None, "an answer has entered a string"
        room = run.room - written
        # A quote must follow a full string. Of the tokens that begin with it, llguidance then allows one.
        if room <= 0 or not (run.exact or room >= self.strings.longest):
            return False
        all_fit = room >= self.strings.longest
        place = Place(run.mask_W if all_fit else run.mask_W & self.strings.fitting_KW[room])
        place.after_scalar, place.quoting, place.run, place.written = (
            before.after_scalar,
            QUOTED,
            run,
            written,
        )
        if all_fit:
            step.shelf[step.key] = place
        else:
            step.state.grammar.keep(step.shelf, step.key, place)
        return True

    def _compute_places(self, groups: Sequence[Sequence[NewStep]]) -> None:
        """Compute the masks of new places, each once for all the answers that reach it now."""
        # Neighbours share a copy of the grammar, and so a lock; one thread computes them.
        groups = sorted(groups, key=lambda group: group[0].state.copy_index)
        firsts = [group[0].state for group in groups]
        for first in firsts:
            first.matcher.consume_tokens(first.unread)
            first.unread.clear()
        copies = {(id(first.grammar), first.copy_index) for first in firsts}
        masks_NW = self.compute([first.matcher for first in firsts], parallel=len(copies) > 1)
        for group, first, mask_W in zip(groups, firsts, masks_NW, strict=True):
            if first.matcher.is_error():
                for step in group:
                    step.state.place, step.state.failed = Place(self.only_ends_W), True
                continue
            place = Place(mask_W)
            if first.grammar.plain_scalars:
                self._enter_scalar(place, group[0])
            first.grammar.keep(group[0].shelf, group[0].key, place)

    def _enter_scalar(self, place: Place, step: NewStep) -> None:
        """Set which string, number or literal the answers at a new place are writing, if any."""
        strings, before = self.strings, step.state.place
        assert strings is not None, "the grammar has plain scalars"
        text = strings.texts[step.token]
        place.quoting = quoting_after(text, before.quoting)[0]
        any_text = place.quoting == QUOTED and strings.allow_any_text(place.mask_W)
        in_the_same_scalar = before.after_scalar is not None and step.shelf is not before.after_scalar
        if in_the_same_scalar:
            place.after_scalar = before.after_scalar
        elif any_text:
            place.after_scalar = {}
        elif place.quoting == OUTSIDE and text[-1:] in UNQUOTED_BYTES:
            place.after_scalar = before.scalars.setdefault(text.rstrip(UNQUOTED), {})
        if any_text:
            may_end = bool(place.mask_W[strings.quote // 32] >> (strings.quote % 32) & 1)
            room = step.state.matcher.validate_tokens(strings.probe) if may_end else 0
            place.run = StringRun(place.mask_W, room, exact=room < len(strings.probe))

    def compute(self, matchers: Sequence[LLMatcher], *, parallel: bool = False) -> Mask:
        """Return the next mask of each matcher."""
        masks_NW = np.zeros((len(matchers), self.words), dtype=np.int32)
        at, width = masks_NW.ctypes.data, 4 * self.words
        if parallel:
            rows = [(matcher, row) for row, matcher in enumerate(matchers)]
            self.executor.unsafe_compute_mask_ptr(rows, at, width, len(matchers))
        else:
            for row, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(at + row * width, width)
        self._finish(masks_NW)
        return masks_NW

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

    def _finish(self, masks_NW: Mask) -> None:
        """Give every end token the bit of the first, and drop tokens that the model does not have."""
        if self._trimmed:
            last, rest = divmod(self.vocabulary, 32)
            masks_NW[:, last] &= (1 << rest) - 1
            masks_NW[:, last + 1 :] = 0
            masks_NW[~masks_NW.any(axis=1)] = self.only_ends_W
        if len(self.ends) > 1:
            accepted_N = masks_NW[:, self.end // 32] >> (self.end % 32) & 1
            for end in self.ends:
                self._set_bit(masks_NW, end, accepted_N)

    @cached_property
    def only_ends_W(self) -> Mask:
        """The mask that allows the end tokens alone."""
        mask_1W = np.zeros((1, self.words), dtype=np.int32)
        for end in self.ends:
            self._set_bit(mask_1W, end, np.ones(1, dtype=np.int32))
        only_W: Mask = mask_1W[0]
        return only_W

    @staticmethod
    def _set_bit(masks_NW: Mask, token: int, bits_N: NDArray[np.int32]) -> None:
        word, bit = token // 32, np.uint32(1 << token % 32).view(np.int32)
        masks_NW[:, word] = np.where(bits_N != 0, masks_NW[:, word] | bit, masks_NW[:, word] & ~bit)


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


class StringTokens:
    """The text of each token, and what it does inside of a JSON string."""

    TEXT = bytes(set(range(0x20, 0x7F)) - set(b'"\\'))
    """Printable characters that stand for themselves in a string."""

    def __init__(self, texts: Sequence[bytes], tokens: Mapping[bytes, int]) -> None:
        self.texts = texts
        needed = [string_characters(text) for text in texts]
        self.adds = [count if whole else -1 for count, whole in needed]
        """Characters that a token adds to a string; -1: it ends the string, or has a part of a character."""
        needed_V = np.array([count for count, _ in needed])
        self.longest = int(needed_V.max())
        self.fitting_KW = np.stack([packed(needed_V <= k) for k in range(self.longest)])
        """Masks of the tokens that need at most k characters of the string."""
        text_V = np.zeros(len(texts), dtype=np.bool_)
        text_V[[tokens[bytes([byte])] for byte in self.TEXT]] = True
        text_W = packed(text_V)
        self._words = np.flatnonzero(text_W)
        self._wanted = text_W[self._words]
        self.quote = tokens[b'"']
        self.probe = [tokens[b"a"]] * (self.longest + 32)
        """As many of these as a string accepts is the room that it has, if it has less than this many."""

    def allow_any_text(self, mask_W: Mask) -> bool:
        """Whether a mask allows every printable character."""
        return bool(np.all(mask_W[self._words] & self._wanted == self._wanted))


def packed(flags_V: NDArray[np.bool_]) -> Mask:
    """Return flags as bits of 32-bit words."""
    return np.packbits(flags_V, bitorder="little").view(np.int32)


WHOLE = re.compile(r'[^"\\\x00-\x1F\x7F\uD800-\uDFFF]*')
IN_STRING_BYTES = re.compile(rb'(?:\\.?|[^"\\])*', re.DOTALL)
CHARACTER = re.compile(rb"\\u[0-9a-fA-F]{0,4}|\\.?|[^\\\x80-\xbf]", re.DOTALL)
"""A character of a JSON string, escaped or not; bytes that continue a UTF-8 character do not count."""
UNQUOTED = b"+-.0123456789" + bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1))
"""What numbers, true, false and null consist of."""
UNQUOTED_BYTES = frozenset(bytes([byte]) for byte in UNQUOTED)


def string_characters(text: bytes) -> tuple[int, bool]:
    """Return how many characters of a JSON string a token takes, up to a quote that ends the string.

    Also whether all of it is text of the string: no quote, no escape, and no part of a character.
    """
    inside = next(IN_STRING_BYTES.finditer(text))
    # Python marks each byte that is no part of a whole character as a lone surrogate.
    whole = re.fullmatch(WHOLE, text.decode(errors="surrogateescape"))
    return len(CHARACTER.findall(inside[0])), whole is not None


def quoting_after(text: bytes, quoting: int) -> tuple[int, int]:
    """Return whether a JSON text ends inside of a string, and where the string ends in which it begins.

    `quoting` says whether it begins inside. The index is that of the closing quote, -1 if there is none.
    """
    closed, begins_inside = -1, quoting != OUTSIDE
    for index, byte in enumerate(text):
        if quoting == ESCAPED:
            quoting = QUOTED
        elif byte == ord('"'):
            if quoting == QUOTED and begins_inside and closed < 0:
                closed = index
            quoting = OUTSIDE if quoting == QUOTED else QUOTED
        elif byte == ord("\\") and quoting == QUOTED:
            quoting = ESCAPED
    return quoting, closed


def _reason(error: str) -> str:
    """Return the first line of llguidance's message, without the position in the generated grammar."""
    line = error.partition("\n")[0].rstrip(". ")
    for mark in ("failed to compile JSON schema: ", '%json": '):
        line = line.rpartition(mark)[2]
    return f"the schema or grammar is not supported: {line}"
