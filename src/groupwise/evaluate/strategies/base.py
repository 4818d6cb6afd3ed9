"""What strategies have in common: drawing answers to prompts, and the answer that is settled on."""

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
    """The answer to one prompt."""

    rollout: Rollout
    """`rollout.text` is all of it, also what was written before the policy was made to go on."""
    tokens: int
    """That the policy wrote on the way, whether or not they are part of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Whom strategies ask, and how."""

    codec: PromptCodec
    engine: Generate
    sampling: Sampling
    seed: int
    tools: Tools | None = None
    """What the policy may call while it answers. None: it answers in one turn."""
    examples: Sequence[Example] = ()
    """What the prompts ask about, in their order, for tools that work on a state of each."""

    def draw(
        self,
        prompts: Sequence[Prompt],
        *,
        count: int,
        purpose: str,
        sampling: Sampling | None = None,
        call_tools: bool = True,
    ) -> list[list[Rollout]]:
        """Return `count` answers to each prompt; their noise derives from seed, purpose and prompt.

        An answer is a whole conversation where there are tools, unless `call_tools` is off.
        """
        if not prompts:
            return []
        tools = self.tools if call_tools else None
        asked = [Example({"prompt": prompt}) for prompt in prompts]
        if tools is not None and (state := tools.state) is not None:
            about = zip(prompts, self.examples, strict=True)
            asked = [Example({"prompt": prompt, "about": dict(example)}) for prompt, example in about]
            tools = replace(tools, state=lambda example: state(Example(example["about"])))
        groups = collect(
            asked,
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


def single(prompts: Sequence[Prompt], draws: Sampler, judge: AnswerScorer) -> list[StrategyAnswer]:
    """One answer, greedy."""
    greedy = replace(draws.sampling, temperature=0.0)
    drawn = draws.draw(prompts, count=1, purpose="single", sampling=greedy)
    return [StrategyAnswer(rollout=rollout, tokens=rollout.length) for (rollout,) in drawn]


def begun(prompt: Prompt, text: str) -> Prompt:
    """Return the prompt with a beginning of the reply, which the policy is to continue."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        text = f"{last['content']}{text}"
    return [*messages, {"role": "assistant", "content": text}]
