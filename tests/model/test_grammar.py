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
from groupwise.model.grammar import (
    GrammarCompiler,
    GrammarError,
    has_plain_strings,
    json_grammar,
    require_llguidance,
    string_characters,
)
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


def written(codec: TokenizerCodec, compiled: module.TokenGrammar, seed: int) -> list[int]:
    """An answer in which every allowed token is equally likely, by the masks that the trainer computes."""
    random, tokens = np.random.default_rng(seed), [0] * 0
    while True:
        mask_W = compiled.masks([[*tokens, 0]])[-1]
        allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        assert max(allowed) < codec.vocabulary
        tokens.append(int(random.choice(allowed)))
        if tokens[-1] in compiled.tokens.ends:
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
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([*texts, *(Path(__file__).read_text(),)], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def text_of(**limits: int) -> dict[str, Any]:
    return {"type": "string", **limits}


def record(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


PLAIN = [
    record(a=text_of(maxLength=6), b=text_of(maxLength=14)),
    record(a=text_of(), b={"enum": ["a", "no", 3]}),
    record(a=text_of(minLength=3, maxLength=9), b={"type": ["string", "null"], "maxLength": 4}),
    {"type": "array", "items": text_of(maxLength=11), "minItems": 2, "maxItems": 4},
    record(a={"anyOf": [text_of(maxLength=5), {"type": "null"}, {"type": "number"}]}),
    {**record(a={"$ref": "#/$defs/t"}), "$defs": {"t": record(x=text_of(maxLength=40), y=text_of())}},
    text_of(maxLength=30),
]


@pytest.mark.parametrize("schema", PLAIN, ids=json.dumps)
def test_masks_in_strings_are_those_of_llguidance(schema):
    from llguidance import LLMatcher

    codec = TokenizerCodec(trained_tokenizer(), vocabulary=700)
    compiled = GrammarCompiler(codec, frozenset({0})).compile(json_grammar(schema))
    assert compiled.plain_strings
    tokens, random = compiled.tokens, np.random.default_rng(0)
    answers, wanted = [], []
    for _ in range(25):
        matcher = LLMatcher(tokens.tokenizer, compiled.text, log_level=0, limits=tokens.limits)
        answer = [0] * 0
        while len(answer) < 60 and (not answer or answer[-1] != 0):
            mask_1W = np.zeros((1, tokens.words), dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(mask_1W.ctypes.data, 4 * tokens.words)
            tokens.finish_masks(mask_1W)
            allowed = np.flatnonzero(np.unpackbits(mask_1W.view(np.uint8)[0], bitorder="little"))
            wanted.append(mask_1W[0])
            answer.append(int(random.choice(allowed)))
            matcher.consume_token(answer[-1])
        answers.append(answer)
    np.testing.assert_array_equal(compiled.masks(answers), np.stack(wanted))


def test_most_masks_in_a_string_are_derived(monkeypatch):
    codec = TokenizerCodec(trained_tokenizer(), vocabulary=700)
    compiled = GrammarCompiler(codec, frozenset({0})).compile(json_grammar(PLAIN[-1]))
    answer = codec.tokenizer.encode('"' + "a b " * 7 + '"')
    derived: list[bool] = []
    follow = type(compiled.tokens)._follow_string
    monkeypatch.setattr(
        type(compiled.tokens),
        "_follow_string",
        lambda *given: derived.append(follow(*given)) or derived[-1],
    )
    compiled.masks([answer])
    # Computed after the opening quote alone: 28 of 30 characters are written.
    assert derived.count(False) == 1
    assert len(derived) == len(answer) - 1


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
    ],
    ids=json.dumps,
)
def test_other_strings_are_left_to_llguidance(schema):
    assert not has_plain_strings(json_grammar(schema))


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
    assert not has_plain_strings(grammar)
