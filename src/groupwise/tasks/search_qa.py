"""Search, read, answer: questions of one to three hops about an invented world, with a search tool."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupwise.config.checks import between
from groupwise.config.values import convert
from groupwise.errors import ConfigError
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.agent import mrr, thinks_every_turn
from groupwise.rewards.tags import final_answer
from groupwise.rollout.tools import Found
from groupwise.tasks.search_world import QUESTIONS, RELATIONS, World, make_world
from groupwise.tasks.task import Task

SYSTEM = (
    "You answer questions about people, towns and companies. "
    "You know none of them: search, one step at a time. "
    "Think in <think> </think> tags before each search and before the answer. "
    "Give the answer in <answer> </answer> tags."
)
RESULTS = 3
"""Documents that a search returns."""


def search_qa(*, world: int = 0, people: int = 480, hops: int | Sequence[int] = (1, 2, 3)) -> Task:
    """Answer questions by searching, of one hop and more, in a generated world: endless, offline.

    `world`: which one, by number; `people`: how many live in it; `hops`: how many searches questions take,
    one number or some.
    """
    convert(world, to=int, setting="task.options.world")
    between("task.options.people", convert(people, to=int, setting="task.options.people"), 40, 2304)
    counts = hop_counts(hops)
    paths = [path for path in QUESTIONS if len(path) in counts]
    made = make_world(world, people=people)

    def search(query: str) -> Found:
        """Search the documents about people, towns and companies.

        query: words to look for
        """
        names = made.search(query, RESULTS)
        lines = [f"{rank}. {made.documents[name]}" for rank, name in enumerate(names, start=1)]
        return Found("\n".join(lines) or "Nothing found.", tuple(names))

    return Task(
        name="search_qa",
        examples=Questions(world=made, paths=tuple(paths)),
        prompt=search_prompt,
        rewards={"answer": right_answer, "mrr": mrr(needed=needed_documents), "format": thinks_every_turn},
        weights={"mrr": 0.5, "format": 0.2},
        accuracy="answer",
        predicted=final_answer,
        gold=last_turn,
        worked=lambda example, rng: worked_search(example, rng, search),
        difficulty=difficulty,
        tools=[search],
    )


def hop_counts(hops: object) -> list[int]:
    """Return how many hops questions may take, or refuse the option."""
    counts = hops if isinstance(hops, Sequence) else [hops]
    if counts and all(type(count) is int and count in (1, 2, 3) for count in counts):
        return list(counts)
    raise ConfigError(f"search_qa: hops must be some of 1, 2 and 3; got {hops!r}")


def search_prompt(example: Example) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]


def last_turn(example: Example) -> str:
    return f"<think> {example['answer']}</think>\n<answer> {example['answer']}</answer>"


def worked_search(
    example: Example, rng: random.Random, search: Callable[[str], Found]
) -> list[Message] | None:
    """Search for each hop's document, then answer; None where a search does not find its document."""
    subject = example["documents"][0]
    path = next(p for p, text in QUESTIONS.items() if text.format(s=f" {subject}") == example["question"])
    messages: list[Message] = []
    for entity, relation in zip(example["documents"], path, strict=True):
        word = RELATIONS[relation]
        queries = rng.sample([f" {entity}", f" {entity} {word}"], 2)
        found = {query: search(query) for query in queries}
        query = next((query for query in queries if entity in found[query].names), None)
        if query is None:
            return None
        call = {"function": {"name": "search", "arguments": {"query": query}}}
        thought = f"<think> {entity} {word}</think>\n"
        messages += [
            {"role": "assistant", "content": thought, "tool_calls": [call]},
            {"role": "tool", "name": "search", "content": found[query].text},
        ]
    return [*messages, {"role": "assistant", "content": last_turn(example)}]


def difficulty(example: Example) -> str | None:
    """How many searches a question takes; None where the row does not say."""
    return f"hops {example['hops']}" if "hops" in example else None


def needed_documents(example: Example) -> list[tuple[str, ...]]:
    """One document for each hop."""
    return [(name,) for name in example["documents"]]


def right_answer(rollout: Rollout, example: Example) -> float:
    """1 for the answer, whatever its case."""
    answer = final_answer(rollout.text)
    return float(answer is not None and answer.casefold() == str(example["answer"]).casefold())


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """A `Stream` of questions about a world."""

    world: World
    paths: tuple[tuple[str, ...], ...]

    def train(self, index: int, *, seed: int) -> Example:
        return self.draw(random.Random(f"train {seed} {index}"), held_out=False)

    def held_out(self, count: int) -> list[Example]:
        """Return up to `count` different questions: fewer when the world is too small for that many."""
        rng = random.Random("held out")
        found: dict[str, Example] = {}
        for _ in range(20 * count):
            example = self.draw(rng, held_out=True)
            found.setdefault(example["question"], example)
            if len(found) == count:
                break
        return list(found.values())

    def draw(self, rng: random.Random, *, held_out: bool) -> Example:
        """Draw a question about one part of the world."""
        path = rng.choice(self.paths)
        facts = self.world.facts
        subjects = sorted(e for e in facts if path[0] in facts[e] and (e in self.world.held_out) == held_out)
        return self.example(rng.choice(subjects), path)

    def example(self, subject: str, path: tuple[str, ...]) -> Example:
        *between, answer = self.world.follow(subject, path)
        return Example(
            {
                "question": QUESTIONS[path].format(s=f" {subject}"),
                "answer": answer,
                "documents": [subject, *between],
                "hops": len(path),
            }
        )
