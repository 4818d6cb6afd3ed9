"""Summaries of a text after thinking: close to a reference, and short."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.config.coerce import between, convert
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.extraction import END_THINK
from groupwise.rewards.text_rewards import Embed, shares_words, similar, without_thinking
from groupwise.tasks.builtin.search_qa import make_world
from groupwise.tasks.examples import Column, text
from groupwise.tasks.task import Task

SYSTEM = (
    "Summarize the user's text in one or two sentences. Think first, between <think> and </think>, about "
    "what matters in it. Then write the summary and nothing else."
)
PREFILL = "<think>\n"
NO_THINKING = -100.0
"""Reward `length` of an answer that does not end its thinking."""
FILLERS = (
    "The weather was mild that week.",
    "The trains ran late again, as they often do in autumn.",
    "Somebody had left a window open in the hall.",
    "There was talk of a new bridge, but nobody knew when it would come.",
    "The bakery on the corner had sold out by noon.",
    "Two dogs barked at a passing bicycle.",
    "The church clock was four minutes fast.",
    "A notice on the door asked visitors to wipe their shoes.",
)


def tldr(*, embedding: str | None = None, words: int = 20) -> Task:
    """Summarize a text: `--data trl-lib/tldr`, a file with columns text and answer, or generated texts.

    `embedding`: measure similarity by the cosine of embeddings (minilm, or a sentence-transformers model)
    instead of shared words; `words`: words of a summary that cost a reward of 1.
    """
    convert(embedding, to=str | None, setting="task.options.embedding")
    between("task.options.words", convert(words, to=int, setting="task.options.words"), 1)
    if embedding is None:
        similarity = shares_words(golds=reference)
    else:
        similarity = similar(golds=reference, embed=embed_by(embedding), baseline=0.0)
    return Task(
        name="tldr",
        examples=GeneratedTexts(),
        prompt=tldr_prompt,
        rewards={"similarity": similarity, "length": brevity(words)},
        weights={"similarity": 4.0, "length": 1.0},
        accuracy="similarity",
        correct_at=0.5,
        columns={
            "text": Column(read=text, names=("text", "prompt", "document", "article", "post"), judges=False),
            "answer": Column(read=text, names=("answer", "completion", "summary")),
        },
        gold=gold_completion,
        predicted=without_thinking,
        ends_thinking=END_THINK,
    )


def embed_by(name: str) -> Embed:
    """Return the function that embeds texts. A missing package is an error now, not in the first step."""
    from groupwise.retrieval.embed import embedding_named

    return embedding_named(name).queries


def tldr_prompt(example: Example) -> list[Message]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": example["text"]},
        {"role": "assistant", "content": PREFILL},
    ]


def reference(example: Example) -> Sequence[str]:
    return (example["answer"],)


def gold_completion(example: Example) -> str:
    return f"This is what matters.\n{END_THINK}\n{example['answer']}"


def brevity(words: int) -> Callable[[Rollout, Example], float]:
    """Make a reward: minus the number of words after the thinking, divided by `words`.

    Example: 30 words, words=20 -> -1.5; an answer that does not end its thinking -> -100
    """

    def length(rollout: Rollout, example: Example) -> float:
        if END_THINK not in rollout.text:
            return NO_THINKING
        return -len(without_thinking(rollout.text).split()) / words

    return length


@dataclass(frozen=True, slots=True)
class GeneratedTexts:
    """An `ExampleStream` of short texts in which one sentence matters."""

    def train(self, index: int, *, seed: int) -> Example:
        return generate(random.Random(f"tldr train {seed} {index}"), held_out=False)

    def held_out(self, count: int) -> list[Example]:
        """Return up to `count` distinct texts, all about people that training does not mention."""
        rng = random.Random("tldr held out")
        made = (generate(rng, held_out=True) for _ in range(20 * count))
        distinct: dict[Any, Example] = {example["text"]: example for example in made}
        return list(distinct.values())[:count]


def generate(rng: random.Random, *, held_out: bool) -> Example:
    """Hide a sentence about one person among sentences that do not matter."""
    world = make_world(0, people=480)
    people = sorted(e for e in world.facts if "town" in world.facts[e] and (e in world.held_out) == held_out)
    summary = world.documents[rng.choice(people)]
    sentences = rng.sample(FILLERS, rng.randint(3, 6))
    sentences.insert(rng.randint(0, len(sentences)), summary)
    return Example({"text": " ".join(sentences), "answer": summary})
