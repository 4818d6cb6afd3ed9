"""Test-time strategies: which answer is settled on, what was spent, and what the policy was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig, ToolsConfig
from groupwise.engine.engine import Engine
from groupwise.errors import ConfigError
from groupwise.evaluate.held_out import evaluate
from groupwise.evaluate.strategies import (
    AnswerScorer,
    Sampler,
    best_of,
    budget_forcing,
    confidence,
    plain_judge,
    preference_optimization,
    self_consistency,
    spend,
    stated_anywhere,
    strategy_named,
    task_judge,
)
from groupwise.isolation.worker import in_process
from groupwise.model.load import load_policy
from groupwise.records import Completion, Example, Request, Rollout, Sampling
from groupwise.rollout.tool_rollouts import Tools
from groupwise.tasks.builtin.countdown import countdown
from groupwise.tasks.builtin.search_qa import search_qa
from groupwise.tasks.task import Task

QUESTION = [{"role": "user", "content": "2 + 2?"}]


class Script:
    """Codec and Generate in one: `say` answers a prompt's text, byte by byte, for a member and a sampling."""

    end_tokens = frozenset({0})

    def __init__(self, say: Callable[[str, int, Sampling], str]) -> None:
        self.say = say
        self.asked: list[str] = []

    def encode(self, prompt: Any) -> tuple[int, ...]:
        text = prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)
        return tuple(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token).decode()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [
            [self.complete(request.prompt, member, sampling) for member in range(len(request.seeds))]
            for request in requests
        ]

    def complete(self, prompt: Sequence[int], member: int, sampling: Sampling) -> Completion:
        self.asked.append(self.decode(prompt))
        text, finish = self.say(self.asked[-1], member, sampling), "end"
        for stop in sampling.stop:
            if stop in text:
                text, finish = text[: text.index(stop) + len(stop)], "stop"
        tokens = (*text.encode(), *([0] if finish == "end" else []))
        if len(tokens) > sampling.max_tokens:
            tokens, finish = tokens[: sampling.max_tokens], "length"
        sure = tuple(-0.1 * (member + 1) for _ in tokens)
        return Completion(tokens=tokens, logprobs=sure, entropies=sure, finish=finish)  # type: ignore[arg-type]


class TalkingScript(Script):
    """The same with tools, whose results it reads as they are."""

    def encode(self, prompt: Any, *, tools: Any = ()) -> tuple[int, ...]:
        return super().encode(prompt)

    def encode_all_results(
        self, turns: Sequence[Sequence[str]], *, prefill: str, ended: bool, role: str = "tool"
    ) -> list[tuple[int, ...]]:
        return [tuple("".join(results).encode()) for results in turns]


def draws(script: Script, **sampling: Any) -> Sampler:
    return Sampler(codec=script, engine=script, sampling=Sampling(**{"max_tokens": 50} | sampling), seed=0)


def judge(**other: Any) -> AnswerScorer:
    def score(number: int, rollout: Rollout) -> float:
        return float(rollout.text == "4")

    known: dict[str, Any] = {"states": lambda rollout: rollout.text or None, "alike": str.__eq__,
                             "score": score, "ends_thinking": "</think>"}  # fmt: skip
    return AnswerScorer(**known | other)


def members(*texts: str) -> Script:
    return Script(lambda prompt, member, sampling: texts[member])


def test_self_consistency_takes_the_most_frequent_answer_and_counts_every_token():
    (found,) = self_consistency(5)([QUESTION], draws(members("4", "5", "55", "5", "")), judge())
    assert found.rollout.text == "5"
    assert found.tokens == 1 + 1 + 2 + 1 + 0 + 5  # and an end token each


def test_without_any_answer_the_first_completion_stands():
    (found,) = self_consistency(2)([QUESTION], draws(members("", "")), judge())
    assert found.rollout.text == ""


def test_best_of_takes_the_highest_score():
    (found,) = best_of(3)([QUESTION], draws(members("5", "4", "6")), judge())
    assert (found.rollout.text, found.tokens) == ("4", 6)
    # Without a judge of its own: the one that the policy was surest of.
    (found,) = best_of(3)([QUESTION], draws(members("a", "b", "c")), plain_judge())
    assert (found.rollout.text, confidence(found.rollout)) == ("a", pytest.approx(-0.1))


def test_several_prompts_are_judged_each_by_its_own_number():
    wanted = ["a", "b"]
    by_number = judge(score=lambda number, rollout: float(rollout.text == wanted[number]))
    found = best_of(2)(["first", "second"], draws(members("a", "b")), by_number)
    assert [one.rollout.text for one in found] == ["a", "b"]


def test_budget_forcing_holds_the_end_of_thinking_back():
    def say(prompt: str, member: int, sampling: Sampling) -> str:
        assert sampling.greedy
        if prompt.endswith("</think>"):
            return "5" if "Wait" not in prompt else "4"
        return "it is 4.</think>" if "Wait" in prompt else "it is 5.</think>"

    script = Script(say)
    (plain,) = budget_forcing(0)([QUESTION], draws(script), judge())
    assert plain.rollout.text == "it is 5.</think>5"
    (forced,) = budget_forcing(2, wait=" Wait,")([QUESTION], draws(script), judge())
    assert forced.rollout.text == "it is 5. Wait,it is 4. Wait,it is 4.</think>4"
    assert forced.tokens == 3 * len("it is 5.</think>") + len("4") + 1
    assert script.asked[-2:] == [
        "2 + 2?it is 5. Wait,it is 4. Wait,",
        "2 + 2?it is 5. Wait,it is 4. Wait,it is 4.</think>",
    ]


def test_budget_forcing_ends_thinking_that_uses_its_budget_up():
    def say(prompt: str, member: int, sampling: Sampling) -> str:
        return "4" if prompt.endswith("</think>") else "so " * 100

    (found,) = budget_forcing(3, thinking=9, wait="!")([QUESTION], draws(Script(say)), judge())
    assert found.rollout.text == "so so so </think>4"
    assert found.tokens == 9 + 2


def test_without_a_mark_between_thinking_and_answer_the_text_itself_goes_on():
    script = members("it is 5")
    (found,) = budget_forcing(1, wait=" Wait, ")([QUESTION], draws(script), judge(ends_thinking=None))
    assert found.rollout.text == "it is 5 Wait, it is 5"


def test_preference_optimization_asks_for_a_comparison_and_advice_and_tries_again():
    def say(prompt: str, member: int, sampling: Sampling) -> str:
        if "what the good answer does better" in prompt:
            return "it adds"
        if "give short advice" in prompt:
            return "add the numbers"
        return "4" if "Advice: add the numbers" in prompt and member == 1 else "5"

    script = Script(say)
    (found,) = preference_optimization(1, count=2)([QUESTION], draws(script), judge())
    assert found.rollout.text == "4"
    assert found.tokens == 2 + 2 + len("it adds") + 1 + len("add the numbers") + 1 + 2 + 2
    assert script.asked[2].startswith("Question:\n2 + 2?\n\nA good answer:\n5\n\nA worse answer:\n5")
    assert script.asked[3].startswith("it adds\n\nFrom this")
    assert script.asked[4] == "2 + 2?\n\nAdvice: add the numbers"


def test_advice_keeps_the_system_message_and_a_begun_reply():
    prompt = [{"role": "system", "content": "S"}, *QUESTION, {"role": "assistant", "content": "<think>"}]
    script = Script(lambda prompt, member, sampling: "x")
    preference_optimization(1, count=1)([prompt], draws(script), judge())
    assert script.asked[-1] == "S2 + 2?\n\nAdvice: x<think>"


def test_answers_are_found_wherever_they_usually_stand():
    def of(text: str) -> str | None:
        (found,) = strategy_named("single")([QUESTION], draws(members(text)), judge())
        return stated_anywhere(found.rollout)

    assert of(r"so \boxed{4} it is") == "4"
    assert of("hm</think><answer>2+2</answer>") == "2+2"
    assert of("first\nit is 4") == "it is 4"
    assert of("") is None


def test_a_strategy_has_a_name_and_perhaps_a_number():
    (found,) = strategy_named("best-of:2")([QUESTION], draws(members("5", "4")), judge())
    assert found.rollout.text == "4"
    with pytest.raises(ConfigError, match="unknown strategy 'best'; did you mean 'best-of'"):
        strategy_named("best:2")
    for bad in ("best-of:", "best-of:many", "best-of:-1"):
        with pytest.raises(ConfigError, match="NAME or NAME:NUMBER"):
            strategy_named(bad)
    with pytest.raises(ConfigError, match="must be at least 1"):
        strategy_named("best-of:0")


def test_every_strategy_answers_puzzles_with_a_real_policy_the_same_each_time():
    policy = load_policy(ModelConfig(device="cpu"), LoraConfig(r=0))
    task = countdown(numbers=3, largest=50)
    examples = task.examples.held_out(2)  # type: ignore[union-attr]
    drawing = Sampler(
        codec=policy, engine=Engine(policy, EngineConfig()), sampling=Sampling(max_tokens=48), seed=0
    )

    def found(name: str) -> tuple[float, tuple[bool, ...]]:
        result = spend(strategy_named(name), task, examples, draws=drawing, seconds=5.0)
        return result.tokens, result.right

    for name in ("single", "self-consistency:3", "best-of:3", "budget:1", "tpo:1"):
        assert found(name) == found(name)
    assert found("best-of:3")[0] == found("self-consistency:3")[0] > found("single")[0]


def test_strategies_run_the_tools_of_a_task_as_greedy_evaluation_does():
    policy = load_policy(ModelConfig(name="tiny-search", device="cpu"), LoraConfig(r=0))
    task, sampling = search_qa(), Sampling(max_tokens=64)
    engine, examples = Engine(policy, EngineConfig()), task.examples.held_out(8)  # type: ignore[union-attr]
    tools = Tools.of(task.tools, ToolsConfig())
    measured = evaluate(
        task, examples, codec=policy, engine=engine, sampling=sampling, samples=1, seed=0, seconds=5.0,
        tools=tools,
    )  # fmt: skip
    drawing = Sampler(codec=policy, engine=engine, sampling=sampling, seed=0, tools=tools)

    def right(name: str) -> tuple[bool, ...]:
        return spend(strategy_named(name), task, examples, draws=drawing, seconds=5.0).right

    assert right("single") == measured.greedy_right
    assert any(measured.greedy_right)
    assert sum(right("best-of:4")) >= sum(right("self-consistency:4"))  # it chooses by the rewards
    assert len(right("tpo:1")) == 8
    with pytest.raises(ConfigError, match="strategy budget cannot be used with tools; use one of single"):
        strategy_named("budget:2", tools=True)


def test_each_answer_of_a_strategy_works_on_a_state_of_its_own_example():
    def count_up(state: dict[str, int]) -> str:
        """Count up."""
        state["n"] += 1
        return str(state["n"])

    call = '<tool_call>{"name": "count_up", "arguments": {}}</tool_call>'
    script = TalkingScript(lambda prompt, member, sampling: prompt[-1] if prompt[-1].isdigit() else call)
    task = Task(
        name="counting",
        examples=[{"n": 3}, {"n": 7}],
        prompt=lambda example: "count",
        rewards={"right": lambda rollout, example: float(rollout.text == str(example["n"] + 1))},
        tools=[count_up],
        state=lambda example: {"n": example["n"]},
    )
    tools = Tools.of(task.tools, ToolsConfig(), state=task.state)
    examples = [Example(row) for row in task.examples]  # type: ignore[union-attr]
    drawing = replace(draws(script, max_tokens=100), tools=tools)
    for name in ("single", "best-of:2"):
        assert spend(strategy_named(name), task, examples, draws=drawing, seconds=5.0).right == (True, True)


def test_the_answers_of_a_strategy_are_scored_at_the_same_time():
    running: list[int] = []
    most: list[int] = []

    @in_process
    async def judge(rollout: Rollout, example: Example) -> float:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()
        return float(rollout.text == str(example["n"]))

    task = Task(name="t", examples=[{"n": n} for n in range(5)], prompt=str, rewards={"right": judge})
    examples = [Example(row) for row in task.examples]  # type: ignore[union-attr]
    script = TalkingScript(lambda prompt, member, sampling: "3")
    result = spend(strategy_named("single"), task, examples, draws=draws(script), seconds=5.0, concurrency=2)
    assert result.right == (False, False, False, True, False)
    assert max(most) == 2


def test_a_task_judges_by_its_own_rewards():
    example = Example({"numbers": [1, 2, 8], "target": 24})
    right, wrong = "so</think><answer>(1+2)*8</answer>", "so</think><answer>1+2+8</answer>"
    script = members(wrong, right)
    known = task_judge(countdown(), [example], seconds=5.0)
    (found,) = best_of(2)([countdown().ask(example)], draws(script), known)
    assert found.rollout.text == right
    assert (known.states(found.rollout), known.ends_thinking) == ("(1+2)*8", "</think>")
