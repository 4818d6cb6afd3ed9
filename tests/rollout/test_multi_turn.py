"""Rollouts of several turns: an append-only stream whose mask covers exactly what was sampled."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from groupwise.algo.samples import rollout_samples
from groupwise.config.schema import EngineConfig, ToolsConfig
from groupwise.engine.engine import Engine
from groupwise.errors import ConfigError, RolloutError
from groupwise.model.tokenizer import first_difference, knows_tools
from groupwise.records import Example, Sampling
from groupwise.rollout.collect import collect
from groupwise.rollout.tool_rollouts import Tools
from groupwise.rollout.tools import tool_of
from groupwise.tasks import Task
from tests.support.codecs import END
from tests.support.scripted_rollouts import Babbling, ScriptedEngine, ToolCodec, call
from tests.support.small_models import small_model, tiny_tokenizer


def look(query: str) -> str:
    """Look something up."""
    if query == "gone":
        raise RolloutError("no connection")
    return query.upper()


def talked(
    engine: Any, *, codec: Any = None, size: int = 2, tool: Any = look, state: Any = None, **limits: Any
) -> Any:
    sampling = Sampling(max_tokens=limits.pop("turn_tokens", 100))
    tools = Tools.of([tool], ToolsConfig(**limits), state=state)
    (group,) = collect(
        [Example({"q": "a"})],
        ask=lambda example: "ask",
        codec=codec or ToolCodec(),
        engine=engine,
        sampling=sampling,
        group_size=size,
        seed_parts=(0,),
        tools=tools,
    )
    return group.rollouts


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_is_appended_and_its_mask_covers_what_was_sampled(overlap):
    rollout, twin = talked(ScriptedEngine(call("x"), "done"), overlap=overlap)
    text = "".join(map(chr, rollout.tokens)).replace(chr(END), "$")
    assert text == f"ask{call('x')}$|X|done$"
    read = "".join(c for c, trained in zip(text, rollout.trained, strict=True) if not trained)
    assert read == "ask|X|"
    assert [turn.text for turn in rollout.turns] == [call("x"), "done"]
    assert (rollout.text, rollout.finish, rollout.calls[0].result) == ("done", "end", "X")
    assert replace(twin, member=0) == rollout


def test_a_later_turn_is_asked_with_the_whole_stream_and_noise_of_its_own():
    engine = ScriptedEngine(call("x"), "done")
    talked(engine)
    (first,), second = engine.asked
    assert len(second) == 2  # the members have parted ways
    assert second[0].prompt[: len(first.prompt)] == first.prompt
    seeds = [*first.seeds, *(seed for request in second for seed in request.seeds)]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_each_rollout_has_a_state_of_its_own_that_its_tools_share(overlap):
    def look(query: str, state: list[str]) -> str:
        """Look something up."""
        state.append(query)
        return f"{len(state)} so far"

    script = ScriptedEngine(call("x") + call("y"), call("z"), "done")
    settings = {"turn_tokens": 200, "max_tokens": 900, "overlap": overlap}
    first, second = talked(script, tool=look, state=lambda example: [example["q"]], **settings)
    assert [c.result for c in first.calls] == ["2 so far", "3 so far", "4 so far"]
    assert first.state == second.state == ["a", "x", "y", "z"]
    assert first.state is not second.state


def test_the_policy_neither_sees_nor_sets_the_state():
    def look(query: str, state: list[str]) -> str:
        """Look something up."""
        return "fine"

    assert list(tool_of(look).schema["function"]["parameters"]["properties"]) == ["query"]
    assert "no argument 'state'" in str(tool_of(look).refusal({"query": "x", "state": []}))
    with pytest.raises(ConfigError, match="takes a state"):
        Task(name="t", examples=[{"q": "a"}], prompt=str, rewards={"r": lambda **_: []}, tools=[look])


def test_a_malformed_call_costs_a_turn_and_is_not_drawn_again():
    (rollout,) = talked(ScriptedEngine("<tool_call>oops</tool_call>", "sorry"), size=1)
    assert len(rollout.turns) == 2
    assert rollout.calls[0].error
    assert rollout.error is None


def test_the_last_turn_makes_no_call_and_the_stream_ends_in_sampled_tokens():
    (rollout,) = talked(ScriptedEngine(call("x"), call("y")), size=1, max_turns=2)
    assert [len(turn.calls) for turn in rollout.turns] == [1, 0]
    assert rollout.trained[-1]


def test_no_turn_begins_without_room_for_it():
    line = call("x")
    needed = len(line) + 1 + len("|X|") + 100
    fits, short = (
        talked(ScriptedEngine(line, "done"), size=1, max_tokens=room)[0] for room in (needed, needed - 1)
    )
    assert (len(fits.turns), fits.finish) == (2, "end")
    assert (len(short.turns), short.finish, short.trained[-1]) == (1, "length", True)


def test_a_turn_that_ran_out_of_tokens_ends_the_rollout():
    (rollout,) = talked(ScriptedEngine(call("x"), "done"), size=1, turn_tokens=5)
    assert (len(rollout.turns), rollout.finish) == (1, "length")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tool_that_is_out_of_order_fails_the_rollout(overlap):
    (rollout,) = talked(ScriptedEngine(call("gone"), "done"), size=1, overlap=overlap)
    assert rollout.error == "tool: no connection"


def test_a_tool_that_stops_its_thread_fails_the_rollout_at_once():
    def stop(query: str) -> str:
        """Stop the program."""
        raise KeyboardInterrupt

    line = call("x").replace("look", "stop")
    started = time.monotonic()
    (rollout,) = talked(ScriptedEngine(line, "done"), size=1, tool=stop, overlap=True, seconds=20.0)
    assert rollout.error == "tool: KeyboardInterrupt: "
    assert time.monotonic() - started < 10


def test_a_tool_in_a_thread_that_hangs_is_left_behind():
    def hang(query: str) -> str:
        """Hang."""
        time.sleep(3)
        return ""

    line = call("x").replace("look", "hang")
    (rollout,) = talked(ScriptedEngine(line, "done"), size=1, tool=hang, overlap=True, seconds=0.05)
    assert rollout.calls[0].error == "hang took longer than 0.05 s"
    assert rollout.text == "done"


def test_a_rollout_that_ends_with_its_result_does_not_end_those_that_still_wait():
    def look(query: str, state: int) -> str:
        """Look."""
        if state == 0:
            return 80 * "long "  # leaves no room for another turn
        time.sleep(0.2)
        return "short"

    class Conversing(ScriptedEngine):
        """Asks for further turns until there are none, as the engines do."""

        def converse(self, requests: Any, sampling: Sampling, sink: Any, **limits: Any) -> None:
            numbered = 0
            while requests:
                for number, members in enumerate(self.generate(requests, sampling), start=numbered):
                    for member, completion in enumerate(members):
                        sink.finished(number, member, completion)
                numbered += len(requests)
                requests = sink.ready(wait=True)

    states = iter(range(2))
    settings = {"state": lambda example: next(states), "overlap": True, "max_tokens": 300}
    ended, waited = talked(Conversing(call("x"), "done"), tool=look, **settings)
    assert (len(ended.turns), ended.finish) == (1, "length")
    assert [turn.text for turn in waited.turns] == [call("x"), "done"]


def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_turn():
    first_came = threading.Event()

    def look(query: str) -> str:
        """Look."""
        if query == "first":
            time.sleep(1.3)
            first_came.set()
        else:
            first_came.wait(5)
            time.sleep(0.05)  # the late answer is there before this one
        return f"about {query}"

    script = ScriptedEngine(call("first"), call("second"), "done")
    (rollout,) = talked(script, size=1, tool=look, overlap=True, seconds=1.0, max_turns=3)
    assert [one.error for one in rollout.calls] == ["look took longer than 1 s", None]
    assert rollout.calls[1].result == "about second"


def test_half_an_emoji_in_a_call_is_refused_and_in_an_answer_replaced():
    half = call("x").replace('"x"', '"\\ud83d"')
    (rollout,) = talked(ScriptedEngine(half, "done"), size=1)
    assert rollout.calls[0].error == "the text of a call must be Unicode"

    def look(query: str) -> str:
        """Look."""
        return "smile \ud83d"

    (rollout,) = talked(ScriptedEngine(call("x"), "done"), size=1, tool=look)
    assert rollout.calls[0].result == "smile ?"


def chatty(policy: Any) -> Any:
    """Let every third token end a turn: a random policy would hardly ever end one."""
    policy.end_tokens = frozenset(range(0, 272, 3))
    return policy


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_continues_conversations_as_if_each_turn_were_asked_alone(small_policy, overlap):
    engine = Engine(chatty(small_policy), EngineConfig(max_sequences=3))
    limits = {"turn_tokens": 12, "max_turns": 3, "max_tokens": 400, "size": 4, "overlap": overlap}
    together = talked(engine, codec=Babbling(small_policy), **limits)

    class Rounds:
        generate = engine.generate

    in_rounds = talked(Rounds(), codec=Babbling(small_policy), **limits)
    assert [r.tokens for r in together] == [r.tokens for r in in_rounds]
    assert any(len(r.turns) == 3 for r in together)
    for ours, theirs in zip(together, in_rounds, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_while_a_tool_is_at_work_the_engine_goes_on_with_the_others(small_policy):
    """A call names the length of its turn: a longer turn ends only if the engine does not wait for tools."""
    longer = threading.Event()
    first: list[str] = []

    def look(query: str) -> str:
        """Look something up."""
        first.append(query)
        if query != first[0]:
            longer.set()
        return "met" if longer.wait(10) else "alone"

    engine = Engine(chatty(small_policy), EngineConfig())
    limits = {"turn_tokens": 12, "max_turns": 2, "max_tokens": 400, "size": 6, "overlap": True}
    rollouts = talked(engine, codec=Babbling(small_policy), tool=look, **limits)
    assert {call.result for rollout in rollouts for call in rollout.calls} == {"met"}


def test_what_is_trained_has_the_log_probabilities_of_a_plain_forward_pass(small_policy):
    import torch

    engine = Engine(chatty(small_policy), EngineConfig())
    rollouts = talked(
        engine, codec=Babbling(small_policy), turn_tokens=12, max_turns=3, max_tokens=400, size=3
    )
    assert any(len(rollout.turns) == 3 for rollout in rollouts)
    for rollout in rollouts:
        (sample,) = rollout_samples(replace(rollout, advantage=1.0), group=0)
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = small_model()(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        chosen = logits.gather(1, tokens[1:, None]).squeeze(1)
        for place, trained in enumerate(sample.trained):
            if trained:
                assert sample.logprobs[place] == pytest.approx(float(chosen[place - 1]), abs=1e-4)


def test_a_conversation_that_cannot_fit_the_model_is_refused(small_policy):
    engine = Engine(small_policy, EngineConfig())
    with pytest.raises(ConfigError, match=r"tools\.max_tokens"):
        talked(engine, codec=Babbling(small_policy), turn_tokens=5, max_tokens=2000)


TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = TOOL_TEMPLATE.replace("{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endif %}{% endfor %}")  # fmt: skip
"""Drops the thinking of earlier turns, as some reasoning models' templates do."""


def with_template(template: str) -> Any:
    from copy import deepcopy

    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_is_proven_append_only_or_the_first_difference_is_shown():
    assert not knows_tools(tiny_tokenizer())
    assert first_difference(tiny_tokenizer()) is None
    assert knows_tools(with_template(TOOL_TEMPLATE))
    assert first_difference(with_template(TOOL_TEMPLATE)) is None
    shown = first_difference(with_template(FORGETFUL))
    assert shown is not None
    assert "<think>" in shown


def test_a_template_that_ends_turns_otherwise_cannot_take_tools():
    odd = with_template("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with pytest.raises(ConfigError, match="end token"):
        first_difference(odd)
