"""Talking to a model: turn by turn, in one shot, or with a task's own question."""

from __future__ import annotations

import pytest

from groupwise import cli
from groupwise.errors import ConfigError
from groupwise.records import Sampling
from groupwise.serve.talk import Streaming, Talk


def test_every_turn_sees_the_turns_before_it():
    seen = []

    def echo(messages):
        seen.append([(m["role"], m["content"]) for m in messages])
        yield from ("so ", "what")

    talk = Talk(echo, system="be brief")
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
    streaming = Streaming(small_policy, Sampling(max_tokens=200, temperature=1.0), seed=0)
    messages = [{"role": "user", "content": "a"}]
    first = streaming(messages)
    next(first)
    first.close()
    whole = "".join(streaming(messages))
    streaming.close()
    again = Streaming(small_policy, Sampling(max_tokens=200, temperature=1.0), seed=0)
    "".join(again(messages))
    assert "".join(again(messages)) == whole  # the second turn's noise, whatever became of the first
    again.close()


def test_a_conversation_beyond_the_context_is_refused(small_policy):
    streaming = Streaming(small_policy, Sampling(max_tokens=1000), seed=0)
    with pytest.raises(ConfigError, match="begin anew"):
        list(streaming([{"role": "user", "content": "x" * 100}]))
    streaming.close()


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
    assert first.rstrip().rpartition("\n")[2].startswith(("--- right: ", "--- wrong: "))
    assert cli.main(words) == 0
    assert capsys.readouterr().out == first
    assert cli.main(["chat", "tiny", "--prompt", "3 + 4", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()


def test_a_conversation_by_keyboard(capsys, monkeypatch):
    typed = iter(["1 + 1", "", "/reset", "2 + 2", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert cli.main(["chat", "tiny", "--max-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--prompt", "a", "--example", "1"], "give one of them"),
        (["tiny", "--example", "999"], "there is no number 999"),
        (["/nowhere/at/all"], "neither the folder of a run"),
        (["tiny", "--temperature", "-1"], "--temperature must be at least 0"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(words, message, capsys):
    assert cli.main(["chat", *words]) == 2
    assert message in capsys.readouterr().err
