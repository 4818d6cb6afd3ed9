"""Talking to a model: turn by turn, in one shot, or with a task's own question."""

from __future__ import annotations

import inspect
import json

import pytest

from groupwise import cli
from groupwise.commands.chat import readable
from groupwise.commands.serve import serve
from groupwise.config import read_config
from groupwise.config.schema import ModelConfig
from groupwise.engine.serving.serving_scheduler import CPUSteps
from groupwise.errors import ConfigError, RolloutError
from groupwise.evaluate.target import ResolvedModel, Target, find_named
from groupwise.model.load import load_for_generation
from groupwise.model.resolve import FOLDERS
from groupwise.records import Sampling
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.serve.chat_session import (
    CONTEXT,
    ChatSession,
    StreamingAnswers,
    ToolAnswers,
    ToolChatSession,
    held_out_example,
    system_of,
    tools_of,
)
from groupwise.tracking.run_folder import RunFolder


def test_every_turn_sees_the_turns_before_it():
    seen = []

    def echo(messages):
        seen.append([(m["role"], m["content"]) for m in messages])
        yield from ("so ", "what")

    talk = ChatSession(echo, system="be brief")
    assert list(talk.ask("one")) == ["so ", "what"]
    list(talk.ask("two"))
    assert seen[1] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "so what"),
        ("user", "two"),
    ]
    talk.reset()
    assert [message["role"] for message in talk.messages] == ["system"]


def test_an_answer_given_up_half_way_does_not_disturb_the_next(small_policy):
    streaming = StreamingAnswers(small_policy, Sampling(max_tokens=200, temperature=1.0), seed=0)
    messages = [{"role": "user", "content": "a"}]
    first = streaming(messages)
    next(first)
    first.close()
    whole = "".join(streaming(messages))
    streaming.close()
    again = StreamingAnswers(small_policy, Sampling(max_tokens=200, temperature=1.0), seed=0)
    "".join(again(messages))
    assert "".join(again(messages)) == whole  # the second turn's noise, whatever became of the first
    again.close()


def test_a_conversation_beyond_the_context_is_refused(small_policy):
    streaming = StreamingAnswers(small_policy, Sampling(max_tokens=1000), seed=0)
    assert list(streaming([{"role": "user", "content": "x" * 100}])), "an answer as long as there is room"
    with pytest.raises(ConfigError, match="start a new conversation"):
        list(streaming([{"role": "user", "content": "x" * 100_000}]))
    streaming.close()


def test_a_long_context_of_a_model_takes_no_memory_before_it_is_asked_for(small_policy, monkeypatch):
    monkeypatch.setattr(type(small_policy), "context_length", property(lambda _: 131_072))
    usual = StreamingAnswers(small_policy, Sampling(max_tokens=512), seed=0)
    assert inspect.signature(serve).parameters["max_context"].default == CONTEXT
    with pytest.raises(
        ConfigError, match=f"context of {CONTEXT} tokens; start a new conversation, or raise --max-tokens"
    ):
        list(usual.write((40,) * CONTEXT))
    usual.close()
    longer = StreamingAnswers(small_policy, Sampling(max_tokens=4000), seed=0)
    with pytest.raises(ConfigError, match="context of 8000 tokens"):
        list(longer.write((40,) * 8000))
    longer.close()


def test_hardly_any_temperature_is_none(capsys):
    said = []
    words = ["chat", "tiny", "--prompt", "3 + 4", "--max-tokens", "5", "--temperature"]
    for heat in ("0", "1e-30"):
        assert cli.main([*words, heat]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_one_question_one_answer(capsys):
    words = [
        "chat",
        "tiny",
        "--example",
        "1",
        "--temperature",
        "0",
        "--max-tokens",
        "100",
        "model.device=cpu",
    ]
    assert cli.main(words) == 0
    first = capsys.readouterr().out
    assert "Using each number in this list only once" in first
    assert first.rstrip().rpartition("\n")[2].startswith(("--- correct: ", "--- incorrect: "))
    assert cli.main(words) == 0
    assert capsys.readouterr().out == first
    assert cli.main(["chat", "tiny", "--prompt", "3 + 4", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()


def test_what_does_not_fit_the_context_is_said_and_the_conversation_goes_on(capsys, monkeypatch):
    typed = iter(["3 " * 2000, "1 + 1", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert cli.main(["chat", "tiny", "--max-tokens", "4"]) == 0
    _, refused, answered, *_ = capsys.readouterr().out.splitlines()
    assert "fill the context" in refused
    assert "context" not in answered


def test_what_is_no_text_is_shown_as_a_terminal_would():
    assert readable("2 + 2 = ½") == "2 + 2 = ½"
    assert readable(b"a\xffb".decode(errors="surrogateescape")) == "a\N{REPLACEMENT CHARACTER}b"


def test_a_conversation_by_keyboard(capsys, monkeypatch):
    typed = iter(["1 + 1", "", "/reset", "2 + 2", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert cli.main(["chat", "tiny", "--max-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--prompt", "a", "--example", "1"], "--prompt and --example are mutually exclusive"),
        (["tiny", "--example", "999"], "number 999 is out of range"),
        (["/nowhere/at/all"], "neither a folder with a run"),
        (["tiny", "--temperature", "-1"], "--temperature must be at least 0"),
        (["tiny", "--prompt", "a", "--task", "math"], "--task requires --example or --tools"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(words, message, capsys):
    assert cli.main(["chat", *words]) == 2
    assert message in capsys.readouterr().err


TOOLS = ["chat", "tiny-search", "--task", "search_qa", "--tools", "--temperature", "0", "model.device=cpu"]


def test_a_models_calls_are_made_shown_and_judged(capsys):
    assert cli.main([*TOOLS, "--example", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("<tool_call>") for line in lines)
    assert any(line.startswith("→ 1. ") for line in lines)
    assert lines[-1].startswith(("--- correct: answer", "--- incorrect: answer"))


def test_calls_and_results_are_remembered_as_what_they_are():
    policy = load_for_generation(ModelConfig(name="tiny-search", device="cpu"), rank=0, trained=None)
    config = read_config(overrides=["model.name=tiny-search", "tools.max_turns=2", "tools.max_calls=1"])
    asked = held_out_example(config, "search_qa", number=1)
    streaming = StreamingAnswers(policy, Sampling(max_tokens=60, temperature=0.0), seed=0)
    kit = tools_of(config, asked.task, None)
    answers = ToolAnswers(streaming, kit, limits=config.tools)
    talk = ToolChatSession(answers, kit, system=system_of(asked))
    "".join(talk.ask(str(asked.messages[-1]["content"])))
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert talk.messages[2]["content"].count("<tool_call>") == 1
    assert kit.turns[0].calls[0].result == talk.messages[3]["content"]
    streaming.close()


def test_a_tool_that_fails_is_told_in_a_sentence_and_the_conversation_goes_on(capsys, monkeypatch):
    def failing(self, wishes, *, allowed, state):
        raise RolloutError("the index is gone")

    monkeypatch.setattr(ToolExecutor, "answer", failing)
    config = read_config(overrides=["model.name=tiny-search"])
    question = held_out_example(config, "search_qa", number=1).question.splitlines()[-1]
    assert cli.main([*TOOLS, "--prompt", question]) == 2
    shown = capsys.readouterr()
    assert shown.out.endswith("</tool_call>\n")
    assert "a tool failed: the index is gone" in shown.err
    typed = iter([question, question, "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert cli.main(TOOLS) == 0
    assert capsys.readouterr().out.splitlines().count("a tool failed: the index is gone") == 2


def test_tools_that_are_not_there_are_refused_and_the_way_to_some_is_said(capsys):
    assert cli.main(["chat", "tiny", "--tools", "--prompt", "a"]) == 2
    said = capsys.readouterr().err
    assert "countdown has no tools: choose a task with tools, such as --task search_qa" in said


def test_the_command_for_vllm_names_folders_and_a_rank_that_it_knows(tmp_path):
    named = find_named("tiny", [])
    assert named.vllm_command == f"vllm serve {FOLDERS['tiny']}"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "tiny", "r": 12}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    adapter = find_named(str(tmp_path), [])
    words = f"--enable-lora --max-lora-rank 16 --lora-modules {tmp_path.name}={tmp_path}"
    assert adapter.vllm_command == f"vllm serve {FOLDERS['tiny']} {words}"


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({"use_dora": True}, []),
        ({"modules_to_save": ["norm"]}, []),
        ({}, ["model.quantization=nf4", "lora.r=12"]),
    ],
)
def test_adapters_that_vllm_cannot_add_are_merged_first(settings, overrides, tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 12, **settings}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    target = Target(name=str(folder), trained=folder, rank=12, run=RunFolder(folder))
    named = ResolvedModel(target=target, config=read_config(overrides=overrides))
    merge = f"groupwise merge '{folder}' --output-path merged"
    assert named.vllm_command == f"{merge} && vllm serve merged"


def test_an_answer_whose_generator_fails_ends_with_the_reason(small_policy, monkeypatch):
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    streaming = StreamingAnswers(small_policy, Sampling(max_tokens=4), seed=0)

    def broken(steps, meanwhile):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(CPUSteps, "advance", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        list(streaming.write((40, 41)))


def test_a_strategy_answers_with_the_tools_of_the_task(capsys):
    assert cli.main([*TOOLS, "--example", "1", "--strategy", "self-consistency:2"]) == 0
    shown = capsys.readouterr().out
    assert "[search] 1. " in shown
    assert "--- correct" in shown or "--- incorrect" in shown


def test_a_strategy_answers_without_tools(capsys):
    words = ["chat", "tiny", "--prompt", "1 + 1", "--max-tokens", "4", "--strategy", "best-of:2"]
    assert cli.main([*words, "model.device=cpu"]) == 0
    assert capsys.readouterr().out.strip()
