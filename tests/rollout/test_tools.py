"""Tools: a typed function to a schema, text to calls, calls to results."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest

from groupwise.errors import ConfigError, RolloutError
from groupwise.retrieval.search_index import QueryBatcher
from groupwise.rollout.tool_calls import ParsedToolCall, read_calls
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.rollout.tools import MethodTools, ToolResult, tool_of, with_schema


def search(query: str, limit: int = 5, order: Literal["new", "old"] = "new") -> list[str]:
    """Search the documents.

    query: what to look for
    """
    return [query] * limit


async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def broken(text: str) -> str:
    """Always fail."""
    raise ValueError(f"cannot read {text}")


def busy() -> str:
    """Never come back."""
    while True:
        time.sleep(0.01)


def gone() -> str:
    """Be out of order."""
    raise RolloutError("the server is gone")


def find(query: str) -> ToolResult:
    """Find documents."""
    return ToolResult(f"about {query}", ("d1", "d2"))


def box(*functions, seconds=1.0, characters=100):
    return ToolExecutor.of(functions, seconds=seconds, characters=characters)


def called(toolbox, text, allowed=8):
    return toolbox.answer(read_calls(text), allowed=allowed)


def test_a_signature_and_a_docstring_are_the_schema():
    assert tool_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "limit": {"type": "integer"},
                    "order": {"enum": ["new", "old"]},
                },
                "required": ["query"],
            },
        },
    }


def test_a_function_that_cannot_be_a_tool_is_refused_with_a_sentence():
    def untyped(query):
        """Search."""

    def silent(query: str) -> str:
        return query

    def open_ended(*queries: str) -> str:
        """Search."""
        return ""

    for function, problem in (
        (untyped, "annotate the type of query"),
        (silent, "docstring"),
        (open_ended, "passable by name"),
    ):
        with pytest.raises(ConfigError, match=problem):
            tool_of(function)


CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "wishes"),
    [
        ("It is 7.", []),
        (CALL, [ParsedToolCall("search", {"query": "a"})]),
        (f"<think>I could {CALL}</think>\nNo.", []),  # thought, not called
        (f"<think>so</think>{CALL}\n{CALL}", [ParsedToolCall("search", {"query": "a"})] * 2),
        (
            '{"name": "search", "parameters": {"query": "a"}}',
            [ParsedToolCall("search", {"query": "a"})],
        ),  # Llama 3
        ('It says {"name": "x", "parameters": {}}', []),
    ],
)
def test_calls_are_read_out_of_a_turn(text, wishes):
    assert read_calls(text) == wishes


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>search(a)</tool_call>",
        '<tool_call>{"name": "search"',
        '<tool_call>["search"]</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": "a"}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_call_is_answered_with_an_error_and_seen_by_rewards(text):
    (call,) = called(box(search), text)
    assert call.error
    assert call.result.startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("{}", "needs the argument 'query'"),
        ('{"query": 3}', "query must be"),
        ('{"query": "a", "limit": true}', "limit must be"),
        ('{"query": "a", "order": "best"}', "order must be"),
        ('{"query": "a", "page": 1}', "no argument 'page'"),
    ],
)
def test_arguments_are_checked_before_the_function_runs(arguments, error):
    text = f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'
    (call,) = called(box(search), text)
    assert error in (call.error or "")


def wish(name, **arguments):
    return [ParsedToolCall(name, arguments)]


def test_what_a_tool_returns_is_what_is_read():
    toolbox = box(search, find, slow)
    assert toolbox.answer(wish("search", query="a", limit=2), allowed=1)[0].result == '["a", "a"]'
    (call,) = toolbox.answer(wish("find", query="b"), allowed=1)
    assert (call.result, call.found) == ("about b", ("d1", "d2"))
    assert toolbox.answer(wish("slow", seconds=0.0), allowed=1)[0].result == "done"


def test_a_result_that_cannot_be_written_is_an_error_that_goes_back():
    def odd() -> Any:
        """Return what JSON has no words for."""
        return {("a", 1): 2}

    (call,) = box(odd).answer(wish("odd"), allowed=1)
    assert (call.error or "").startswith("odd: keys must be str")


def test_errors_go_back_as_results_and_a_tools_own_failure_is_the_rollouts():
    toolbox = box(broken, gone, busy, slow, seconds=0.1)
    assert toolbox.answer(wish("broken", text="x"), allowed=1)[0].error == "broken: cannot read x"
    assert "no tool 'fly'" in (toolbox.answer(wish("fly"), allowed=1)[0].error or "")
    for late in (wish("busy"), wish("slow", seconds=5.0)):
        assert toolbox.answer(late, allowed=1)[0].error == f"{late[0].name} took longer than 0.1 s"
    with pytest.raises(RolloutError):
        toolbox.answer(wish("gone"), allowed=1)


def test_calls_past_the_limit_are_refused_and_long_results_are_cut():
    first, second = called(box(search, characters=4), CALL + CALL, allowed=1)
    assert first.result == '["a" …'
    assert "no more calls" in (second.error or "")


def test_async_calls_of_one_turn_run_at_the_same_time_beside_the_engine_and_their_results_keep_the_order():
    together = threading.Barrier(3, timeout=5)

    async def meet(number: int) -> str:
        """Wait for the others."""
        await asyncio.to_thread(together.wait)
        await asyncio.sleep(0.05 * (3 - number))
        return f"met {number}"

    calls = [call for number in range(3) for call in wish("meet", number=number)]
    answers = box(meet, seconds=5.0).answer(calls, allowed=3, beside=True)
    assert [call.result for call in answers] == ["met 0", "met 1", "met 2"]
    answers = box(slow, seconds=0.2).answer(
        [*wish("slow", seconds=9.0), *wish("nothing")], allowed=2, beside=True
    )
    assert [call.error for call in answers] == [
        "slow took longer than 0.2 s",
        "there is no tool 'nothing', only slow",
    ]


def test_of_calls_at_the_same_time_a_hanging_one_ends_alone_and_a_broken_one_fails_the_rollout():
    async def wait(seconds: float) -> str:
        """Wait, and keep the event loop."""
        if seconds < 0:
            raise RolloutError("no connection")
        time.sleep(seconds)
        return "done"

    toolbox = box(wait, seconds=0.3)
    started = time.monotonic()
    hung, fine = toolbox.answer(
        [*wish("wait", seconds=9.0), *wish("wait", seconds=0.0)], allowed=2, beside=True
    )
    assert (hung.error, fine.result) == ("wait took longer than 0.3 s", "done")
    assert time.monotonic() - started < 3
    with pytest.raises(RolloutError, match="no connection"):
        toolbox.answer([*wish("wait", seconds=0.0), *wish("wait", seconds=-1.0)], allowed=2, beside=True)


def test_a_tool_with_a_faulty_schema_fails_the_rollout_at_once():
    async def price(**arguments: Any) -> str:
        return "1"

    schema = {"type": "object", "properties": {"item": {"$ref": "#/nowhere"}}}
    toolbox = box(with_schema(price, "price", "Return a price.", schema), seconds=20.0)
    started = time.monotonic()
    for count in (1, 2):
        with pytest.raises(RolloutError, match="the JSON schema of price is not valid"):
            toolbox.answer(wish("price", item="tea") * count, allowed=2, beside=True)
    assert time.monotonic() - started < 10


def test_an_error_of_a_call_in_a_thread_is_raised_at_once_and_logged_nowhere(caplog):
    async def stop() -> str:
        """Stop the program."""
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        box(stop, seconds=20.0).answer(wish("stop") * 2, allowed=2, beside=True)
    assert time.monotonic() - started < 10
    for _ in range(100):  # the second call may still be under way
        if not any(thread.name == "groupwise-tool" for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    gc.collect()
    assert caplog.text == ""


def test_what_a_call_writes_the_next_call_of_the_turn_reads():
    notes: dict[str, str] = {}

    def write(text: str) -> str:
        """Write the note."""
        time.sleep(0.05)
        notes["note"] = text
        return "written"

    async def read() -> str:
        """Read the note."""
        await asyncio.sleep(0.02)
        return notes.get("note", "nothing")

    calls = [*wish("read"), *wish("write", text="a"), *wish("read"), *wish("write", text="b"), *wish("read")]
    answers = box(write, read).answer(calls, allowed=5, beside=True)
    assert [call.result for call in answers] == ["nothing", "written", "a", "written", "b"]


def test_calls_that_share_the_state_of_a_rollout_run_in_order():
    def note(text: str, state: list[str]) -> str:
        """Note."""
        before = list(state)
        time.sleep(0.02)
        state.append(text)
        return "".join(before)

    state: list[str] = []
    calls = [call for letter in "abc" for call in wish("note", text=letter)]
    answers = box(note).answer(calls, allowed=2, state=state, beside=True)
    assert [call.result for call in answers[:2]] == ["", "a"]
    assert answers[2].error == "no more calls are allowed; answer with what you have"
    assert state == ["a", "b"]


def test_searches_that_come_at_once_are_answered_in_one_batch():
    batches: list[list[str]] = []
    first_is_in, go_on = threading.Event(), threading.Event()

    def answer_all(queries: list[str]) -> list[str]:
        batches.append(queries)
        first_is_in.set()
        go_on.wait(10)
        return [query.upper() for query in queries]

    ask = QueryBatcher(answer_all)
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(ask, "a")
        first_is_in.wait(10)
        others = [threads.submit(ask, query) for query in "bcd"]
        while ask.waiting < 3:
            time.sleep(0.001)
        go_on.set()
        assert [answer.result(10) for answer in (first, *others)] == ["A", "B", "C", "D"]
    assert [sorted(batch) for batch in batches] == [["a"], ["b", "c", "d"]]


def test_a_batch_that_fails_fails_everyone_in_it_and_no_one_later():
    answers = iter([ValueError("no"), ["fine"]])

    def answer_all(queries: list[str]) -> list[str]:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    ask = QueryBatcher(answer_all)
    with pytest.raises(ValueError, match="no"):
        ask("a")
    assert ask("b") == "fine"


class Weather:
    """Methods as tools, one of which has an argument with the name of the rollout's state."""

    def reset(self, **columns):
        return None

    def forecast(self, state: str) -> str:
        """Return the weather of a federal state."""
        return f"sunny in {state}"


def test_a_method_or_server_tool_with_an_argument_called_state_is_refused():
    with pytest.raises(ConfigError, match="tool forecast: rename its argument `state`"):
        MethodTools(Weather)
    schema = {"type": "object", "properties": {"state": {"type": "string"}}}
    with pytest.raises(ConfigError, match="tool forecast: rename its argument `state`"):
        with_schema(lambda state, **more: "", "forecast", None, schema, takes_state=True)
