"""Grammars on tokenizers of different kinds: what they allow is what the tokens decode to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from groupwise.errors import ConfigError
from groupwise.model import grammar as module
from groupwise.model import token_grammar
from groupwise.model.grammar import GrammarCompiler, has_plain_scalars, json_grammar, require_llguidance
from groupwise.model.token_grammar import GrammarError, TokenGrammar, quoting_after, string_characters
from groupwise.model.tokenizer import TokenizerCodec
from tests.support.small_models import VOCABULARY, tiny_tokenizer, with_more_tokens

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 5},
        "list": {"type": "array", "items": {"type": ["integer", "null"], "minimum": -9}, "maxItems": 2},
    },
    "required": ["text", "list"],
    "additionalProperties": False,
}


def sentencepiece_tokenizer() -> Any:
    """Characters with ▁ for a space, pieces of several, and bytes for the rest, as Llama 2 and Gemma have."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)] + ['"text', '":', '▁"', '",', "▁[", "]}", "▁list", "é"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    raw = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


def mixed_tokenizer() -> Any:
    """Bytes as characters, with decoders of sentencepiece before that of bytes, as some GGUF files yield."""
    raw = tokenizers.Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    chain = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    raw.decoder = decoders.Sequence(chain)
    raw.model.byte_fallback = True
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=tiny_tokenizer().eos_token)


def written(codec: TokenizerCodec, compiled: TokenGrammar, seed: int) -> list[int]:
    """An answer in which every allowed token is equally likely, by the masks that the trainer computes."""
    random, tokens = np.random.default_rng(seed), [0] * 0
    while True:
        mask_W = compiled.masks([[*tokens, 0]])[-1]
        allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        assert max(allowed) < codec.vocabulary
        tokens.append(int(random.choice(allowed)))
        if tokens[-1] in compiled.computer.ends:
            return tokens


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary"),
    [
        (tiny_tokenizer(), VOCABULARY),
        (with_more_tokens(), VOCABULARY),
        (with_more_tokens(), 269),
        (sentencepiece_tokenizer(), 400),
        (mixed_tokenizer(), VOCABULARY),
    ],
    ids=["bytes", "added tokens", "fewer rows than tokens", "sentencepiece", "decoders of both kinds"],
)
def test_every_answer_decodes_to_valid_json(tokenizer, vocabulary):
    codec = TokenizerCodec(tokenizer, vocabulary=vocabulary)
    ends = frozenset({tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")})
    compiled = GrammarCompiler(codec, ends).compile(json_grammar(SCHEMA))
    last = set()
    for seed in range(8):
        *tokens, end = written(codec, compiled, seed)
        last.add(end)
        value = json.loads(codec.decode(tokens))
        assert list(value) == ["text", "list"]
        assert len(value["text"]) <= 5
        assert all(item is None or item >= -9 for item in value["list"])
    assert last == ends  # a model may have several


def test_a_token_that_ends_the_turn_is_excluded_inside_an_answer():
    tokenizer = tiny_tokenizer()
    codec, letter = TokenizerCodec(tokenizer, vocabulary=VOCABULARY), tokenizer.convert_tokens_to_ids("a")
    compiled = GrammarCompiler(codec, frozenset({tokenizer.eos_token_id, letter})).compile("start: /[a-c]b+/")
    masks_NW = compiled.masks(
        [tokenizer("cb", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]]
    )
    allowed = [
        set(np.flatnonzero(row).tolist())
        for row in np.unpackbits(masks_NW.view(np.uint8), axis=1, bitorder="little")
    ]
    b, c = (tokenizer.convert_tokens_to_ids(name) for name in "bc")
    assert allowed == [{b, c}, {b}, {b, letter, tokenizer.eos_token_id}]


def test_what_cannot_be_used_is_a_sentence(monkeypatch):
    tokenizer = tiny_tokenizer()
    codec = TokenizerCodec(tokenizer, vocabulary=VOCABULARY)
    with pytest.raises(GrammarError, match="requires a model with an end token"):
        GrammarCompiler(codec, frozenset()).compile("start: /a/")
    slow = TokenizerCodec(object(), vocabulary=9)
    with pytest.raises(GrammarError, match="requires a model with a fast tokenizer"):
        GrammarCompiler(slow, frozenset({1})).compile("start: /a/")
    with pytest.raises(GrammarError, match="a JSON schema must be an object"):
        json_grammar([])  # type: ignore[arg-type]
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"install it: pip install 'groupwise\[structured\]'"):
        require_llguidance()


def test_a_tokenizer_that_llguidance_misreads_is_refused():
    class Upper(TokenizerCodec):
        """Reads other text from tokens than their names say."""

        def decode(self, tokens: Sequence[int]) -> str:
            return super().decode(tokens).upper()

    codec = Upper(tiny_tokenizer(), vocabulary=VOCABULARY)
    with pytest.raises(GrammarError, match="differently from the model's tokenizer"):
        GrammarCompiler(codec, frozenset({codec.tokenizer.eos_token_id})).compile("start: /a/")


def test_the_last_grammars_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_GRAMMARS", 2)
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(TokenizerCodec(tokenizer, vocabulary=VOCABULARY), frozenset({268}))
    first, second = compiler.compile("start: /a/"), compiler.compile("start: /b/")
    assert compiler.compile("start: /a/") is first
    compiler.compile("start: /c/")
    assert compiler.compile("start: /a/") is first
    assert compiler.compile("start: /b/") is not second


def trained_tokenizer() -> Any:
    """A byte-level BPE tokenizer with tokens of several characters, of JSON, and of parts of characters."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    words = [
        "international",
        "Zürich",
        "日本語",
        "😀😁",
        "a\\b",
        'say "no"',
        "two\nlines",
        "some        space",
    ]
    texts = [json.dumps({"name": " ".join(words[n:]), "n": [n]}, ensure_ascii=n % 2 == 0) for n in range(8)]
    texts += ['"name": "', '", "n', '", "name', '"}, {"', '], "n', "12, 345, -6.5e3", "null, true, false"]
    trainer = trainers.BpeTrainer(
        vocab_size=760,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([*texts, *(Path(__file__).read_text(),)], trainer)
    raw.add_tokens(
        [" true", " null", ": 1", ", 2", '", "n', '", "name": "', '"}, {"', '": "', "12", "5, "]
    )  # BPE splits at punctuation
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def text_of(**limits: int) -> dict[str, Any]:
    return {"type": "string", **limits}


def record(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


NUMBER = {"type": "integer", "minimum": -20, "maximum": 130}
NULL = {"type": "null"}
PLAIN = [
    record(a=text_of(maxLength=6), b=text_of(maxLength=14)),
    record(a=text_of(), b={"enum": ["a", "no", 3]}),
    record(a=text_of(minLength=3, maxLength=9), b={"type": ["string", "null"], "maxLength": 4}),
    {"type": "array", "items": text_of(maxLength=11), "minItems": 2, "maxItems": 4},
    record(a={"anyOf": [text_of(maxLength=5), NULL, {"type": "number"}]}, n=NUMBER),
    {**record(a={"$ref": "#/$defs/t"}), "$defs": {"t": record(x=text_of(maxLength=40), y=text_of())}},
    text_of(maxLength=30),
    NUMBER,
    {"type": "array", "items": record(name=text_of(maxLength=4), n=NUMBER), "maxItems": 3},
    record(n=NUMBER, name={"anyOf": [record(n=text_of(maxLength=3)), NUMBER, NULL]}, z={"const": 12}),
    record(a={"enum": ["n1x", "n2y", 12, 120]}, n={"type": "array", "items": NUMBER, "maxItems": 3}),
    {**record(name=text_of(minLength=1), n=NUMBER), "required": ["n"]},
    record(a={"type": "boolean"}, n={"type": ["null", "boolean", "number"]}, name=text_of(maxLength=3)),
    {"type": "array", "items": {"anyOf": [{"type": "boolean"}, NUMBER, record(n=NUMBER)]}, "maxItems": 4},
]


def by_llguidance(compiled: TokenGrammar, seed: int, length: int) -> tuple[list[int], list[Any]]:
    """An answer of random tokens, and its masks, each computed by llguidance from all tokens before it."""
    from llguidance import LLMatcher

    computer, random = compiled.computer, np.random.default_rng(seed)
    matcher = LLMatcher(computer.tokenizer, compiled.text, log_level=0, limits=computer.limits)
    answer, masks = [0] * 0, []
    while len(answer) < length and (not answer or answer[-1] != 0):
        masks.append(computer.compute([matcher])[0])
        bits = np.unpackbits(masks[-1].view(np.uint8), bitorder="little")
        # Long tokens are rare among all; without them few answers would end a string and go on.
        weights = bits * np.where([b'"' in text for text in compiled_texts(compiled)], 6.0, 1.0)
        answer.append(int(random.choice(len(bits), p=weights / weights.sum())))
        matcher.consume_token(answer[-1])
    return answer, masks


def compiled_texts(compiled: TokenGrammar) -> Sequence[bytes]:
    strings = compiled.computer.strings
    assert strings is not None
    return strings.texts


@pytest.mark.parametrize("schema", PLAIN, ids=json.dumps)
def test_masks_are_those_of_llguidance(schema):
    tokenizer = trained_tokenizer()
    codec = TokenizerCodec(tokenizer, vocabulary=len(tokenizer))
    compiled = GrammarCompiler(codec, frozenset({0})).compile(json_grammar(schema))
    assert compiled.plain_scalars
    answers, masks = zip(*(by_llguidance(compiled, seed, 60) for seed in range(40)), strict=True)
    np.testing.assert_array_equal(compiled.masks(answers), np.concatenate(masks))
    # Again, in other company and another order, from the masks that are kept.
    for answer, own in reversed(list(zip(answers, masks, strict=True))):
        np.testing.assert_array_equal(compiled.masks([answer]), own)


BACKSLASH = "\\"


class Counting:
    """Counts the masks that llguidance computes."""

    def __init__(self, compute: Any) -> None:
        self.compute, self.count = compute, 0

    def __call__(self, matchers: Sequence[Any], **given: Any) -> Any:
        self.count += len(matchers)
        return self.compute(matchers, **given)


def counting(tokenizer: Any, schema: dict[str, Any]) -> tuple[TokenizerCodec, TokenGrammar, Counting]:
    codec = TokenizerCodec(tokenizer, vocabulary=len(tokenizer))
    ends = frozenset({tokenizer.eos_token_id})
    compiled = GrammarCompiler(codec, ends).compile(json_grammar(schema))
    compiled.computer.compute = counter = Counting(compiled.computer.compute)  # type: ignore[method-assign]
    return codec, compiled, counter


def test_masks_in_a_string_are_derived():
    codec, compiled, counter = counting(trained_tokenizer(), PLAIN[6])
    answer = codec.tokenizer.encode('"' + "a b " * 7 + '"')
    compiled.masks([answer])
    assert counter.count == 1  # after the opening quote: 28 of 30 characters are written
    assert len(answer) > 10


def test_an_answer_with_other_strings_and_numbers_needs_no_new_masks():
    codec, compiled, counter = counting(tiny_tokenizer(), PLAIN[8])
    first, second = (
        codec.tokenizer.encode(json.dumps([{"name": name, "n": n}, {"name": "b", "n": 7}]))
        for name, n in (("abcd", 3), ("x", 9))
    )
    compiled.masks([first])
    computed = counter.count
    assert computed > 8
    compiled.masks([second])
    # The other digit is the only new place: what follows the string and the number is known.
    assert counter.count == computed + 1


def test_answers_that_stand_at_one_new_place_share_its_mask():
    codec, compiled, counter = counting(tiny_tokenizer(), PLAIN[0])
    answer = codec.tokenizer.encode('{"a": "x", "b": "')
    compiled.masks([answer] * 5)
    assert counter.count < len(answer)


def test_masks_beyond_the_limit_are_forgotten(monkeypatch):
    codec, unlimited, _ = counting(tiny_tokenizer(), PLAIN[0])
    answer = codec.tokenizer.encode('{"a": "x", "b": "y"}')
    _, compiled, counter = counting(tiny_tokenizer(), PLAIN[0])
    monkeypatch.setattr(token_grammar, "MOST_MASK_BYTES", 5 * compiled.first.mask_W.nbytes)
    for _ in range(4):
        np.testing.assert_array_equal(compiled.masks([answer]), unlimited.masks([answer]))
        assert compiled.kept_bytes <= token_grammar.MOST_MASK_BYTES
    before = counter.count
    compiled.masks([answer])
    assert counter.count > before


@pytest.mark.parametrize(
    ("text", "quoting", "after", "closed"),
    [
        ('": "x', token_grammar.QUOTED, token_grammar.QUOTED, 0),
        ('": "x', token_grammar.OUTSIDE, token_grammar.OUTSIDE, -1),
        ('"a", "b": 5', token_grammar.OUTSIDE, token_grammar.OUTSIDE, -1),
        (r'a\\"', token_grammar.QUOTED, token_grammar.OUTSIDE, 3),
        (r"a\"", token_grammar.QUOTED, token_grammar.QUOTED, -1),
        ('"', token_grammar.ESCAPED, token_grammar.QUOTED, -1),
        ("a" + 2 * BACKSLASH, token_grammar.QUOTED, token_grammar.QUOTED, -1),
        ("a" + BACKSLASH, token_grammar.QUOTED, token_grammar.ESCAPED, -1),
    ],
)
def test_quotes_say_whether_a_text_ends_in_a_string(text, quoting, after, closed):
    assert quoting_after(text.encode(), quoting) == (after, closed)


@pytest.mark.parametrize(
    "schema",
    [
        record(a={"type": "string", "pattern": "^a+$"}),
        record(a={"type": "string", "format": "date"}),
        {"type": "object", "properties": {"a": text_of()}},
        record(a={"anyOf": [text_of(maxLength=3), {"const": "abcdefgh"}]}),
        record(a={"enum": [str(n) for n in range(60)]}),
        record(a={}),
        record(a={"type": "array"}),
        record(a={"allOf": [text_of()]}),
        {"anyOf": [record(a=text_of(maxLength=3), n=NULL), record(a=text_of(maxLength=9), z=NULL)]},
        {"anyOf": [{"type": "array", "items": NUMBER}, record(a=text_of())]},
        record(a={"anyOf": [{"$ref": "#/$defs/t"}, text_of()]}),
        record(a={"enum": [[1, 2], [3, 4]]}),
    ],
    ids=json.dumps,
)
def test_other_schemas_are_left_to_llguidance(schema):
    assert not has_plain_scalars(json_grammar(schema))


@pytest.mark.parametrize(
    ("text", "count", "whole"),
    [
        ("abc", 3, True),
        (" é日", 3, True),
        ("", 0, True),
        ('", "b', 0, False),
        ('ab"', 2, False),
        ("a\\n", 2, False),
        ("\\u00e9x", 2, False),
        ("\\u00", 1, False),
        ('\\\\"', 1, False),
        ("a\n", 2, False),
    ],
)
def test_a_token_takes_the_characters_before_the_end_of_the_string(text, count, whole):
    assert string_characters(text.encode()) == (count, whole)
    # The first byte of é begins a character, which the next token completes.
    assert string_characters(b"a\xc3") == (2, False)
    assert string_characters(b"\xa9a") == (1, False)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" | %json {"type": "string"}',
        'start: %json {"type": "string"} "b"\n',
        'start: %json {"anyOf": 5}\n',
        'start: %json {"type": "array", "items": [1], "enum": 3}\n',
        'start: %json {"type": "object", "properties": ["a"], "additionalProperties": false}\n',
        "start: %json []\n",
    ],
)
def test_grammars_that_are_no_schema_are_left_to_llguidance(grammar):
    assert not has_plain_scalars(grammar)
