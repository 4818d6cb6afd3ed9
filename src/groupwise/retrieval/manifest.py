"""What an index says of itself: manifest.json, written last, so that a half-built index has none."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.retrieval.embed import LSA

FORMAT = 1
WEIGHTS = (0.8, 0.2)
"""Of the dense and the sparse side."""
OFFLINE_WEIGHTS = (0.15, 0.85)
"""The same with an embedding that knows nothing but the corpus, until questions tell better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """How an index was built, and how it is searched."""

    embedding: str = LSA
    store: str = "chroma"
    budget: int = 256
    fusion: str = "weighted"
    dense_weight: float = WEIGHTS[0]
    sparse_weight: float = WEIGHTS[1]
    learned: bool = False
    """Whether training questions taught the dense side."""
    source: str = ""
    documents: int = 0
    format: int = FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Read what stands in a folder; without a finished index there, a ConfigError."""
    try:
        manifest = Manifest(**json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no finished index: run groupwise index build --output {folder}"
        ) from None
    except (TypeError, ValueError):
        raise ConfigError(f"{folder / 'manifest.json'} is damaged: build the index anew") from None
    if manifest.format != FORMAT:
        raise ConfigError(
            f"{folder} has format {manifest.format}, this version reads {FORMAT}: build it anew"
        )
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    fresh = folder / "manifest.json.new"
    fresh.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    fresh.replace(folder / "manifest.json")
