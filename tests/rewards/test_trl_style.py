"""Conversations of rollouts as other packages represent them."""

from __future__ import annotations

from dataclasses import replace

from groupwise.records import Call, Turn
from groupwise.rewards.trl_style import as_openai
from tests.support.scripted_rollouts import answered


def test_every_call_has_an_id_that_its_result_repeats():
    question = {"role": "user", "content": "1 + 2?"}
    calls = tuple(Call(name="add", arguments={"a": n}, result=str(n)) for n in (1, 2))
    turns = (Turn(text="add", calls=calls), Turn(text="and", calls=calls[:1]), Turn(text="3"))
    prompt, completion = as_openai(replace(answered("3", [question]), turns=turns))
    assert prompt == [question]
    assert completion[0]["tool_calls"][1] == {
        "type": "function",
        "id": "call-1",
        "function": {"name": "add", "arguments": '{"a": 2}'},
    }
    assert completion[2] == {"role": "tool", "name": "add", "content": "2", "tool_call_id": "call-1"}
    assert [message.get("tool_call_id") for message in completion[3:]] == [None, "call-2", None]
    assert completion[3]["tool_calls"][0]["id"] == "call-2"
