"""Which prompts a run uses: the curriculum, and the exclusion of prompts that are too long.

The curriculum chooses examples whose answers will vary, by how often each kind of example succeeds. A prompt
is too long if it leaves no room for an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.model.policy import Policy
from groupwise.records import Example, Group, derive_seed
from groupwise.rollout.tools import tool_of
from groupwise.tasks import ExampleStream, Split, Task

Rates = Mapping[str, Sequence[float]]
"""For each kind of example: counts of scored and of right answers, with exponential decay."""
NOTHING_KNOWN: Rates = {}
FADING = 0.9
"""Decay factor of the counts at each group of the same kind."""
LEAST = 0.05
"""Lowest weight of a kind. It is still sampled now and then, because the policy changes."""


def check_kinds(task: Task, split: Split) -> None:
    """Refuse a curriculum if no two examples are of the same kind."""
    if isinstance(split.train, ExampleStream) and task.difficulty is None:
        raise ConfigError(
            f"rollout.curriculum: task {task.name} makes endless examples and does not say how they are "
            "alike; give it difficulty=…, a function from an example to a kind"
        )


def kind_of(task: Task, example: Example) -> str:
    """Return the kind of an example: its difficulty, or its fingerprint if the task defines none."""
    named = task.difficulty(example) if task.difficulty else None
    return named if named is not None else example.fingerprint


def success(rates: Rates, kind: str) -> float:
    """Return the estimated success rate of a kind; 0.5 before the first answer."""
    given, right = rates.get(kind, (0.0, 0.0))
    return (right + 1) / (given + 2)


def choose(
    candidates: Sequence[Example], count: int, *, task: Task, rates: Rates, seed_parts: tuple[int | str, ...]
) -> list[Example]:
    """Sample `count` candidates without replacement, weighted by the expected variance of their answers.

    Every candidate draws u^(1/weight) and the largest win (Efraimidis & Spirakis 2006).
    """

    def lot(place: int) -> float:
        p = success(rates, kind_of(task, candidates[place]))
        uniform = (derive_seed(*seed_parts, "curriculum", place) % 2**53 + 0.5) / 2**53
        return float(uniform ** (1 / max(LEAST, 4 * p * (1 - p))))

    winners = sorted(range(len(candidates)), key=lot, reverse=True)[:count]
    return [candidates[place] for place in sorted(winners)]


def updated(rates: Rates, groups: Iterable[Group], *, task: Task) -> dict[str, Sequence[float]]:
    """Return the rates with these groups counted. Failed rollouts are not counted."""
    known = dict(rates)
    for group in groups:
        kind = kind_of(task, group.example)
        given, right = known.get(kind, (0.0, 0.0))
        known[kind] = (
            FADING * given + len(group.valid),
            FADING * right + sum(map(task.is_right, group.valid)),
        )
    return known


APART = 2**40
"""Index offset between an example of a stream and its replacement; larger than any index of a run."""
ATTEMPTS = 1000
"""Consecutive overlong examples of a stream after which the run gives up."""


class PromptLimit:
    """The prompt length limit: `task.max_prompt_tokens`, or the context length minus the answer length."""

    def __init__(self, config: Config, *, task: Task, policy: Policy) -> None:
        self.task, self.policy = task, policy
        self.schemas = [tool_of(function).schema for function in task.tools]
        context, answer = policy.context_length, config.rollout.max_tokens
        self.reason = f"the model's context of {context} and rollout.max_tokens={answer} leave"
        self.remedy = "lower rollout.max_tokens, shorten the prompts or use a model with a longer context"
        if task.agent is None and task.is_multi_turn and config.tools.max_tokens > answer:
            answer = config.tools.max_tokens
            self.reason = f"the model's context of {context} and tools.max_tokens={answer} leave"
            self.remedy = self.remedy.replace("rollout.max_tokens", "tools.max_tokens")
        self.tokens = context - answer
        given = config.task.max_prompt_tokens
        if given is not None and given < self.tokens:
            self.tokens, self.reason, self.remedy = given, "task.max_prompt_tokens allows", "raise it"
        self._template: int | None = None
        """Upper bound on the tokens that the chat template adds to a message, from the first prompt."""

    def fits(self, example: Example) -> bool:
        """Whether the prompt of an example is short enough. An agent writes its prompts later."""
        if self.task.agent is not None:
            return True
        prompt = self.task.ask(example)
        contents = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
        characters = sum(len(content.encode()) for content in contents)
        # A tokenizer never makes more tokens than bytes, so most prompts fit without encoding them.
        if self._template is not None and characters + len(contents) * self._template <= self.tokens:
            return True
        length = len(self.policy.encode(prompt, tools=self.schemas))
        if self._template is None:
            self._template = length
        return length <= self.tokens

    def short(self, examples: Sequence[Example]) -> tuple[Example, ...]:
        return tuple(example for example in examples if self.fits(example))

    def leave_out(self, split: Split) -> tuple[Split, int]:
        """Return the split without overlong prompts, and their number.

        A stream generates other examples instead.
        """
        if self.tokens <= 0:
            raise self.refusal()
        held_out = self.short(split.held_out)
        left_out = len(split.held_out) - len(held_out)
        if isinstance(split.train, ExampleStream):
            return replace(split, train=ShortPrompts(split.train, self), held_out=held_out), left_out
        train = self.short(split.train)
        if not train:
            raise self.refusal()
        left_out += len(split.train) - len(train)
        return replace(split, train=train, held_out=held_out, size=len(train)), left_out

    def refusal(self) -> ConfigError:
        if self.tokens <= 0:
            return ConfigError(f"{self.reason} no room for a prompt: {self.remedy}")
        return ConfigError(
            f"every prompt has more than {max(0, self.tokens)} tokens, the most that {self.reason}: "
            f"{self.remedy}"
        )

    def notice(self, left_out: int) -> str:
        which = (
            "1 example is left out: its prompt has"
            if left_out == 1
            else f"{left_out} examples are left out: their prompts have"
        )
        return f"{which} more than {self.tokens} tokens, the most that {self.reason}"


@dataclass(frozen=True, slots=True)
class ShortPrompts:
    """A stream that replaces each example with an overlong prompt by another."""

    stream: ExampleStream
    limit: PromptLimit

    def train(self, index: int, *, seed: int) -> Example:
        for attempt in range(ATTEMPTS):
            example = self.stream.train(index + attempt * APART, seed=seed)
            if self.limit.fits(example):
                return example
        raise self.limit.refusal()

    def held_out(self, count: int) -> Sequence[Example]:
        return self.limit.short(self.stream.held_out(count))
