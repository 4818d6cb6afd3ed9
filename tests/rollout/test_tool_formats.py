"""Formats of tool calls: found from the chat template, written by it, and read back."""

from __future__ import annotations

import shutil

import pytest

import groupwise as gw
from groupwise.commands.doctor import template_verdict
from groupwise.model.resolve import model_folder
from groupwise.model.tokenizer import (
    TokenizerCodec,
    calls_difference,
    render,
    tool_format_of,
    turn_text,
    unread_calls,
    written_calls,
)
from groupwise.records import Example, Rollout
from groupwise.rollout.tool_calls import READERS, ParsedToolCall, read_calls
from groupwise.rollout.tool_executor import ToolExecutor
from tests.support.small_models import tiny_tokenizer
from tests.support.tool_templates import ROLES, WRITERS, tokenizer_of

BOTH = [ParsedToolCall("search", {"query": "a b", "limit": 3}), ParsedToolCall("add", {"x": 1})]
TEXTS = {
    "hermes": '<tool_call>{"name": "search", "arguments": {"query": "a b", "limit": 3}}</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>',
    "llama": '<|python_tag|>{"name": "search", "parameters": {"query": "a b", "limit": 3}}; '
    '{"name": "add", "parameters": {"x": 1}}',
    "pythonic": '[search(query="a b", limit=3), add(x=1)]',
    "mistral": '[TOOL_CALLS][{"name": "search", "arguments": {"query": "a b", "limit": 3}, "id": "1"}, '
    '{"name": "add", "arguments": {"x": 1}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
    '{"query": "a b", "limit": 3}\n```<｜tool▁call▁end｜>\n'
    '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.search <|constrain|>json<|message|>{"query": "a b", "limit": 3}<|call|>'
    '<|start|>assistant to=functions.add<|channel|>commentary<|message|>{"x": 1}',
    "gemma": "<start_function_call>call:search{query:<escape>a b<escape>,limit:3}<end_function_call>"
    "<start_function_call>call:add{x:1}<end_function_call>",
}


@pytest.mark.parametrize("style", TEXTS)
def test_parallel_calls_are_read_in_every_format(style):
    assert read_calls(TEXTS[style], style) == BOTH
    assert read_calls(f"<think>{TEXTS[style]}</think>\nNo.", style) == []
    assert read_calls("The answer is 7.", style) == []


@pytest.mark.parametrize(
    ("style", "text", "calls"),
    [
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a"}[TOOL_CALLS]add[ARGS]{"x": 1}', ["search", "add"]),
        ("gemma", '<|tool_call>call:search{query:<|"|>a{b:c<|"|>}<tool_call|>', ["search"]),
        ("pythonic", "<|python_start|>[search(query='a')]<|python_end|>", ["search"]),
        ("llama", '{"name": "search", "parameters": {"query": "a"}}', ["search"]),
    ],
)
def test_variants_of_a_format(style, text, calls):
    parsed = read_calls(text, style)
    assert [call.name for call in parsed] == calls
    assert all(call.error is None for call in parsed)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "<tool_call>{"),
        ("qwen_xml", "<function=search><parameter=query>a"),
        ("llama", '{"name": "x", "parameters": oops}'),
        ("pythonic", "[search(a)]"),
        ("pythonic", "[search(query=open('x'))]"),
        ("mistral", "[TOOL_CALLS]oops"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>oops<｜tool▁call▁end｜>"),
        ("harmony", "to=functions.add<|message|>oops"),
        ("gemma", "<start_function_call>call:add{x:oops}<end_function_call>"),
    ],
)
def test_a_malformed_call_is_an_error_that_the_policy_reads(style, text):
    (call,) = read_calls(text, style)
    assert call.error


@pytest.mark.parametrize("style", READERS)
def test_text_of_any_kind_is_read_in_linear_time(style):
    for piece in ("<tool_call>", "[TOOL_CALLS]", "[", "to=functions.", "<function=", "{", '{"name"', "a:{,"):
        read_calls(piece * 20_000, style)


def test_untyped_arguments_are_read_as_the_types_of_the_tool():
    def search(query: str, limit: int = 5, exact: bool = False) -> str:
        """Search."""
        return f"{query!r} {limit!r} {exact!r}"

    text = (
        "<tool_call>\n<function=search>\n<parameter=query>\n12\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
        "<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>"
    )
    box = ToolExecutor.of([search], seconds=1.0, characters=100)
    (call,) = box.answer(read_calls(text, "qwen_xml"), allowed=1)
    assert call.result == "'12' 3 True"
    (call,) = box.answer(read_calls(text.replace("\n3\n", "\nmany\n"), "qwen_xml"), allowed=1)
    assert "limit must be" in str(call.error)


@pytest.mark.parametrize("style", WRITERS)
def test_a_template_is_recognized_and_what_it_writes_is_read_back_and_continued(style):
    tokenizer = tokenizer_of(style)
    assert tool_format_of(tokenizer) == style
    assert calls_difference(tokenizer, read_calls) is None
    turn = written_calls(tokenizer, [("search", {"query": "a b", "limit": 3}), ("add", {"x": 1})])
    assert turn.endswith(f"{tokenizer.eos_token}\n") or turn.endswith(tokenizer.eos_token)
    assert [call.name for call in read_calls(turn_text(tokenizer, turn), style)] == ["search", "add"]


@pytest.mark.parametrize("style", WRITERS)
def test_a_line_break_after_the_end_of_a_turn_is_no_difference(style):
    tokenizer = tokenizer_of(style)
    end = tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template.replace(f"{end}\n", f"{end}{{{{ '\\n' }}}}")
    turn = written_calls(tokenizer, [("add", {"x": 1})])
    assert turn.endswith(f"{end}\n")
    assert calls_difference(tokenizer, read_calls) is None


def test_the_results_of_a_template_may_continue_the_turn_that_made_the_calls():
    tokenizer = tokenizer_of("gemma")
    tokenizer.chat_template = (
        "{%- for m in messages -%}{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
        "{{- '<|tool_call>call:' + c.function.name + '{' -}}"
        "{%- for k, v in c.function.arguments.items() %}{{ k }}:"
        "{{- '<|\"|>' + v + '<|\"|>' if v is string else v }}{{ '' if loop.last else ',' }}{% endfor -%}"
        "{{- '}<tool_call|>' -}}{%- endfor -%}{{- '<|tool_response>' -}}"
        "{%- elif m.role == 'tool' -%}{{- 'response:' + m.name + '{' + m.content + '}<tool_response|>' -}}"
        "{%- else -%}{{- '<|turn>' + m.role + m.content + '<turn|>' -}}{%- endif -%}{%- endfor -%}"
        "{%- if tools %}{{ tools | length }}{% endif -%}"
    )
    assert tool_format_of(tokenizer) == "gemma"
    assert calls_difference(tokenizer, read_calls) is None
    codec = TokenizerCodec(tokenizer, vocabulary=10_000)
    (tokens,) = codec.encode_all_results([["R1"]], prefill="", ended=True, names=[["add"]])
    assert tokenizer.decode(tokens) == "response:add{R1}<tool_response|>"


def test_a_template_that_writes_only_the_first_call_of_a_message_is_harmony_and_continues_one_call():
    tokenizer = tokenizer_of("harmony")
    tokenizer.chat_template = (
        "{%- set called = namespace(name=none) -%}{%- for m in messages -%}{%- if m.tool_calls -%}"
        '{%- set call = m.tool_calls[0].function %}{{- "<|start|>assistant to=" }}'
        '{{- "functions." + call.name + "<|channel|>commentary json<|message|>" }}'
        '{{- call.arguments|tojson + "<|call|>" }}{%- set called.name = call.name -%}'
        '{%- elif m.role == "tool" -%}{{- "<|start|>functions." + called.name + " to=assistant<|message|>" }}'
        '{{- m.content|tojson + "<|end|>" }}'
        '{%- else -%}{{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}{%- endif -%}'
        "{%- endfor -%}{%- if tools %}{{ tools|length }}{% endif %}"
        "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
    )
    assert tool_format_of(tokenizer) == "harmony"
    assert calls_difference(tokenizer, read_calls) is None
    codec = TokenizerCodec(tokenizer, vocabulary=10_000)
    (tokens,) = codec.encode_all_results([["R1"]], prefill="", ended=True, names=[["add"]])
    assert tokenizer.decode(tokens) == (
        '<|start|>functions.add to=assistant<|message|>"R1"<|end|><|start|>assistant'
    )


def test_results_stand_under_the_names_of_the_tools_that_were_called():
    tokenizer = tokenizer_of("harmony")
    codec = TokenizerCodec(tokenizer, vocabulary=10_000)
    (tokens,) = codec.encode_all_results([["R1", "R2"]], prefill="", ended=True, names=[["search", "add"]])
    text = tokenizer.decode(tokens)
    assert text.index("tool search\nR1") < text.index("tool add\nR2")
    assert codec.tool_format == "harmony"


def test_a_template_that_writes_calls_but_no_definitions_gets_them_with_its_own_example():
    tokenizer = tokenizer_of("deepseek")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- if tools -%}{{ tools | length }} tools{%- endif -%}", ""
    )
    text = render(tokenizer, [{"role": "user", "content": "Hi"}], tools=[{"name": "search"}])
    assert '{"name": "search"}' in text
    assert (
        "For each function call, write:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><function-name>" in text
    )
    assert "json object" not in text


UNREAD = "{%- for c in m.tool_calls -%}<call:{{ c.function.name }}>{%- endfor -%}"


def with_calls(written: str):
    tokenizer = tokenizer_of("hermes")
    tokenizer.chat_template = ROLES.replace("CALLS", written).replace("<|im_end|>", tokenizer.eos_token)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "shown"),
    [
        (with_calls(UNREAD), "the chat template writes a call as '<call:search><call:add>"),
        (with_calls("CALLED"), "the chat template does not write calls"),
        (tokenizer_of("hermes"), None),
        (tokenizer_of("llama"), None),
        (tiny_tokenizer(), None),  # no format of its own: the prompt shows how to call a tool
    ],
)
def test_a_template_whose_calls_are_not_read_is_named(tokenizer, shown):
    reason = unread_calls(tokenizer, read_calls)
    assert reason is None if shown is None else str(reason).startswith(shown)
    if shown is not None:
        assert template_verdict(tokenizer) == (False, reason)


def test_a_run_with_tools_says_at_its_start_that_calls_of_the_template_are_not_read(tmp_path, capsys):
    shutil.copytree(model_folder("tiny"), tmp_path / "model")
    with_calls(UNREAD).save_pretrained(tmp_path / "model")

    def look(word: str) -> str:
        """Look a word up."""
        return word

    task = gw.Task(
        name="t",
        examples=[{"q": "a"}, {"q": "b"}],
        prompt=lambda e: e["q"],
        rewards={"r": scored},
        tools=[look],
    )
    settings = {"rollout.group_size": 2, "rollout.max_tokens": 8, "task.held_out": 0, "algo.max_gap": 1.0}
    gw.train(
        task,
        model=str(tmp_path / "model"),
        lora_r=0,
        batch_size=1,
        max_steps=1,
        output_dir=tmp_path,
        no_trackio=True,
        **settings,
    )
    assert "only calls in hermes format are read" in capsys.readouterr().out


def scored(rollout: Rollout, example: Example) -> float:
    return float(len(rollout.text))


def test_arguments_are_text_only_for_templates_that_do_not_dump_them():
    plain, dumping = tokenizer_of("deepseek"), tokenizer_of("deepseek")
    dumping.chat_template = dumping.chat_template.replace(
        "c.function.arguments }}", "c.function['arguments'] | tojson }}"
    )
    for tokenizer in (plain, dumping):
        assert '<｜tool▁sep｜>{"x": 1}<｜tool' in written_calls(tokenizer, [("add", {"x": 1})])
        assert calls_difference(tokenizer, read_calls) is None
