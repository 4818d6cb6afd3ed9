"""The hybrid index: chunks, their vectors and their postings in one folder, searched in memory.

index/
  manifest.json    build settings; written last, so an incomplete index has none
  chroma/ or chunks.jsonl, vectors.f32    the chunks
  sparse.npz       postings of the chunks at the time of the build
  turn.npy         the query adapter, if one was trained
  questions.jsonl  the questions of a question-answer set
  aliases.json     documents dropped as duplicates, with the documents that have their text
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
from groupwise.retrieval.ranking import (
    FEWEST,
    GRID,
    BM25Index,
    Ranking,
    adapt_queries,
    fuse,
    load_postings,
    nearest_chunks,
    save_postings,
    split_questions,
    train_adapter,
)

RETURNED = 5
"""Default number of chunks that a search returns."""
QUERIES = 512
"""Batch size of queries, which bounds the memory for scores."""
EMBEDDED = 1024
"""Number of chunks that are embedded between two progress reports."""
Progress = Callable[[str, int, int], None]
"""Called with what is being processed, how much is done, and the total."""


def silent(what: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result; ranks count from 1 and are None if that side did not return the chunk."""

    chunk: Chunk
    score: float
    dense_rank: int | None
    sparse_rank: int | None


class Index:
    """Chunks in memory and in a store; `search` and `search_all` read, `add` and `delete` write."""

    def __init__(self, folder: Path, manifest: Manifest, store: Store, embedding: Embedding) -> None:
        self.folder, self.manifest = folder, manifest
        self.store, self._embedding = store, embedding
        self.chunks: list[Chunk | None] = []
        self.vectors_ND: Vectors = np.zeros((0, 0), np.float32)
        self._sparse = BM25Index()
        self._numbers: dict[str, list[int]] = {}
        """Chunk numbers of each document."""
        self._texts: dict[str, str] = {}
        """Document of each chunk text."""
        self.aliases: dict[str, list[str]] = {}
        """Documents dropped as duplicates, with the documents that have their text."""
        self._adapter_DD: Vectors | None = None
        """The query adapter, or None."""

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
        """Chunk, embed and store documents in a new folder; train a query adapter on the training questions.

        `choose`: whether to tune the fusion weights on questions, too.
        """
        check_new(folder)
        documents = check_unique(documents)
        embedding = embedding_named(manifest.embedding)
        chunks, aliases = new_chunks(with_progress(documents, progress), manifest.budget, embedding, {})
        if not chunks:
            raise ConfigError("nothing to index: no document has any text")
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
        """Read an index; raise ConfigError if the folder has no complete index."""
        manifest = read_manifest(folder)
        index = cls(
            folder, manifest, store_named(manifest.store, folder), embedding_named(manifest.embedding)
        )
        try:
            index._embedding.load(folder)
            if manifest.learned:
                index._adapter_DD = np.load(folder / "turn.npy", allow_pickle=False)
            chunks, vectors_ND = index.store.load()
            if not any(chunks):  # an emptied store may not know the dimension of its vectors
                width = index._embedding.queries([""]).shape[1]
                vectors_ND = np.zeros((len(chunks), width), np.float32)
            index._sparse = load_postings(folder / "sparse.npz")
            index.aliases = read_aliases(folder / "aliases.json")
            index._take(chunks, vectors_ND)
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"{folder} is damaged ({error}): rebuild the index") from error
        return index

    def _learn(self, questions: Sequence[RetrievalQuestion], *, choose: bool) -> None:
        """Train the query adapter and, with `choose`, tune the fusion weights."""
        training, validation = split_questions(questions, self._numbers)
        if len(training) < FEWEST:
            return
        queries_QD = self._embedding.queries([question.text for question in training])
        self._adapter_DD = train_adapter(training, queries_QD, self.vectors_ND, self._sparse, self._numbers)
        np.save(self.folder / "turn.npy", self._adapter_DD)
        self.manifest = replace(self.manifest, learned=True)
        if choose and validation:
            texts = [question.text for question in validation]
            sides = list(zip(self._dense(texts, 2 * RETURNED), self._words(texts, 2 * RETURNED), strict=True))
            weight = max(GRID, key=lambda weight: self._total_rank_score(validation, sides, weight))
            self.manifest = replace(self.manifest, dense_weight=weight, sparse_weight=round(1 - weight, 6))

    def _total_rank_score(
        self, questions: Sequence[RetrievalQuestion], sides: Sequence[tuple[Ranking, Ranking]], weight: float
    ) -> float:
        """Return the sum of reciprocal ranks of the questions' documents with this dense weight."""
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
        """Return the vectors of texts, to compare them with each other."""
        return self._embedding.queries(texts)

    def add(self, documents: Iterable[Document]) -> int:
        """Add documents, replacing those with the same id, and return the number of new chunks.

        Only the new chunks are embedded and written.
        """
        documents = check_unique(documents)
        self.delete([document.id for document in documents])
        chunks, aliases = new_chunks(documents, self.manifest.budget, self._embedding, self._texts)
        if chunks:
            self._append(chunks)
        added = {document.id for document in documents}
        self.aliases = {
            name: originals for name, originals in self.aliases.items() if name not in added
        } | aliases
        self._finish()
        return len(chunks)

    def delete(self, names: Iterable[str]) -> int:
        """Delete documents and return the number of deleted chunks."""
        existing = [name for name in dict.fromkeys(names) if name in self._numbers]
        numbers = [number for name in existing for number in self._numbers[name]]
        if numbers:
            self.store.delete(numbers)  # first: if this fails, the state in memory stays consistent
            for name in existing:
                del self._numbers[name]
            left = {
                name: [original for original in originals if original in self._numbers]
                for name, originals in self.aliases.items()
            }
            self.aliases = {name: originals for name, originals in left.items() if originals}
            for number in numbers:
                chunk = self.chunks[number]
                assert chunk is not None
                self._texts.pop(chunk.text, None)
                self.chunks[number] = None
                self._sparse.remove(number)
            self.vectors_ND[numbers] = 0.0
            self._finish()
        return len(numbers)

    def search(self, query: str, count: int = RETURNED, **how: object) -> list[Hit]:
        """Return the best chunks, in order."""
        return self.search_all([query], count, **how)[0]  # type: ignore[arg-type]

    def search_all(
        self, queries: Sequence[str], count: int = RETURNED, *, side: str = "fused", **weights: float
    ) -> list[list[Hit]]:
        """Return the best chunks for each query; `side`: fused, dense or sparse."""
        manifest = replace(self.manifest, **weights)  # type: ignore[arg-type]
        results = []
        for start in range(0, len(queries), QUERIES):
            some = queries[start : start + QUERIES]
            nothing = [Ranking((), ())] * len(some)
            dense = self._dense(some, 2 * count) if side != "sparse" else nothing
            sparse = self._words(some, 2 * count) if side != "dense" else nothing
            for left, right in zip(dense, sparse, strict=True):
                results.append(self._hits(left, right, count, side, manifest))
        return results

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
        results = [(self.chunks[number], number, score) for number, score in best_first]
        return [Hit(chunk, score, ranks[0].get(n), ranks[1].get(n)) for chunk, n, score in results if chunk]

    def _dense(self, queries: Sequence[str], count: int) -> list[Ranking]:
        queries_QD = self._embedding.queries(queries)
        if self._adapter_DD is not None:
            queries_QD = adapt_queries(queries_QD, self._adapter_DD)
        return nearest_chunks(queries_QD, self.vectors_ND, count)

    def _words(self, queries: Sequence[str], count: int) -> list[Ranking]:
        return [Ranking(*self._sparse.search(query, count)) for query in queries]

    def _append(self, chunks: Sequence[Chunk], progress: Progress = silent) -> None:
        embedded = []
        for start in range(0, len(chunks), EMBEDDED):
            some = chunks[start : start + EMBEDDED]
            embedded.append(self._embedding.passages([chunk.text for chunk in some]))
            progress("chunks", start + len(some), len(chunks))
        vectors_ND = np.concatenate(embedded)
        self.store.add(chunks, vectors_ND)
        self._take([*self.chunks, *chunks], np.concatenate([self.vectors_ND, vectors_ND])
                   if self.chunks else vectors_ND)  # fmt: skip

    def _take(self, chunks: Sequence[Chunk | None], vectors_ND: Vectors) -> None:
        """Replace the chunks and vectors in memory; add new chunks to the sparse index."""
        self.vectors_ND = vectors_ND
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
        """Return the questions with dropped duplicates in their gold documents replaced by the originals."""
        return tuple(
            replace(
                question,
                documents=tuple(
                    dict.fromkeys(
                        original for name in question.documents for original in self.aliases.get(name, [name])
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
    """Read the dropped duplicates; empty if there is no file."""
    if not path.exists():
        return {}
    aliases: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return aliases


def check_unique(documents: Iterable[Document]) -> list[Document]:
    """Return the documents as a list; raise ConfigError for duplicate ids."""
    documents = list(documents)
    for name, times in Counter(document.id for document in documents).items():
        if times > 1:
            raise ConfigError(f"the document id {name} occurs {times} times; ids must be unique")
    return documents


def new_chunks(
    documents: Iterable[Document], budget: int, embedding: Embedding, known: Mapping[str, str]
) -> tuple[list[Chunk], dict[str, list[str]]]:
    """Return the chunks whose text is new, the first of each text, and the documents without a new chunk.

    Such duplicate documents are returned with the documents that have their text. `known` maps the existing
    texts to their documents.
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


def with_progress(documents: Iterable[Document], progress: Progress) -> Iterator[Document]:
    documents = list(documents)
    for number, document in enumerate(documents, start=1):
        yield document
        progress("documents", number, len(documents))


T = TypeVar("T")


class QueryBatcher(Generic[T]):
    """Batch single queries from many threads into calls of a function that answers many queries.

    Queries that arrive while a batch is processed wait for the next batch. The first thread to acquire the
    lock answers all waiting queries, so no background thread is needed.
    """

    def __init__(self, answer_all: Callable[[list[str]], Sequence[T]]) -> None:
        self._answer_all = answer_all
        self._waiting: deque[tuple[str, Future[T]]] = deque()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of queries that the next batch answers."""
        return len(self._waiting)

    def __call__(self, query: str) -> T:
        mine: Future[T] = Future()
        self._waiting.append((query, mine))
        with self._lock:
            if not mine.done():
                self._answer([self._waiting.popleft() for _ in range(len(self._waiting))])
        return mine.result()

    def _answer(self, batch: Sequence[tuple[str, Future[T]]]) -> None:
        try:
            answers = self._answer_all([query for query, _ in batch])
        except BaseException as error:
            for _, answer in batch:
                answer.set_exception(error)
            return
        for (_, answer), value in zip(batch, answers, strict=True):
            answer.set_result(value)


SIDES = ("dense", "sparse", "fused")


def measure(
    index: Index, questions: Sequence[RetrievalQuestion], *, count: int = 5, **weights: Any
) -> dict[str, Any]:
    """Search for every question on every side and return the mean MRR, recall and NDCG at `count`."""
    texts = [question.text for question in questions]
    report: dict[str, Any] = {"questions": len(questions), "count": count}
    for side in SIDES:
        results = index.search_all(texts, count, side=side, **weights)
        names = [[hit.chunk.document for hit in hits] for hits in results]
        golds = [set(question.documents) for question in questions]
        pairs = list(zip(names, golds, strict=True))
        report[side] = {
            f"mrr@{count}": fmean(reciprocal_rank(ranked, gold) for ranked, gold in pairs),
            f"recall@{count}": fmean(float(bool(gold & set(ranked))) for ranked, gold in pairs),
            f"ndcg@{count}": fmean(ndcg(ranked, gold, count) for ranked, gold in pairs),
        }
    return report


def reciprocal_rank(ranked: Sequence[str], gold: Collection[str]) -> float:
    """Return 1 / rank of the first gold document; 0 if there is none."""
    return next((1 / rank for rank, name in enumerate(ranked, start=1) if name in gold), 0.0)


def ndcg(ranked: Sequence[str], gold: Collection[str], count: int) -> float:
    """Return the normalized discounted cumulative gain; each gold document counts once.

    Example: ranked (x, a), gold {a} -> (1 / log2 3) / 1 = 0.63
    """
    first = {name: rank for rank, name in reversed(list(enumerate(ranked, start=1))) if name in gold}
    gain = math.fsum(1 / math.log2(rank + 1) for rank in first.values())
    ideal = math.fsum(1 / math.log2(rank + 1) for rank in range(1, min(len(gold), count) + 1))
    return gain / ideal
