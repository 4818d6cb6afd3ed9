"""Budget forcing (s1, arXiv 2501.19393): thinking is lengthened by holding its end back, or cut short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from groupwise.evaluate.strategies.base import Sampler, Strategy, StrategyAnswer, begun
from groupwise.evaluate.strategies.best_of_n import AnswerScorer
from groupwise.records import Rollout, Sampling
from groupwise.tasks.task import Prompt

WAIT = "\nWait,"


@dataclass(slots=True)
class Thought:
    """One answer on its way."""

    prompt: Prompt
    text: str = ""
    tokens: int = 0
    ended: bool = True
    """Whether the policy stopped thinking by itself; False: the budget did."""
    last: Rollout | None = None

    def goes_on(self, rollout: Rollout, end: str | None) -> None:
        written = rollout.text if end is None else rollout.text.partition(end)[0]
        self.text += written
        self.tokens += rollout.length
        self.ended = rollout.finish != "length"
        self.last = rollout


def budget_forcing(
    waits: int, *, wait: str = WAIT, thinking: int | None = None, answering: int = 64
) -> Strategy:
    """Hold the end of thinking back `waits` times, then let the policy answer; all greedy.

    Each time the policy wants to stop thinking, `wait` is written instead and it goes on. A segment may take
    `thinking` tokens (None: as many as an answer may have); when they are used up, thinking is over.
    """

    def answer(prompts: Sequence[Prompt], draws: Sampler, judge: AnswerScorer) -> list[StrategyAnswer]:
        end = judge.ends_thinking
        greedy = replace(draws.sampling, temperature=0.0)
        stop = greedy.stop if end is None else (*greedy.stop, end)
        segment = replace(greedy, max_tokens=thinking or greedy.max_tokens, stop=stop)
        thoughts = [Thought(prompt) for prompt in prompts]
        for held_back in range(waits + 1):
            going = [one for one in thoughts if one.ended]
            for one in going if held_back else ():
                one.text += wait
            think(going, draws, segment, end=end)
        if end is not None:
            conclude(thoughts, draws, replace(greedy, max_tokens=answering), end=end)
        return [settled(one) for one in thoughts]

    return answer


def think(thoughts: Sequence[Thought], draws: Sampler, sampling: Sampling, *, end: str | None) -> None:
    """Let each go on until it wants to stop or has used its tokens up."""
    prompts = [begun(one.prompt, one.text) for one in thoughts]
    drawn = draws.draw(prompts, count=1, purpose="think", sampling=sampling)
    for one, (rollout,) in zip(thoughts, drawn, strict=True):
        one.goes_on(rollout, end)


def conclude(thoughts: Sequence[Thought], draws: Sampler, sampling: Sampling, *, end: str) -> None:
    """Write the end of thinking and let the policy answer."""
    for one in thoughts:
        one.text += end
    prompts = [begun(one.prompt, one.text) for one in thoughts]
    for one, (rollout,) in zip(
        thoughts, draws.draw(prompts, count=1, purpose="answer", sampling=sampling), strict=True
    ):
        one.goes_on(rollout, None)


def settled(thought: Thought) -> StrategyAnswer:
    assert thought.last is not None
    rollout = replace(thought.last, text=thought.text, prompt=thought.prompt)
    return StrategyAnswer(rollout=rollout, tokens=thought.tokens)
