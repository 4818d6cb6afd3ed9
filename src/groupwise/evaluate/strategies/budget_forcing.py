"""Budget forcing (s1, arXiv 2501.19393): extend thinking by suppressing its end, or cut it short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from groupwise.evaluate.strategies.base import Sampler, Strategy, StrategyAnswer, with_prefill
from groupwise.evaluate.strategies.best_of_n import AnswerScorer
from groupwise.records import Rollout, Sampling
from groupwise.tasks.task import Prompt

WAIT = "\nWait,"


@dataclass(slots=True)
class Thought:
    """An answer in progress."""

    prompt: Prompt
    text: str = ""
    tokens: int = 0
    ended: bool = True
    """Whether the policy stopped thinking by itself, rather than by the budget."""
    last: Rollout | None = None

    def extend(self, rollout: Rollout, end: str | None) -> None:
        written = rollout.text if end is None else rollout.text.partition(end)[0]
        self.text += written
        self.tokens += rollout.length
        self.ended = rollout.finish != "length"
        self.last = rollout


def budget_forcing(
    waits: int, *, wait: str = WAIT, thinking: int | None = None, answering: int = 64
) -> Strategy:
    """Suppress the end of thinking `waits` times, then let the policy answer. Decoding is greedy.

    Each time the policy ends its thinking, `wait` is appended instead and it continues. `thinking` limits the
    tokens of a segment (None: the limit of an answer); a segment that reaches it ends the thinking.
    """

    def answer(prompts: Sequence[Prompt], sampler: Sampler, scorer: AnswerScorer) -> list[StrategyAnswer]:
        end = scorer.ends_thinking
        greedy = replace(sampler.sampling, temperature=0.0)
        stop = greedy.stop if end is None else (*greedy.stop, end)
        segment = replace(greedy, max_tokens=thinking or greedy.max_tokens, stop=stop)
        thoughts = [Thought(prompt) for prompt in prompts]
        for held_back in range(waits + 1):
            active = [one for one in thoughts if one.ended]
            for one in active if held_back else ():
                one.text += wait
            think(active, sampler, segment, end=end)
        if end is not None:
            conclude(thoughts, sampler, replace(greedy, max_tokens=answering), end=end)
        return [as_answer(one) for one in thoughts]

    return answer


def think(thoughts: Sequence[Thought], sampler: Sampler, sampling: Sampling, *, end: str | None) -> None:
    """Continue each thought until it ends or reaches its token limit."""
    prompts = [with_prefill(one.prompt, one.text) for one in thoughts]
    drawn = sampler.draw(prompts, count=1, purpose="think", sampling=sampling)
    for one, (rollout,) in zip(thoughts, drawn, strict=True):
        one.extend(rollout, end)


def conclude(thoughts: Sequence[Thought], sampler: Sampler, sampling: Sampling, *, end: str) -> None:
    """Append the end of thinking and let the policy answer."""
    for one in thoughts:
        one.text += end
    prompts = [with_prefill(one.prompt, one.text) for one in thoughts]
    for one, (rollout,) in zip(
        thoughts, sampler.draw(prompts, count=1, purpose="answer", sampling=sampling), strict=True
    ):
        one.extend(rollout, None)


def as_answer(thought: Thought) -> StrategyAnswer:
    assert thought.last is not None
    rollout = replace(thought.last, text=thought.text, prompt=thought.prompt)
    return StrategyAnswer(rollout=rollout, tokens=thought.tokens)
