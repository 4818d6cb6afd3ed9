"""Packed, chunked prefill: compute prompts into the KV cache in passes of bounded size.

A prompt longer than a pass is computed in segments. A prompt that continues a finished sequence copies that
sequence's keys and values and computes only the new tokens. Either way a segment attends to itself and to
the cached tokens before it: two attentions, merged by their log-sum-exp.

Axes: T tokens of the pass, S cached tokens before its segments, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.paged_attention import KVCache
from groupwise.engine.scheduler import History, Prefix
from groupwise.model.attention.hf_interface import STANDARD, AttentionVariant, merge_sinks
from groupwise.model.attention.packed import Attention, Kind, Parts
from groupwise.model.attention.segment_attention import (
    PaddedAttention,
    VarlenAttention,
    merge,
    supports_flash,
)
from groupwise.model.device import to_device
from groupwise.model.policy import Policy

PREFILL_TOKENS = 8192
"""Prompt tokens computed in one pass."""

Forward = Callable[[Tensor, Tensor, "PrefillLayout"], Tensor]


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a prompt that one pass computes."""

    prefix: Prefix
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def complete(self) -> bool:
        return self.end == len(self.prefix.tokens)


class Prefill:
    """Computes prompts and stores the next-token logits on each `Prefix`."""

    def __init__(self, policy: Policy, cache: KVCache, *, shared: bool = False) -> None:
        self.policy = policy
        self.cache = cache
        self.shared = shared
        """Whether prompts use different LoRA adapters."""

    def compute(self, prefixes: Sequence[Prefix], forward: Forward) -> None:
        for _ in self.passes(prefixes, forward):
            pass

    def passes(self, prefixes: Sequence[Prefix], forward: Forward) -> Iterator[None]:
        """Run one pass per iteration; skip prompts whose blocks were reclaimed in the meantime.

        `forward` is not stored: it belongs to the runner, and a reference cycle would delay freeing it.
        """
        for prefix in prefixes:
            if prefix.history is not None and prefix.blocks:
                self._copy_history(prefix, prefix.history)
        waiting = [prefix for prefix in prefixes if prefix.logits_V is None]
        while segments := next_pass(waiting):
            self._pass(segments, forward)
            waiting = [prefix for prefix in waiting if prefix.logits_V is None]
            yield

    def _copy_history(self, prefix: Prefix, history: History) -> None:
        """Copy a finished sequence's keys and values, which is much faster than computing them."""
        prefix.history = None
        if history.evicted:
            return
        size = self.cache.block_size
        cached = [
            slot_mapping(history.prefix.blocks, size)[: len(history.prefix.tokens)],
            slot_mapping(history.blocks, size)[: history.length],
        ]
        prefix.done = len(cached[0]) + len(cached[1])
        self.cache.copy(
            self._move(np.concatenate(cached)), self._move(slot_mapping(prefix.blocks, size)[: prefix.done])
        )
        history.copied = True

    def _pass(self, segments: Sequence[Segment], forward: Forward) -> None:
        # Segments with cached tokens before them come last: that part of the row also attends to the cache.
        segments = sorted(segments, key=lambda segment: segment.start > 0)
        tokens = np.concatenate([s.prefix.tokens[s.start : s.end] for s in segments])
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        layout = PrefillLayout.build(self.cache, segments, device=self.policy.device, shared=self.shared)
        hidden_TM = forward(self._move(tokens), self._move(positions), layout)
        ends = np.cumsum([s.length for s in segments]) - 1
        complete = [s.complete for s in segments]
        for segment, end in zip(segments, ends.tolist(), strict=True):
            segment.prefix.done = segment.end
            if segment.prefix.scores is not None:
                following = segment.prefix.tokens[segment.start + 1 : segment.end + 1]
                first = end + 1 - segment.length
                segment.prefix.scores.add(self.policy, hidden_TM[first : first + len(following)], following)
        if any(complete):
            logits_PV = self.policy.logits(hidden_TM[self._move(ends[complete])])
            finished = [s.prefix for s in segments if s.complete]
            for prefix, logits_V in zip(finished, logits_PV, strict=True):
                prefix.logits_V = logits_V

    def _move(self, array: NDArray[np.int64]) -> Tensor:
        return to_device(array, self.policy.device)


def next_pass(prefixes: Sequence[Prefix]) -> list[Segment]:
    """Return the segments of the next pass: whole prompts while they fit, long prompts in chunks."""
    segments: list[Segment] = []
    room = PREFILL_TOKENS
    for prefix in prefixes:
        if not prefix.blocks:
            continue
        needed = len(prefix.tokens) - prefix.done
        if segments and needed > room:
            break
        length = min(needed, room)
        segments.append(Segment(prefix, prefix.done, prefix.done + length))
        room -= length
    return segments


def slot_mapping(blocks: Sequence[int], size: int) -> NDArray[np.int64]:
    """Return the cache slot of each token in these blocks, counted in tokens from the start of the pool."""
    return (np.array(blocks, dtype=np.int64)[:, None] * size + np.arange(size)).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLayout:
    """Attention layout of segments packed into one row; stores their keys and values in the cache."""

    cache: KVCache
    slot_mapping: Tensor
    lengths: NDArray[np.int64]
    before: NDArray[np.int64]
    """Cached tokens before each of the last segments; the first segments start their prompts."""
    before_slots: Tensor
    device: torch.device
    adapter_T: Tensor | None = None
    """LoRA adapter index of each token."""
    _parts: dict[Kind, Parts] = field(default_factory=dict)
    _windowed: dict[tuple[Kind, int], tuple[Attention, Tensor]] = field(default_factory=dict)

    @classmethod
    def build(
        cls, cache: KVCache, segments: Sequence[Segment], *, device: torch.device, shared: bool = False
    ) -> PrefillLayout:
        table = [slot_mapping(s.prefix.blocks, cache.block_size) for s in segments]
        own = [line[s.start : s.end] for line, s in zip(table, segments, strict=True)]
        before = [line[: s.start] for line, s in zip(table, segments, strict=True) if s.start]
        nothing = np.zeros(0, dtype=np.int64)
        adapter = np.repeat([s.prefix.adapter for s in segments], [s.length for s in segments])
        return cls(
            cache=cache,
            slot_mapping=to_device(np.concatenate(own), device),
            lengths=np.array([s.length for s in segments], dtype=np.int64),
            before=np.array([len(line) for line in before], dtype=np.int64),
            before_slots=to_device(np.concatenate([nothing, *before]), device),
            device=device,
            adapter_T=to_device(adapter, device) if shared else None,
        )

    def attend(
        self,
        q_1HTD: Tensor,
        k_1KTD: Tensor,
        v_1KTD: Tensor,
        *,
        layer: int,
        scale: float,
        variant: AttentionVariant = STANDARD,
    ) -> Tensor:
        before = q_1HTD.shape[3]
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in self.cache.fitted(q_1HTD, k_1KTD, v_1KTD))
        self.store(k_TKD, v_TKD, layer=layer)
        output_THD = self.read(q_THD, k_TKD, v_TKD, layer=layer, scale=scale, variant=variant)
        return output_THD[None, ..., :before]

    def store(self, k_TKD: Tensor, v_TKD: Tensor, *, layer: int) -> None:
        self.cache.write(layer, k_TKD, v_TKD, self.slot_mapping)

    def read(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        layer: int,
        scale: float,
        variant: AttentionVariant = STANDARD,
    ) -> Tensor:
        """Compute causal attention within each segment and full attention to the cached tokens before it."""
        flash = supports_flash(q_THD) and variant.cap is None
        kind: Kind = VarlenAttention if flash else PaddedAttention
        if variant.window is not None and variant.window < self._longest:
            output_THD, lse_TH = self._read_window(kind, q_THD, k_TKD, v_TKD, layer, scale, variant)
        else:
            within, across = self._attentions(kind)
            output_THD, lse_TH = within.attend(q_THD, k_TKD, v_TKD, scale=scale, cap=variant.cap)
            if across is not None:
                behind = slice(int(self.lengths[: -len(self.before)].sum()), None)
                cached = self.cache.rows(layer, self.before_slots)
                other = across.attend(q_THD[behind], *cached, scale=scale, cap=variant.cap)
                output_THD[behind], lse_TH[behind] = merge((output_THD[behind], lse_TH[behind]), other)
        return output_THD if variant.sinks_H is None else merge_sinks(output_THD, lse_TH, variant.sinks_H)[0]

    def _read_window(
        self,
        kind: Kind,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        layer: int,
        scale: float,
        variant: AttentionVariant,
    ) -> tuple[Tensor, Tensor]:
        """Return (output_THD, lse_TH) of each segment over the cached tokens in its reach and its own."""
        assert variant.window is not None
        attention, keys_S = self._window_keys(kind, variant.window)
        cached = self.cache.rows(layer, self.before_slots)
        k_SKD, v_SKD = (
            torch.cat([old, new]).index_select(0, keys_S)
            for old, new in zip(cached, (k_TKD, v_TKD), strict=True)
        )
        return attention.attend(q_THD, k_SKD, v_SKD, scale=scale, cap=variant.cap)

    def _window_keys(self, kind: Kind, window: int) -> tuple[Attention, Tensor]:
        """Return the windowed attention and the index of its keys in the cached tokens, then the row."""
        if (kind, window) not in self._windowed:
            first = len(self.lengths) - len(self.before)
            before = np.concatenate([np.zeros(first, dtype=np.int64), self.before])
            starts = np.cumsum(self.lengths) - self.lengths + before.sum()
            ends = np.cumsum(before)
            spans = [
                np.r_[end - min(int(cached), window - 1) : end, start : start + length]
                for end, cached, start, length in zip(ends, before, starts, self.lengths, strict=True)
            ]
            attention = kind.build(
                self.lengths,
                np.array([len(span) for span in spans], dtype=np.int64),
                causal=True,
                device=self.device,
                window=window,
            )
            self._windowed[kind, window] = attention, to_device(np.concatenate(spans), self.device)
        return self._windowed[kind, window]

    @property
    def _longest(self) -> int:
        """Length of the longest prompt after this pass."""
        first = len(self.lengths) - len(self.before)
        return int(max((self.lengths[first:] + self.before).max(initial=0), self.lengths.max()))

    def _attentions(self, kind: Kind) -> Parts:
        """Return the attentions within and across segments; built once and shared by all layers."""
        if kind not in self._parts:
            within = kind.build(self.lengths, self.lengths, causal=True, device=self.device)
            across = None
            if len(self.before):
                later = self.lengths[-len(self.before) :]
                across = kind.build(later, self.before, causal=False, device=self.device)
            self._parts[kind] = within, across
        return self._parts[kind]
