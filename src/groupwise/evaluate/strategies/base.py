"""Common parts of strategies: the sampler, the final answer, and the greedy baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from groupwise.records import Example, Rollout, Sampling
from groupwise.rollout.collect import Generate, PromptCodec, Tools, collect
from groupwise.tasks.task import Prompt

if TYPE_CHECKING:
    from groupwise.evaluate.strategies.best_of_n import AnswerScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyAnswer:
    """The final answer to one prompt."""

    rollout: Rollout
    """`rollout.text` is the whole answer, including text before a forced continuation."""
    tokens: int
    """Number of tokens that the policy generated, whether or not they are part of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples answers from the policy for a strategy."""

    codec: PromptCodec
    engine: Generate
    sampling: Sampling
    seed: int
    tools: Tools | None = None
    """Tools that the policy may call. None: single-turn answers."""
    examples: Sequence[Example] = ()
    """The examples of the prompts, in order, for tools that need a state."""

    def draw(
        self,
        prompts: Sequence[Prompt],
        *,
        count: int,
        purpose: str,
        sampling: Sampling | None = None,
        call_tools: bool = True,
    ) -> list[list[Rollout]]:
        """Return `count` answers to each prompt. The noise is derived from seed, purpose and prompt.

        With tools, an answer is a whole conversation, unless `call_tools` is False.
        """
        if not prompts:
            return []
        tools = self.tools if call_tools else None
        examples = [Example({"prompt": prompt}) for prompt in prompts]
        if tools is not None and (state := tools.state) is not None:
            pairs = zip(prompts, self.examples, strict=True)
            examples = [Example({"prompt": prompt, "about": dict(example)}) for prompt, example in pairs]
            tools = replace(tools, state=lambda example: state(Example(example["about"])))
        groups = collect(
            examples,
            ask=lambda example: example["prompt"],
            codec=self.codec,
            engine=self.engine,
            sampling=sampling or self.sampling,
            group_size=count,
            seed_parts=(self.seed, purpose),
            tools=tools,
        )
        return [list(group.rollouts) for group in groups]


Strategy = Callable[[Sequence[Prompt], Sampler, "AnswerScorer"], list[StrategyAnswer]]


def spent(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.length for rollout in rollouts)


def single(prompts: Sequence[Prompt], sampler: Sampler, scorer: AnswerScorer) -> list[StrategyAnswer]:
    """Return one greedy answer to each prompt."""
    greedy = replace(sampler.sampling, temperature=0.0)
    drawn = sampler.draw(prompts, count=1, purpose="single", sampling=greedy)
    return [StrategyAnswer(rollout=rollout, tokens=rollout.length) for (rollout,) in drawn]


def with_prefill(prompt: Prompt, text: str) -> Prompt:
    """Return the prompt with a prefill that the policy continues."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        text = f"{last['content']}{text}"
    return [*messages, {"role": "assistant", "content": text}]
