"""The index: chunks, their vectors and their words in one folder, searched from memory.

index/
  manifest.json    what it was built with; written last, so a half-built index has none
  chroma/ or chunks.jsonl, vectors.f32    the chunks
  sparse.npz       postings of the chunks that were there when it was last built
  turn.npy         what training questions taught the dense side
  questions.jsonl  of a set of questions and answers
  aliases.json     documents left out because others have their text, and those others
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

import numpy as np

from groupwise.errors import ConfigError
from groupwise.files import write_atomically
from groupwise.retrieval.bm25 import BM25Index, load_postings, save_postings
from groupwise.retrieval.documents import Chunk, Document, RetrievalQuestion, chunks_of
from groupwise.retrieval.embed import Embedding, Vectors, embedding_named
from groupwise.retrieval.index_storage import (
    Manifest,
    Store,
    check_new,
    new_folder,
    read_manifest,
    store_named,
    write_manifest,
)
from groupwise.retrieval.query_adapter import FEWEST, GRID, divided, learn_questions, turned
from groupwise.retrieval.ranking import Ranking, closest, fuse

RETURNED = 5
"""Chunks that a search returns unless told otherwise."""
QUERIES = 512
"""Queries whose scores are held in memory at a time."""
EMBEDDED = 1024
"""Chunks that are embedded between two words about it."""
Progress = Callable[[str, int, int], None]
"""Is told of what how much is done, and how much there is."""


def silent(what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """One chunk that a search found; ranks count from 1, None where that side did not find it."""

    chunk: Chunk
    score: float
    dense_rank: int | None
    sparse_rank: int | None


class Index:
    """Chunks in memory and in their store; `search` and `search_all` read, `add` and `delete` write."""

    def __init__(self, folder: Path, manifest: Manifest, store: Store, embedding: Embedding) -> None:
        self.folder, self.manifest = folder, manifest
        self._store, self._embedding = store, embedding
        self.chunks: list[Chunk | None] = []
        self._vectors_ND: Vectors = np.zeros((0, 0), np.float32)
        self._sparse = BM25Index()
        self._numbers: dict[str, list[int]] = {}
        """Of each document."""
        self._texts: dict[str, str] = {}
        """Of each chunk, with the document that has it."""
        self.aliases: dict[str, list[str]] = {}
        """Documents that are left out because others have all of their text, with those others."""
        self._turn_DD: Vectors | None = None
        """What training questions taught the dense side."""

    @classmethod
    def build(
        cls,
        folder: Path,
        documents: Iterable[Document],
        manifest: Manifest,
        *,
        questions: Sequence[RetrievalQuestion] = (),
        choose: bool = True,
        progress: Progress = silent,
    ) -> Index:
        """Chunk, embed and store documents in a new folder; learn from questions that are not held out.

        `choose`: those questions also say how much each side of the fusion weighs.
        """
        check_new(folder)
        documents = each_once(documents)
        embedding = embedding_named(manifest.embedding)
        chunks, aliases = new_chunks(counted(documents, progress), manifest.budget, embedding, {})
        if not chunks:
            raise ConfigError("there is nothing to index: no document has any text")
        embedding.fit([chunk.text for chunk in chunks])
        with new_folder(folder):
            index = cls(folder, manifest, store_named(manifest.store, folder), embedding)
            index._embedding.save(folder)
            index._append(chunks, progress)
            index.aliases = aliases
            save_postings(folder / "sparse.npz", index._sparse)
            index._learn(index.following(questions), choose=choose)
            index._finish()
        return index

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Read an index; a folder without a finished one gives a ConfigError."""
        manifest = read_manifest(folder)
        index = cls(
            folder, manifest, store_named(manifest.store, folder), embedding_named(manifest.embedding)
        )
        try:
            index._embedding.load(folder)
            if manifest.learned:
                index._turn_DD = np.load(folder / "turn.npy", allow_pickle=False)
            chunks, vectors_ND = index._store.load()
            if not any(chunks):  # a store that was emptied may not know how wide its vectors were
                width = index._embedding.queries([""]).shape[1]
                vectors_ND = np.zeros((len(chunks), width), np.float32)
            index._sparse = load_postings(folder / "sparse.npz")
            index.aliases = read_aliases(folder / "aliases.json")
            index._take(chunks, vectors_ND)
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"{folder} is damaged ({error}): build the index anew") from error
        return index

    def _learn(self, questions: Sequence[RetrievalQuestion], *, choose: bool) -> None:
        """Turn the dense side to the corpus's questions and, if asked to, `choose` the fusion's weights."""
        learned_from, chosen_by = divided(questions, self._numbers)
        if len(learned_from) < FEWEST:
            return
        asked_QD = self._embedding.queries([question.text for question in learned_from])
        self._turn_DD = learn_questions(learned_from, asked_QD, self._vectors_ND, self._sparse, self._numbers)
        np.save(self.folder / "turn.npy", self._turn_DD)
        self.manifest = replace(self.manifest, learned=True)
        if choose and chosen_by:
            texts = [question.text for question in chosen_by]
            sides = list(zip(self._dense(texts, 2 * RETURNED), self._words(texts, 2 * RETURNED), strict=True))
            weight = max(GRID, key=lambda weight: self._found_high(chosen_by, sides, weight))
            self.manifest = replace(self.manifest, dense_weight=weight, sparse_weight=round(1 - weight, 6))

    def _found_high(
        self, questions: Sequence[RetrievalQuestion], sides: Sequence[tuple[Ranking, Ranking]], weight: float
    ) -> float:
        """Return how high the questions' documents are found with this dense weight, as a sum of 1 / rank."""
        manifest = replace(self.manifest, dense_weight=weight, sparse_weight=1 - weight)
        total = 0.0
        for question, (dense, sparse) in zip(questions, sides, strict=True):
            hits = self._hits(dense, sparse, RETURNED, "fused", manifest)
            right = (hit.chunk.document in question.documents for hit in hits)
            total += next((1 / rank for rank, is_right in enumerate(right, start=1) if is_right), 0.0)
        return total

    def __len__(self) -> int:
        return sum(chunk is not None for chunk in self.chunks)

    @property
    def documents(self) -> list[str]:
        return list(self._numbers)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return vectors of any texts, to compare them with each other."""
        return self._embedding.queries(texts)

    def add(self, documents: Iterable[Document]) -> int:
        """Add documents, replacing those of the same name, and return how many chunks are new.

        What is there stays as it is: only the new chunks are embedded and written.
        """
        documents = each_once(documents)
        self.delete([document.id for document in documents])
        chunks, aliases = new_chunks(documents, self.manifest.budget, self._embedding, self._texts)
        if chunks:
            self._append(chunks)
        added = {document.id for document in documents}
        self.aliases = {name: kept for name, kept in self.aliases.items() if name not in added} | aliases
        self._finish()
        return len(chunks)

    def delete(self, names: Iterable[str]) -> int:
        """Take documents out and return how many chunks that were."""
        there = [name for name in dict.fromkeys(names) if name in self._numbers]
        numbers = [number for name in there for number in self._numbers[name]]
        if numbers:
            self._store.delete(numbers)  # first: when this fails, memory still says what was there
            for name in there:
                del self._numbers[name]
            left = {name: [k for k in kept if k in self._numbers] for name, kept in self.aliases.items()}
            self.aliases = {name: kept for name, kept in left.items() if kept}
            for number in numbers:
                chunk = self.chunks[number]
                assert chunk is not None
                self._texts.pop(chunk.text, None)
                self.chunks[number] = None
                self._sparse.remove(number)
            self._vectors_ND[numbers] = 0.0
            self._finish()
        return len(numbers)

    def search(self, query: str, count: int = RETURNED, **how: object) -> list[Hit]:
        """Return the best chunks, in order."""
        return self.search_all([query], count, **how)[0]  # type: ignore[arg-type]

    def search_all(
        self, queries: Sequence[str], count: int = RETURNED, *, side: str = "fused", **weights: float
    ) -> list[list[Hit]]:
        """Return the best chunks of every query; `side`: fused, dense or sparse."""
        manifest = replace(self.manifest, **weights)  # type: ignore[arg-type]
        found = []
        for start in range(0, len(queries), QUERIES):
            some = queries[start : start + QUERIES]
            nothing = [Ranking((), ())] * len(some)
            dense = self._dense(some, 2 * count) if side != "sparse" else nothing
            sparse = self._words(some, 2 * count) if side != "dense" else nothing
            for left, right in zip(dense, sparse, strict=True):
                found.append(self._hits(left, right, count, side, manifest))
        return found

    def _hits(self, dense: Ranking, sparse: Ranking, count: int, side: str, manifest: Manifest) -> list[Hit]:
        if side == "fused":
            merged = fuse(
                dense,
                sparse,
                count=count,
                kind=manifest.fusion,
                dense_weight=manifest.dense_weight,
                sparse_weight=manifest.sparse_weight,
            )
        else:
            merged = dense if side == "dense" else sparse
        ranks = [{n: rank for rank, n in enumerate(r.numbers, start=1)} for r in (dense, sparse)]
        best_first = list(zip(merged.numbers, merged.scores, strict=True))[:count]
        found = [(self.chunks[number], number, score) for number, score in best_first]
        return [Hit(chunk, score, ranks[0].get(n), ranks[1].get(n)) for chunk, n, score in found if chunk]

    def _dense(self, queries: Sequence[str], count: int) -> list[Ranking]:
        asked_QD = self._embedding.queries(queries)
        if self._turn_DD is not None:
            asked_QD = turned(asked_QD, self._turn_DD)
        return closest(asked_QD, self._vectors_ND, count)

    def _words(self, queries: Sequence[str], count: int) -> list[Ranking]:
        return [Ranking(*self._sparse.search(query, count)) for query in queries]

    def _append(self, chunks: Sequence[Chunk], progress: Progress = silent) -> None:
        embedded = []
        for start in range(0, len(chunks), EMBEDDED):
            some = chunks[start : start + EMBEDDED]
            embedded.append(self._embedding.passages([chunk.text for chunk in some]))
            progress("chunks", start + len(some), len(chunks))
        vectors_ND = np.concatenate(embedded)
        self._store.add(chunks, vectors_ND)
        self._take([*self.chunks, *chunks], np.concatenate([self._vectors_ND, vectors_ND])
                   if self.chunks else vectors_ND)  # fmt: skip

    def _take(self, chunks: Sequence[Chunk | None], vectors_ND: Vectors) -> None:
        """Hold these chunks; those that the sparse side does not know yet are counted."""
        self._vectors_ND = vectors_ND
        first, self.chunks = len(self.chunks), list(chunks)
        for number in range(first, len(chunks)):
            chunk = chunks[number]
            if number >= len(self._sparse):
                self._sparse.add(chunk.text if chunk is not None else "")
            if chunk is None:
                self._sparse.remove(number)
            else:
                self._numbers.setdefault(chunk.document, []).append(number)
                self._texts[chunk.text] = chunk.document

    def following(self, questions: Iterable[RetrievalQuestion]) -> tuple[RetrievalQuestion, ...]:
        """Return questions whose gold is what searches find: the others for a document left out."""
        return tuple(
            replace(
                question,
                documents=tuple(
                    dict.fromkeys(
                        kept for name in question.documents for kept in self.aliases.get(name, [name])
                    )
                ),
            )
            for question in questions
        )

    def _finish(self) -> None:
        path = self.folder / "aliases.json"
        if self.aliases or path.exists():
            write_atomically(path, json.dumps(self.aliases, ensure_ascii=False))
        self.manifest = replace(self.manifest, documents=len(self._numbers))
        write_manifest(self.folder, self.manifest)


def read_aliases(path: Path) -> dict[str, list[str]]:
    """Read which documents were left out; none were where there is no file."""
    if not path.exists():
        return {}
    aliases: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return aliases


def each_once(documents: Iterable[Document]) -> list[Document]:
    """Return the documents; refuse two of one name, of which one would have to replace the other."""
    documents = list(documents)
    for name, times in Counter(document.id for document in documents).items():
        if times > 1:
            raise ConfigError(f"the document {name} is given {times} times: give each name once")
    return documents


def new_chunks(
    documents: Iterable[Document], budget: int, embedding: Embedding, known: Mapping[str, str]
) -> tuple[list[Chunk], dict[str, list[str]]]:
    """Return the chunks of documents whose text is not known; of chunks with the same text, the first.

    Beside them, the documents that have no chunk for this reason, each with those that have its text.
    `known`: texts with the documents that have them.
    """
    chunks: list[Chunk] = []
    aliases: dict[str, list[str]] = {}
    owner = dict(known)
    for document in documents:
        texts = {
            chunk.text: chunk
            for chunk in chunks_of(document, budget=budget, spans=embedding.spans)
            if chunk.text.strip()
        }
        fresh = {text: chunk for text, chunk in texts.items() if text not in owner}
        if texts and not fresh:
            aliases[document.id] = list(dict.fromkeys(owner[text] for text in texts))
        chunks += fresh.values()
        owner |= dict.fromkeys(fresh, document.id)
    return chunks, aliases


def counted(documents: Iterable[Document], progress: Progress) -> Iterator[Document]:
    documents = list(documents)
    for number, document in enumerate(documents, start=1):
        yield document
        progress("documents", number, len(documents))


T = TypeVar("T")


class QueryBatcher(Generic[T]):
    """A function of one query, for many threads, made of a function of many queries.

    Whoever comes while a batch is at work waits for the next one. The first to get its turn answers for all
    who wait by then; no thread of its own is needed.
    """

    def __init__(self, answer_all: Callable[[list[str]], Sequence[T]]) -> None:
        self._answer_all = answer_all
        self._waiting: deque[tuple[str, Future[T]]] = deque()
        self._turn = threading.Lock()

    def __call__(self, query: str) -> T:
        mine: Future[T] = Future()
        self._waiting.append((query, mine))
        with self._turn:
            if not mine.done():
                self._answer([self._waiting.popleft() for _ in range(len(self._waiting))])
        return mine.result()

    def _answer(self, asked: Sequence[tuple[str, Future[T]]]) -> None:
        try:
            answers = self._answer_all([query for query, _ in asked])
        except BaseException as error:
            for _, answer in asked:
                answer.set_exception(error)
            return
        for (_, answer), value in zip(asked, answers, strict=True):
            answer.set_result(value)


SIDES = ("dense", "sparse", "fused")


def measure(
    index: Index, questions: Sequence[RetrievalQuestion], *, count: int = 5, **weights: Any
) -> dict[str, Any]:
    """Ask every question on every side and return means over the `count` chunks that a search returns."""
    asked = [question.text for question in questions]
    report: dict[str, Any] = {"questions": len(questions), "count": count}
    for side in SIDES:
        found = index.search_all(asked, count, side=side, **weights)
        names = [[hit.chunk.document for hit in hits] for hits in found]
        golds = [set(question.documents) for question in questions]
        pairs = list(zip(names, golds, strict=True))
        report[side] = {
            f"mrr@{count}": fmean(reciprocal_rank(found, gold) for found, gold in pairs),
            f"recall@{count}": fmean(float(bool(gold & set(found))) for found, gold in pairs),
            f"ndcg@{count}": fmean(ndcg(found, gold, count) for found, gold in pairs),
        }
    return report


def reciprocal_rank(found: Sequence[str], gold: Collection[str]) -> float:
    """1 / the rank of the first gold document; 0 without one."""
    return next((1 / rank for rank, name in enumerate(found, start=1) if name in gold), 0.0)


def ndcg(found: Sequence[str], gold: Collection[str], count: int) -> float:
    """Gain of the gold documents, each once, discounted by rank, over the most there could be.

    Example: found (x, a), gold {a} -> (1 / log2 3) / 1 = 0.63
    """
    first = {name: rank for rank, name in reversed(list(enumerate(found, start=1))) if name in gold}
    gain = math.fsum(1 / math.log2(rank + 1) for rank in first.values())
    ideal = math.fsum(1 / math.log2(rank + 1) for rank in range(1, min(len(gold), count) + 1))
    return gain / ideal
