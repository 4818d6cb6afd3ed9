"""The files of an index: the manifest, the chunk stores, and the questions of a question-answer set.

manifest.json is written last, so that an incomplete index has none.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from groupwise.errors import ConfigError
from groupwise.retrieval.documents import Chunk, RetrievalQuestion
from groupwise.retrieval.embed import LSA, Vectors

FORMAT = 1
WEIGHTS = (0.8, 0.2)
"""Default weights of the dense and the sparse side."""
OFFLINE_WEIGHTS = (0.15, 0.85)
"""Default weights with an embedding that is trained on the corpus alone, before tuning on questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The settings with which an index was built and is searched."""

    embedding: str = LSA
    store: str = "chroma"
    budget: int = 256
    fusion: str = "weighted"
    dense_weight: float = WEIGHTS[0]
    sparse_weight: float = WEIGHTS[1]
    learned: bool = False
    """Whether a query adapter was trained."""
    source: str = ""
    documents: int = 0
    format: int = FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index; raise ConfigError if the folder has no complete index."""
    try:
        manifest = Manifest(**json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} contains no complete index: run groupwise index build --output {folder}"
        ) from None
    except (TypeError, ValueError):
        raise ConfigError(f"{folder / 'manifest.json'} is damaged: rebuild the index") from None
    if manifest.format != FORMAT:
        raise ConfigError(
            f"{folder} has format {manifest.format}, but this version reads {FORMAT}: rebuild the index"
        )
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    fresh = folder / "manifest.json.new"
    fresh.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    fresh.replace(folder / "manifest.json")


def check_new(folder: Path) -> None:
    """Raise ConfigError if a folder is not empty or not writable."""
    try:
        if (folder / "manifest.json").exists():
            raise ConfigError(f"{folder} already contains an index; use another folder or delete it first")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty and contains no complete index; use an empty folder")
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".groupwise-", dir=existing))
    except OSError as error:
        raise _cannot_write(folder, error) from error


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Create a folder to fill. On failure, remove everything again, so that the build can be retried."""
    check_new(folder)  # again: files that were created meanwhile must not be deleted
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        with suppress(OSError):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in missing:
                path.rmdir()
        if isinstance(error, OSError):
            raise _cannot_write(folder, error) from error
        raise


def _cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {folder}: {error.strerror or error}; choose another folder by --output")


BATCH = 4000
"""Number of chunks per Chroma operation: SQLite limits the number of variables."""


class Store(Protocol):
    """The interface of a chunk store."""

    def add(self, chunks: Sequence[Chunk], vectors_ND: Vectors) -> None: ...

    def delete(self, numbers: Sequence[int]) -> None: ...

    def load(self) -> tuple[list[Chunk | None], Vectors]:
        """Return the chunks by number and their vectors; None and 0 for deleted ones."""
        ...


class FileStore:
    """A store in plain files: chunks.jsonl, vectors.f32, and deleted.txt with one number per line."""

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
                f"{self.vectors} does not match the {len(chunks)} chunks of the index: rebuild the index"
            )
        vectors_ND = flat.reshape(len(chunks), -1)
        if self.deleted.is_file():
            for number in map(int, self.deleted.read_text().split()):
                chunks[number] = None
                vectors_ND[number] = 0.0  # otherwise it would take a slot in search results
        return chunks, vectors_ND


class ChromaStore:
    """A persistent ChromaDB collection named `chunks`, which any Chroma client can open."""

    def __init__(self, folder: Path) -> None:
        try:
            import chromadb
            from chromadb.config import Settings
        except ImportError:
            raise ConfigError(
                "the store chroma requires an extra: pip install 'groupwise[retrieval]'; or use --store files"
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
        result = self._collection.get(include=["documents", "metadatas", "embeddings"])
        chunks: list[Chunk | None] = [None] * self._next()
        stored = np.asarray(result["embeddings"], np.float32)
        vectors_ND = np.zeros((len(chunks), stored.shape[1] if stored.ndim == 2 else 0), np.float32)
        for row, (name, text, metadata) in enumerate(
            zip(result["ids"], result["documents"], result["metadatas"], strict=True)
        ):
            number = int(metadata["number"])
            chunks[number] = Chunk(name, metadata["document"], text)
            vectors_ND[number] = stored[row]
        return chunks, vectors_ND

    def _next(self) -> int:
        return int((self._collection.metadata or {}).get("next", 0))


STORES: dict[str, type[ChromaStore] | type[FileStore]] = {"chroma": ChromaStore, "files": FileStore}


def store_named(name: str, folder: Path) -> Store:
    if name not in STORES:
        raise ConfigError(f"--store must be one of {', '.join(STORES)}; got {name!r}")
    return STORES[name](folder)


def write_questions(path: Path, questions: tuple[RetrievalQuestion, ...]) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for question in questions:
            lines.write(json.dumps(asdict(question), ensure_ascii=False) + "\n")


def own_questions(index: Path, *, held_out: bool = True, instead: str = "") -> list[RetrievalQuestion]:
    """Return the questions of an index: the held-out ones, or the training ones.

    `instead`: an alternative to name in the error message if the index has no questions.
    """
    path = index / "questions.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{index} was built without questions: build an index from questions and answers by "
            f"groupwise index build --data{instead}"
        )
    with path.open(encoding="utf-8") as lines:  # str.splitlines would also cut at U+2028 inside an answer
        rows = [json.loads(line) for line in lines]
    questions = [
        RetrievalQuestion(row["text"], tuple(row["documents"]), tuple(row["answers"]), row["held_out"])
        for row in rows
    ]
    return [question for question in questions if question.held_out == held_out]
