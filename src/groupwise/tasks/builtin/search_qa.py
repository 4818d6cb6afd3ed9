"""Multi-hop questions over a generated world of people, towns and companies, with a search tool.

Each entity has a short document. A question follows relations from one entity to the next, and each hop
needs the document of the entity it starts from. The world has two parts without links between them, one
for training and one held out: memorizing one does not help on the other. One index covers all documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from groupwise.config.coerce import between, convert
from groupwise.errors import ConfigError
from groupwise.records import Example, Message, Rollout
from groupwise.retrieval.ranking import BM25Index
from groupwise.rewards.extraction import final_answer
from groupwise.rewards.text_rewards import mrr, thinks_every_turn
from groupwise.rollout.tools import ToolResult
from groupwise.tasks.task import Task


def listed(words: str) -> list[str]:
    return words.split()


FIRST = listed(
    "Ada Bela Cora Dana Edda Fina Gwen Hana Ilka Jana Kira Lena Mara Nora Olga Pia Rosa Sina Tara Ulla Vera "
    "Wilma Yara Zita Alex Boris Carl Dino Emil Felix Georg Hugo Ivo Jonas Karl Leo Max Nils Otto Paul Quin "
    "Rolf Sven Theo Udo Viktor Wim Xaver"
)
LAST = listed(
    "Abel Baum Celan Dorn Eckert Falk Grau Hahn Imhof Jung Klein Lang Moor Nagel Oster Pohl Quast Rau Sand "
    "Thal Uhl Velk Wolf Zorn Amsel Busch Clerk Drexel Ebner Frost Gabel Horn Issel Jost Krug Lamm Munk Noll "
    "Otter Pfau Reh Specht Trapp Urban Vogt Wendt Zahn Adler"
)
TOWNS = listed(
    "Arvel Bastow Corin Delmar Estry Fennick Garth Holm Isley Jarrow Kelby Lorne Marsk Norwin Orby Penwick "
    "Quorn Redmar Selby Tolm Ulver Varn Wenlow Yarm Zennor Ashby Brill Cray Dunmor Elstow Fairn Glenby "
    "Harwin Ickham Jura Kirn Lydd Moffat Nairn Oban"
)
RIVERS = listed(
    "Aln Bure Cam Dee Esk Fal Gade Hull Irt Jed Kent Lune Mole Nene Ouse Parr Ribble Severn Tay Ure Vyrn Wye "
    "Yare Avon Brue Clun Dove Exe Frome Greta"
)
COMPANIES = listed(
    "Altex Borgo Cintra Dexa Elmo Fabrix Gloria Hexal Inkora Jupo Kolba Lumex Monda Nexo Orbis Palma Quadra "
    "Rondo Salto Temba Unico Vesta Wexa Xylo Zando Arko Bolero Cobra Delfi Exakt"
)
PRODUCTS = listed(
    "bells boats books boots bread candles carpets chairs cheese clocks coats gates glasses gloves hats ink "
    "kites knives lamps locks mirrors nets paper pipes ropes saddles soap tea toys wagons"
)
INSTRUMENTS = listed(
    "accordion banjo bassoon bugle cello clarinet cornet drums fiddle flute guitar harp horn lute mandolin "
    "oboe organ piano sitar trombone trumpet tuba viola zither"
)

RELATIONS = {
    "town": "lives",
    "company": "works",
    "instrument": "plays",
    "river": "river",
    "mayor": "mayor",
    "product": "makes",
    "owner": "owner",
}
"""Each relation with the word for it in documents."""

QUESTIONS = {
    ("instrument",): "What does{s} play?",
    ("town", "river"): "On which river does{s} live?",
    ("company", "product"): "What does the employer of{s} make?",
    ("mayor", "instrument"): "What does the mayor of{s} play?",
    ("owner", "town"): "Where does the owner of{s} live?",
    ("town", "mayor", "instrument"): "What does the mayor of the home of{s} play?",
}
"""Question templates by the relations that lead to the answer. A space precedes the entity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Facts, a document for each entity, and an index over the documents."""

    facts: dict[str, dict[str, str]]
    """Values by entity and relation."""
    documents: dict[str, str]
    """Texts by entity, which is also the document's name."""
    index: BM25Index
    held_out: frozenset[str]
    """Entities of the held-out part."""

    def follow(self, entity: str, path: tuple[str, ...]) -> Iterator[str]:
        """Yield the entity that each relation of a path leads to; the last one is the answer."""
        for relation in path:
            entity = self.facts[entity][relation]
            yield entity

    def search(self, query: str, count: int) -> list[str]:
        """Return the names of the best documents."""
        names = list(self.documents)
        return [names[number] for number in self.index.search(query, count)[0]]


@lru_cache(maxsize=8)
def make_world(seed: int, *, people: int) -> World:
    """Generate a world deterministically from a seed. A quarter of it is held out."""
    rng = random.Random(f"world {seed}")
    names = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], people)
    towns, companies = rng.sample(TOWNS, len(TOWNS)), rng.sample(COMPANIES, len(COMPANIES))
    facts: dict[str, dict[str, str]] = {}
    held_out: set[str] = set()
    for part, (low, high) in enumerate(((0.0, 0.75), (0.75, 1.0))):
        some = [pool[int(low * len(pool)) : int(high * len(pool))] for pool in (names, towns, companies)]
        facts |= invent(rng, *some)
        if part:
            held_out.update(*some)
    order = rng.sample(list(facts), len(facts))
    documents = {entity: document(entity, facts[entity]) for entity in order}
    return World(
        facts=facts,
        documents=documents,
        index=BM25Index.of(documents.values()),
        held_out=frozenset(held_out),
    )


def invent(
    rng: random.Random, people: list[str], towns: list[str], companies: list[str]
) -> dict[str, dict[str, str]]:
    """Generate facts that link these entities only with each other."""
    facts = {}
    for name in people:
        facts[name] = {
            "town": rng.choice(towns),
            "company": rng.choice(companies),
            "instrument": rng.choice(INSTRUMENTS),
        }
    for town in towns:
        facts[town] = {"river": rng.choice(RIVERS), "mayor": rng.choice(people)}
    for company in companies:
        facts[company] = {"product": rng.choice(PRODUCTS), "owner": rng.choice(people)}
    return facts


def document(entity: str, facts: dict[str, str]) -> str:
    """Write the document of an entity."""
    match facts:
        case {"town": town, "company": company, "instrument": instrument}:
            return f"{entity} lives in {town}, works for {company} and plays the {instrument}."
        case {"river": river, "mayor": mayor}:
            return f"{entity} lies on the river {river}. The mayor is {mayor}."
        case {"product": product, "owner": owner}:
            return f"{entity} makes {product}. The owner is {owner}."
    raise AssertionError(facts)


SYSTEM = (
    "You answer questions about people, towns and companies. "
    "You know none of them: search, one step at a time. "
    "Think in <think> </think> tags before each search and before the answer. "
    "Give the answer in <answer> </answer> tags."
)
RESULTS = 3
"""Number of documents that a search returns."""


def search_qa(*, world: int = 0, people: int = 480, hops: int | Sequence[int] = (1, 2, 3)) -> Task:
    """Answer questions of one or more hops by searching a generated world. Endless and offline.

    `world`: seed of the world; `people`: number of people in it; `hops`: number of searches per question,
    an integer or a list.
    """
    convert(world, to=int, setting="task.options.world")
    between("task.options.people", convert(people, to=int, setting="task.options.people"), 40, 2304)
    counts = hop_counts(hops)
    paths = [path for path in QUESTIONS if len(path) in counts]
    made = make_world(world, people=people)

    def search(query: str) -> ToolResult:
        """Search the documents about people, towns and companies.

        query: words to look for
        """
        names = made.search(query, RESULTS)
        lines = [f"{rank}. {made.documents[name]}" for rank, name in enumerate(names, start=1)]
        return ToolResult("\n".join(lines) or "Nothing found.", tuple(names))

    return Task(
        name="search_qa",
        examples=QuestionStream(world=made, paths=tuple(paths)),
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
    """Return the allowed numbers of hops; raise ConfigError if the option is invalid."""
    counts = hops if isinstance(hops, Sequence) else [hops]
    if counts and all(type(count) is int and count in (1, 2, 3) for count in counts):
        return list(counts)
    raise ConfigError(f"search_qa: hops must be one or more of 1, 2 and 3; got {hops!r}")


def search_prompt(example: Example) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]


def last_turn(example: Example) -> str:
    return f"<think> {example['answer']}</think>\n<answer> {example['answer']}</answer>"


def worked_search(
    example: Example, rng: random.Random, search: Callable[[str], ToolResult]
) -> list[Message] | None:
    """Return a search for each hop's document, then the answer; None if a search misses its document."""
    subject = example["documents"][0]
    path = next(p for p, text in QUESTIONS.items() if text.format(s=f" {subject}") == example["question"])
    messages: list[Message] = []
    for entity, relation in zip(example["documents"], path, strict=True):
        word = RELATIONS[relation]
        queries = rng.sample([f" {entity}", f" {entity} {word}"], 2)
        results = {query: search(query) for query in queries}
        query = next((query for query in queries if entity in results[query].names), None)
        if query is None:
            return None
        call = {"function": {"name": "search", "arguments": {"query": query}}}
        thought = f"<think> {entity} {word}</think>\n"
        messages += [
            {"role": "assistant", "content": thought, "tool_calls": [call]},
            {"role": "tool", "name": "search", "content": results[query].text},
        ]
    return [*messages, {"role": "assistant", "content": last_turn(example)}]


def difficulty(example: Example) -> str | None:
    """Return the number of hops of a question; None if the row does not have it."""
    return f"hops {example['hops']}" if "hops" in example else None


def needed_documents(example: Example) -> list[tuple[str, ...]]:
    """Return the one document that each hop needs."""
    return [(name,) for name in example["documents"]]


def right_answer(rollout: Rollout, example: Example) -> float:
    """Return 1 for the right answer, ignoring case, else 0."""
    answer = final_answer(rollout.text)
    return float(answer is not None and answer.casefold() == str(example["answer"]).casefold())


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionStream:
    """An `ExampleStream` of questions about a world."""

    world: World
    paths: tuple[tuple[str, ...], ...]

    def train(self, index: int, *, seed: int) -> Example:
        return self.draw(random.Random(f"train {seed} {index}"), held_out=False)

    def held_out(self, count: int) -> list[Example]:
        """Return up to `count` distinct questions; fewer if the world is too small."""
        rng = random.Random("held out")
        questions: dict[str, Example] = {}
        for _ in range(20 * count):
            example = self.draw(rng, held_out=True)
            questions.setdefault(example["question"], example)
            if len(questions) == count:
                break
        return list(questions.values())

    def draw(self, rng: random.Random, *, held_out: bool) -> Example:
        """Draw a question about the training or the held-out part of the world."""
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
