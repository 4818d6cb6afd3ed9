"""The general path: the model's own attention and cache, for decoders that packed attention cannot compute.

Every answer is computed as a row of its own, with its prompt. Rows of equal length share a pass. There is no
padding: it would enter the states of recurrent layers.

Axes: B rows, L tokens of a row, T tokens of the packed row, M hidden size.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.model.attention.packed import PackedLayout
from groupwise.model.device import to_device

CACHES = ("past_key_values", "cache_params", "state")
"""Names that families have for the cache, as an argument and in the output of their decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralPath:
    """Why a model is on the general path, and how it generates there."""

    reason: str
    """A verb phrase about the model, for messages."""
    caches: bool
    """Whether the model's cache can be used; otherwise each token recomputes its sequence."""

    def __str__(self) -> str:
        ending = "" if self.caches else "; generation recomputes each sequence, its cache cannot be used"
        return f"slower general path, without shared prompts: the model {self.reason}{ending}"


def text_decoder(model: Any) -> Any:
    """Return the decoder of a causal model, or that of a multimodal model's language part."""
    decoder = model.get_decoder()
    if not hasattr(decoder, "get_output_embeddings"):  # another part that is called decoder
        decoder = model.base_model
    while decoder.get_output_embeddings() is not None and hasattr(decoder, "model"):
        decoder = decoder.model
    return decoder


def unpacked_hidden(decoder: Any, tokens_T: Tensor, layout: PackedLayout) -> Tensor:
    """Return the last hidden states_TM of a packed row, computed by the decoder row by row.

    A prompt's states are taken from its first member's row: they do not depend on what follows.
    """
    same: dict[int, list[Any]] = defaultdict(list)
    for row in layout.rows:
        same[len(row)].append(row)
    cell_T = np.full(len(tokens_T), -1, dtype=np.int64)
    parts: list[Tensor] = []
    count = 0
    for rows in same.values():
        index_BL = np.stack(rows)
        hidden_BLM, _ = own_forward(decoder, tokens_T[to_device(index_BL, tokens_T.device)], cache=False)
        parts.append(hidden_BLM.flatten(0, 1))
        # Reversed: of several rows with the same prompt, the first one counts.
        cell_T[index_BL.ravel()[::-1]] = np.arange(count + index_BL.size - 1, count - 1, -1)
        count += index_BL.size
    return torch.cat(parts).index_select(0, to_device(cell_T, tokens_T.device))


def own_forward(decoder: Any, tokens_BL: Tensor, *, cache: Any) -> tuple[Tensor, Any]:
    """Return (hidden_BLM, cache). `cache`: False for none, None for a new one, or that of earlier tokens."""
    # Some families, such as Mamba 2, end with float32 in a bfloat16 model; the output layer is bfloat16.
    dtype = decoder.get_input_embeddings().weight.dtype
    if cache is False:
        return decoder(input_ids=tokens_BL, use_cache=False).last_hidden_state.to(dtype), None
    name = cache_name(decoder)
    output = decoder(input_ids=tokens_BL, use_cache=True, **{name: cache})
    return output.last_hidden_state.to(dtype), getattr(output, name)


def cache_name(decoder: Any) -> str:
    known = inspect.signature(decoder.forward).parameters
    name = next((name for name in CACHES if name in known), None)
    if name is None:
        raise ValueError("the decoder takes no cache")
    return name


def copied_rows(cache: Any, rows_B: Tensor) -> Any:
    """Return a copy of a cache with these rows, which may repeat."""
    return kept_rows(copy.deepcopy(cache), rows_B)


def kept_rows(cache: Any, rows_B: Tensor) -> Any:
    """Reduce or repeat a cache's rows."""
    cache.reorder_cache(rows_B)
    return cache
