"""Where chunks and their vectors are kept: in a ChromaDB collection, or in plain files.

Both are appended to and never rewritten. A chunk's number is its place in the order of coming; numbers of
deleted chunks are not used again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from groupwise.errors import ConfigError
from groupwise.retrieval.chunk import Chunk
from groupwise.retrieval.embed import Vectors

BATCH = 4000
"""Chunks that Chroma takes, or takes out, at a time: SQLite has room for so many variables."""


class Store(Protocol):
    """What an index needs of its store."""

    def add(self, chunks: Sequence[Chunk], vectors_ND: Vectors) -> None: ...

    def delete(self, numbers: Sequence[int]) -> None: ...

    def load(self) -> tuple[list[Chunk | None], Vectors]:
        """Return every chunk by number, None where one was deleted, and the vectors, 0 there."""
        ...


class FileStore:
    """chunks.jsonl, vectors.f32 beside it, and deleted.txt with one number a line."""

    def __init__(self, folder: Path) -> None:
        self.chunks, self.vectors = folder / "chunks.jsonl", folder / "vectors.f32"
        self.deleted = folder / "deleted.txt"

    def add(self, chunks: Sequence[Chunk], vectors_ND: Vectors) -> None:
        with self.vectors.open("ab") as file:
            file.write(np.ascontiguousarray(vectors_ND, "<f4").tobytes())
        with self.chunks.open("a", encoding="utf-8") as lines:
            for chunk in chunks:
                row = {"id": chunk.id, "document": chunk.document, "text": chunk.text}
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")

    def delete(self, numbers: Sequence[int]) -> None:
        with self.deleted.open("a") as lines:
            lines.writelines(f"{number}\n" for number in numbers)

    def load(self) -> tuple[list[Chunk | None], Vectors]:
        chunks: list[Chunk | None] = []
        with self.chunks.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                chunks.append(Chunk(row["id"], row["document"], row["text"]))
        flat = np.fromfile(self.vectors, "<f4")
        if not chunks or len(flat) % len(chunks):
            raise ConfigError(
                f"{self.vectors} does not fit the {len(chunks)} chunks beside it: build the index anew"
            )
        vectors_ND = flat.reshape(len(chunks), -1)
        if self.deleted.is_file():
            for number in map(int, self.deleted.read_text().split()):
                chunks[number] = None
                vectors_ND[number] = 0.0  # or it would take the place of another in a search
        return chunks, vectors_ND


class ChromaStore:
    """A persistent ChromaDB collection named `chunks`, which any Chroma client can open too."""

    def __init__(self, folder: Path) -> None:
        try:
            import chromadb
            from chromadb.config import Settings
        except ImportError:
            raise ConfigError(
                "the store chroma needs an extra: pip install 'groupwise[retrieval]'; --store files does not"
            ) from None
        client = chromadb.PersistentClient(
            path=str(folder / "chroma"), settings=Settings(anonymized_telemetry=False)
        )
        self._collection: Any = client.get_or_create_collection(
            "chunks", embedding_function=None, metadata={"hnsw:space": "cosine"}
        )

    def add(self, chunks: Sequence[Chunk], vectors_ND: Vectors) -> None:
        first = self._next()
        for start in range(0, len(chunks), BATCH):
            some = chunks[start : start + BATCH]
            self._collection.add(
                ids=[chunk.id for chunk in some],
                documents=[chunk.text for chunk in some],
                embeddings=vectors_ND[start : start + BATCH],
                metadatas=[
                    {"document": chunk.document, "number": first + start + offset}
                    for offset, chunk in enumerate(some)
                ],
            )
        self._collection.modify(metadata={"next": first + len(chunks)})

    def delete(self, numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), BATCH):
            self._collection.delete(where={"number": {"$in": list(numbers[start : start + BATCH])}})

    def load(self) -> tuple[list[Chunk | None], Vectors]:
        found = self._collection.get(include=["documents", "metadatas", "embeddings"])
        chunks: list[Chunk | None] = [None] * self._next()
        stored = np.asarray(found["embeddings"], np.float32)
        vectors_ND = np.zeros((len(chunks), stored.shape[1] if stored.ndim == 2 else 0), np.float32)
        for place, (name, text, about) in enumerate(
            zip(found["ids"], found["documents"], found["metadatas"], strict=True)
        ):
            number = int(about["number"])
            chunks[number] = Chunk(name, about["document"], text)
            vectors_ND[number] = stored[place]
        return chunks, vectors_ND

    def _next(self) -> int:
        return int((self._collection.metadata or {}).get("next", 0))


STORES: dict[str, type[ChromaStore] | type[FileStore]] = {"chroma": ChromaStore, "files": FileStore}


def store_named(name: str, folder: Path) -> Store:
    if name not in STORES:
        raise ConfigError(f"--store must be one of {', '.join(STORES)}; got {name!r}")
    return STORES[name](folder)
