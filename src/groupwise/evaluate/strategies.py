"""Test-time strategies: spend more tokens on an answer by sampling several, thinking longer or revising.

    strategy = strategy_named("self-consistency:8")
    sampler = Sampler(codec=policy, engine=engine, sampling=sampling, seed=0)
    (answer,) = strategy([prompt], sampler, plain_judge())
    answer.rollout.text, answer.tokens

In this order: the sampler, the final answer and the greedy baseline; best-of-n and self-consistency;
budget forcing (s1, arXiv 2501.19393); test-time preference optimization (arXiv 2501.12895); strategies by
name, and their accuracy against tokens. To add a strategy, write a function of the type `Strategy` and add
it to `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from groupwise.config.coerce import between
from groupwise.errors import ConfigError
from groupwise.evaluate.held_out import question_in, score_groups, stated_answer
from groupwise.evaluate.intervals import Interval, exact_interval, majority
from groupwise.records import Example, Group, Message, Rollout, Sampling
from groupwise.rewards.extraction import final_answer, last_box, solution_of
from groupwise.rewards.runner import score_group
from groupwise.rollout.agent_rollouts import AgentRollouts
from groupwise.rollout.collect import Generate, PromptCodec, collect
from groupwise.rollout.tool_rollouts import Tools
from groupwise.tasks.task import Prompt, Task, closest


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
    tools: Tools | AgentRollouts | None = None
    """Tools that the policy may call. None: single-turn answers."""
    examples: Sequence[Example] = ()
    """The examples of the prompts, in order, for a state or an environment."""

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
        if tools is not None and tools.needs_example:
            pairs = zip(prompts, self.examples, strict=True)
            examples = [Example({"prompt": prompt, "about": dict(example)}) for prompt, example in pairs]
            tools = replace(tools, original=lambda example: Example(example["about"]))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScorer:
    """Extracts, compares and scores answers for a strategy."""

    states: Callable[[Rollout], str | None]
    """Extracts the answer from a completion."""
    alike: Callable[[str, str], bool]
    """Whether two extracted answers are equal."""
    score: Callable[[int, Rollout], float]
    """Scores an answer to the prompt at this index."""
    ends_thinking: str | None
    """Text between thinking and answer. None: there is none."""


def task_judge(task: Task, examples: Sequence[Example], *, seconds: float) -> AnswerScorer:
    """Compare answers as the task does and score them by its rewards.

    If the rewards read a gold answer, this measures the upper bound of a perfect judge.
    """

    def score(number: int, rollout: Rollout) -> float:
        group = Group(example=examples[number], rollouts=(rollout,))
        (scored,) = score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds).rollouts
        return scored.reward if scored.error is None else float("-inf")

    return AnswerScorer(
        states=lambda rollout: stated_answer(task, rollout),
        alike=task.alike,
        score=score,
        ends_thinking=task.ends_thinking,
    )


def plain_judge(*, ends_thinking: str | None = None) -> AnswerScorer:
    """Compare boxes, tagged answers or last lines; score by the confidence of the policy."""
    return AnswerScorer(
        states=stated_anywhere,
        alike=lambda one, other: one.casefold() == other.casefold(),
        score=lambda number, rollout: confidence(rollout),
        ends_thinking=ends_thinking,
    )


def stated_anywhere(rollout: Rollout) -> str | None:
    """Return the content of a box or of answer tags, else the last line."""
    text = rollout.text
    for find in (last_box, final_answer, solution_of):
        if (answer := find(text)) is not None:
            return answer
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def confidence(rollout: Rollout) -> float:
    """Return the mean log-probability of the sampled tokens."""
    chosen = [logprob for logprob, own in zip(rollout.logprobs, rollout.trained, strict=True) if own]
    return sum(chosen) / len(chosen) if chosen else float("-inf")


def self_consistency(count: int) -> Strategy:
    """Return the most frequent answer of `count` completions (Wang et al., arXiv 2203.11171)."""

    def answer(prompts: Sequence[Prompt], sampler: Sampler, scorer: AnswerScorer) -> list[StrategyAnswer]:
        chosen = []
        for rollouts in sampler.draw(prompts, count=count, purpose="several"):
            first = majority([scorer.states(rollout) for rollout in rollouts], scorer.alike)
            chosen.append(StrategyAnswer(rollout=rollouts[first or 0], tokens=spent(rollouts)))
        return chosen

    return answer


def best_of(count: int) -> Strategy:
    """Return the best-scoring of `count` completions, the first among ties."""

    def answer(prompts: Sequence[Prompt], sampler: Sampler, scorer: AnswerScorer) -> list[StrategyAnswer]:
        chosen = []
        for number, rollouts in enumerate(sampler.draw(prompts, count=count, purpose="several")):
            scores = [scorer.score(number, rollout) for rollout in rollouts]
            best = rollouts[scores.index(max(scores))]
            chosen.append(StrategyAnswer(rollout=best, tokens=spent(rollouts)))
        return chosen

    return answer


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


COMPARE = (
    "Question:\n{question}\n\nA good answer:\n{best}\n\nA worse answer:\n{worst}\n\n"
    "Say briefly what the good answer does better, and what is still wrong with it."
)
ADVISE = "{comparison}\n\nFrom this, give short advice on how to answer the question better."
RETRY = "{question}\n\nAdvice: {advice}"


def preference_optimization(rounds: int, *, count: int = 4) -> Strategy:
    """Draw `count` answers, improve on them for `rounds` rounds, and return the best of all."""

    def answer(prompts: Sequence[Prompt], sampler: Sampler, scorer: AnswerScorer) -> list[StrategyAnswer]:
        pools = [AnswerPool(prompt, number, scorer) for number, prompt in enumerate(prompts)]
        add_answers(pools, sampler.draw(prompts, count=count, purpose="several"))
        for turn in range(rounds):
            compared = comment(sampler, [pool.compare() for pool in pools], purpose=f"compare {turn}")
            advised = comment(sampler, [advise(words) for (words,) in compared], purpose=f"advise {turn}")
            for pool, (words,), (advice,) in zip(pools, compared, advised, strict=True):
                pool.tokens += words.length + advice.length
            retries = [retry(pool.prompt, advice) for pool, (advice,) in zip(pools, advised, strict=True)]
            add_answers(pools, sampler.draw(retries, count=count, purpose=f"retry {turn}"))
        return [StrategyAnswer(rollout=pool.best, tokens=pool.tokens) for pool in pools]

    return answer


class AnswerPool:
    """All answers to one prompt so far, with their scores."""

    def __init__(self, prompt: Prompt, number: int, scorer: AnswerScorer) -> None:
        self.prompt = prompt
        self.number = number
        self.scorer = scorer
        self.scored: list[tuple[float, Rollout]] = []
        self.tokens = 0

    def add(self, rollouts: Sequence[Rollout]) -> None:
        self.scored += [(self.scorer.score(self.number, rollout), rollout) for rollout in rollouts]
        self.tokens += spent(rollouts)

    @property
    def best(self) -> Rollout:
        return max(self.scored, key=lambda one: one[0])[1]

    def compare(self) -> Prompt:
        worst = min(self.scored, key=lambda one: one[0])[1]
        return COMPARE.format(question=question_in(self.prompt), best=self.best.text, worst=worst.text)


def comment(sampler: Sampler, prompts: Sequence[Prompt], *, purpose: str) -> list[list[Rollout]]:
    """Let the policy comment on answers in one turn without tools."""
    return sampler.draw(prompts, count=1, purpose=purpose, call_tools=False)


def add_answers(pools: Sequence[AnswerPool], drawn: Sequence[Sequence[Rollout]]) -> None:
    for pool, rollouts in zip(pools, drawn, strict=True):
        pool.add(rollouts)


def advise(comparison: Rollout) -> Prompt:
    return ADVISE.format(comparison=comparison.text)


def retry(prompt: Prompt, advice: Rollout) -> Prompt:
    """Return the prompt with the advice after the question; everything else, such as a prefill, stays."""
    if isinstance(prompt, str):
        return RETRY.format(question=prompt, advice=advice.text)
    last = max(index for index, message in enumerate(prompt) if message["role"] == "user")
    messages: list[Message] = list(prompt)
    content = RETRY.format(question=messages[last]["content"], advice=advice.text)
    messages[last] = {**messages[last], "content": content}
    return messages


STRATEGIES: Mapping[str, tuple[Callable[[int], Strategy], int]] = {
    "single": (lambda count: single, 1),
    "self-consistency": (self_consistency, 8),
    "best-of": (best_of, 8),
    "budget": (budget_forcing, 2),
    "tpo": (preference_optimization, 2),
}
"""Each strategy with the default of its number: answers, answers, answers, waits, rounds."""


ONE_TURN = ("budget",)
"""Strategies that edit a reply during generation, which is not possible in a conversation with tools."""


def strategy_named(name: str, *, tools: bool = False) -> Strategy:
    """Return the strategy for a name such as `self-consistency` or `self-consistency:16`.

    `tools`: whether the policy calls tools.
    """
    kind, colon, text = name.partition(":")
    if kind not in STRATEGIES:
        raise ConfigError(f"unknown strategy {kind!r}{closest(kind, STRATEGIES)}")
    if tools and kind in ONE_TURN:
        others = ", ".join(other for other in STRATEGIES if other not in ONE_TURN)
        raise ConfigError(f"the strategy {kind} cannot be used with tools; use one of {others}")
    make, number = STRATEGIES[kind]
    if colon:
        if not text.isdecimal():
            raise ConfigError(f"a strategy must have the form NAME or NAME:NUMBER; got {name!r}")
        number = int(text)
    between(f"the number of {name}", number, 1)
    return make(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Accuracy and token cost of a strategy."""

    accuracy: Interval
    tokens: float
    """Mean number of generated tokens per question."""
    right: tuple[bool, ...]
    """Whether the answer to each example is right."""


def spend(
    strategy: Strategy,
    task: Task,
    examples: Sequence[Example],
    *,
    draws: Sampler,
    seconds: float,
    concurrency: int = 64,
) -> TokenCost:
    """Answer every example by a strategy and score the final answers by the task's rewards."""
    scorer = task_judge(task, examples, seconds=seconds)
    draws = replace(draws, examples=examples)
    answers = strategy([task.ask(example) for example in examples], draws, scorer)
    groups = [
        Group(example=example, rollouts=(answer.rollout,))
        for example, answer in zip(examples, answers, strict=True)
    ]
    scored = score_groups(task, groups, seconds=seconds, concurrency=concurrency)
    right = [task.is_right(group.rollouts[0]) for group in scored]
    return TokenCost(
        accuracy=exact_interval(sum(right), len(right)),
        tokens=fmean(answer.tokens for answer in answers),
        right=tuple(right),
    )
