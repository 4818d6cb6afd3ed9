"""An invented world to ask about: people, towns and companies, a short document on each.

A question follows relations from one entity to the next, and each hop needs the document of the entity
it starts from. The world is in two parts that know nothing of each other, one to train on and one held
out: nothing learned by heart on the one helps on the other. All documents are in one pile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from groupwise.retrieval.sparse import SparseIndex

FIRST = [
    "Ada",
    "Bela",
    "Cora",
    "Dana",
    "Edda",
    "Fina",
    "Gwen",
    "Hana",
    "Ilka",
    "Jana",
    "Kira",
    "Lena",
    "Mara",
    "Nora",
    "Olga",
    "Pia",
    "Rosa",
    "Sina",
    "Tara",
    "Ulla",
    "Vera",
    "Wilma",
    "Yara",
    "Zita",
    "Alex",
    "Boris",
    "Carl",
    "Dino",
    "Emil",
    "Felix",
    "Georg",
    "Hugo",
    "Ivo",
    "Jonas",
    "Karl",
    "Leo",
    "Max",
    "Nils",
    "Otto",
    "Paul",
    "Quin",
    "Rolf",
    "Sven",
    "Theo",
    "Udo",
    "Viktor",
    "Wim",
    "Xaver",
]
LAST = [
    "Abel",
    "Baum",
    "Celan",
    "Dorn",
    "Eckert",
    "Falk",
    "Grau",
    "Hahn",
    "Imhof",
    "Jung",
    "Klein",
    "Lang",
    "Moor",
    "Nagel",
    "Oster",
    "Pohl",
    "Quast",
    "Rau",
    "Sand",
    "Thal",
    "Uhl",
    "Velk",
    "Wolf",
    "Zorn",
    "Amsel",
    "Busch",
    "Clerk",
    "Drexel",
    "Ebner",
    "Frost",
    "Gabel",
    "Horn",
    "Issel",
    "Jost",
    "Krug",
    "Lamm",
    "Munk",
    "Noll",
    "Otter",
    "Pfau",
    "Reh",
    "Specht",
    "Trapp",
    "Urban",
    "Vogt",
    "Wendt",
    "Zahn",
    "Adler",
]
TOWNS = [
    "Arvel",
    "Bastow",
    "Corin",
    "Delmar",
    "Estry",
    "Fennick",
    "Garth",
    "Holm",
    "Isley",
    "Jarrow",
    "Kelby",
    "Lorne",
    "Marsk",
    "Norwin",
    "Orby",
    "Penwick",
    "Quorn",
    "Redmar",
    "Selby",
    "Tolm",
    "Ulver",
    "Varn",
    "Wenlow",
    "Yarm",
    "Zennor",
    "Ashby",
    "Brill",
    "Cray",
    "Dunmor",
    "Elstow",
    "Fairn",
    "Glenby",
    "Harwin",
    "Ickham",
    "Jura",
    "Kirn",
    "Lydd",
    "Moffat",
    "Nairn",
    "Oban",
]
RIVERS = [
    "Aln",
    "Bure",
    "Cam",
    "Dee",
    "Esk",
    "Fal",
    "Gade",
    "Hull",
    "Irt",
    "Jed",
    "Kent",
    "Lune",
    "Mole",
    "Nene",
    "Ouse",
    "Parr",
    "Ribble",
    "Severn",
    "Tay",
    "Ure",
    "Vyrn",
    "Wye",
    "Yare",
    "Avon",
    "Brue",
    "Clun",
    "Dove",
    "Exe",
    "Frome",
    "Greta",
]
COMPANIES = [
    "Altex",
    "Borgo",
    "Cintra",
    "Dexa",
    "Elmo",
    "Fabrix",
    "Gloria",
    "Hexal",
    "Inkora",
    "Jupo",
    "Kolba",
    "Lumex",
    "Monda",
    "Nexo",
    "Orbis",
    "Palma",
    "Quadra",
    "Rondo",
    "Salto",
    "Temba",
    "Unico",
    "Vesta",
    "Wexa",
    "Xylo",
    "Zando",
    "Arko",
    "Bolero",
    "Cobra",
    "Delfi",
    "Exakt",
]
PRODUCTS = [
    "bells",
    "boats",
    "books",
    "boots",
    "bread",
    "candles",
    "carpets",
    "chairs",
    "cheese",
    "clocks",
    "coats",
    "gates",
    "glasses",
    "gloves",
    "hats",
    "ink",
    "kites",
    "knives",
    "lamps",
    "locks",
    "mirrors",
    "nets",
    "paper",
    "pipes",
    "ropes",
    "saddles",
    "soap",
    "tea",
    "toys",
    "wagons",
]
INSTRUMENTS = [
    "accordion",
    "banjo",
    "bassoon",
    "bugle",
    "cello",
    "clarinet",
    "cornet",
    "drums",
    "fiddle",
    "flute",
    "guitar",
    "harp",
    "horn",
    "lute",
    "mandolin",
    "oboe",
    "organ",
    "piano",
    "sitar",
    "trombone",
    "trumpet",
    "tuba",
    "viola",
    "zither",
]

RELATIONS = {
    "town": "lives",
    "company": "works",
    "instrument": "plays",
    "river": "river",
    "mayor": "mayor",
    "product": "makes",
    "owner": "owner",
}
"""Each relation with the word that documents have for it."""

QUESTIONS = {
    ("instrument",): "What does{s} play?",
    ("town", "river"): "On which river does{s} live?",
    ("company", "product"): "What does the employer of{s} make?",
    ("mayor", "instrument"): "What does the mayor of{s} play?",
    ("owner", "town"): "Where does the owner of{s} live?",
    ("town", "mayor", "instrument"): "What does the mayor of the home of{s} play?",
}
"""What is asked, by the relations that lead to the answer; the entity comes with a space before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Facts, documents and an index of them."""

    facts: dict[str, dict[str, str]]
    """By entity and relation."""
    documents: dict[str, str]
    """By entity, which is also the document's name."""
    index: SparseIndex
    held_out: frozenset[str]
    """Entities of the part that is never trained on."""

    def follow(self, entity: str, path: tuple[str, ...]) -> Iterator[str]:
        """Yield what each relation of a path leads to, the answer last."""
        for relation in path:
            entity = self.facts[entity][relation]
            yield entity

    def search(self, query: str, count: int) -> list[str]:
        """Return the names of the best documents."""
        names = list(self.documents)
        return [names[number] for number in self.index.search(query, count)[0]]


@lru_cache(maxsize=8)
def make_world(seed: int, *, people: int) -> World:
    """Invent a world: everything in it follows from the seed. A quarter of it is held out."""
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
        index=SparseIndex.of(documents.values()),
        held_out=frozenset(held_out),
    )


def invent(
    rng: random.Random, people: list[str], towns: list[str], companies: list[str]
) -> dict[str, dict[str, str]]:
    """Return facts that link these entities with one another and with nothing else."""
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
    """Write what is known of an entity."""
    match facts:
        case {"town": town, "company": company, "instrument": instrument}:
            return f"{entity} lives in {town}, works for {company} and plays the {instrument}."
        case {"river": river, "mayor": mayor}:
            return f"{entity} lies on the river {river}. The mayor is {mayor}."
        case {"product": product, "owner": owner}:
            return f"{entity} makes {product}. The owner is {owner}."
    raise AssertionError(facts)
