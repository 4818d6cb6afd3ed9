"""The runner for GPUs: decode steps captured as CUDA graphs over static device state, and prefill.

`GraphRunner` captures one graph per batch size, attention split and sampling settings, and replays it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.cuda import sampling_kernels as kernels
from groupwise.engine.cuda.attention_kernels import EARLY, launch, padded
from groupwise.engine.cuda.decode_attention import (
    Capacity,
    DecodeLayout,
    StepState,
    bucket,
    members_of_a_tile,
    own_splits,
    prompt_splits,
)
from groupwise.engine.cuda.fused_layers import fp8_forward, fused_forward
from groupwise.engine.cuda.graph_weights import FP8Cache
from groupwise.engine.cuda.speculation import LANES, Speculation, drafts_may_pay, sequences_of_a_step
from groupwise.engine.paged_attention import KVCache
from groupwise.engine.prefill import Prefill, PrefillLayout
from groupwise.engine.sampler import Penalties
from groupwise.engine.scheduler import Prefix, Scheduler
from groupwise.model.device import to_device
from groupwise.model.ops.logits import scaled_logits
from groupwise.model.policy import Policy
from groupwise.records import Sampling
from groupwise.tracking.run_folder import LOGGER

if TYPE_CHECKING:
    from groupwise.engine.multi_lora import LoRABank


def can_be_captured(policy: Policy) -> bool:
    """Whether a pass runs without a device sync: `dynamic` rotary embeddings read the length on the host."""
    rotary = getattr(policy.decoder, "rotary_emb", None)
    return bool(getattr(rotary, "rope_type", None) != "dynamic")


def captured(step: Callable[[], None], *, stream: torch.cuda.Stream, pool: Any) -> Callable[[], None]:
    """Capture a step as a CUDA graph and return its replay function.

    The step must have run once before: capture must not compile kernels or allocate workspaces.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def runs_without_sync(step: Callable[[], None]) -> bool:
    """Run a step, and return whether the host never waits for the device in it; else it cannot be captured.

    Some mixture-of-experts layers read the number of tokens of each expert on the host.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        LOGGER.info("generating without CUDA graphs: the model's layers wait for the device")
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


MOST_GRAPHS = 512
"""When reached, all graphs are dropped: clients of a server may send ever new sampling settings."""


class GraphRunner:
    """Runs prefill and decode steps over static device state, so a step needs no input from the host."""

    def __init__(
        self,
        policy: Policy,
        capacity: Capacity,
        *,
        block_size: int,
        members: LoRABank | None = None,
        speculative: bool = False,
        fp8: bool = False,
        fp8_cache: bool = False,
    ) -> None:
        """`fp8` multiplies weights and activations in FP8, `fp8_cache` stores keys and values in FP8."""
        self.policy, self.capacity, self.block_size = policy, capacity, block_size
        speculative = speculative and drafts_may_pay(policy)
        self.device = policy.device
        in_fp8 = fp8 or fp8_cache
        self._fused = fp8_forward(policy, products=fp8) if in_fp8 else fused_forward(policy, members)
        self.members = 0 if members is None else len(members)
        """Number of LoRA adapters that rows select from; 0: the policy's own adapter."""
        self.cache = (FP8Cache if fp8_cache else KVCache)(
            layers=policy.layers,
            blocks=capacity.blocks + 1,
            block_size=block_size,
            heads=policy.key_heads,
            size=policy.head_size,
            like=policy.head_weight,
        )
        self.state = StepState(
            slots=capacity.slots,
            members=members_of_a_tile(policy.heads, policy.key_heads, capacity.largest_group),
            prompt_blocks=capacity.prompt_blocks,
            own_blocks=capacity.own_blocks,
            idle_block=capacity.blocks,
            device=self.device,
            rows=LANES if speculative else 0,
        )
        self.speculation = Speculation(slots=capacity.slots, device=self.device) if speculative else None
        self._prompts = Prefill(policy, self.cache, shared=bool(self.members))
        self._penalties: kernels.PenaltyState | None = None
        """Allocated for the first sequence with penalties."""
        self._ends = _end_tokens(policy)
        # One stream of each kind for all graphs. Torch hands out its 32 streams round-robin, and matmuls on
        # one stream share a workspace with whatever else runs on that stream.
        self._capturing = new_stream(self.device) if can_be_captured(policy) else None
        self._side = None if EARLY.value else new_stream(self.device)
        self._graphs: dict[tuple[int, int, int, int, Sampling | None, bool, bool], Callable[[], None]] = {}
        """Steps by rows, rows of a sequence, splits of prompts and of own tokens, sampling settings (None:
        the layers alone), whether alternatives are stored, and whether some rows have penalties."""
        self._samplers: dict[tuple[int, Sampling, bool, bool], Callable[[], None]] = {}
        """Sampling from `_logits`: rows, settings, whether alternatives are stored, whether masks apply."""
        self._masks: Tensor | None = None
        """Token masks by slot, the idle one last; allocated for the first grammar."""
        self._logits: Tensor | None = None
        """Logits of a step whose tokens are sampled after the host has computed masks or applied a rule."""
        self._layouts: list[DecodeLayout] = []
        self._pool: Any = None
        self._addresses: tuple[int, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether the fused forward pass is used; it reads copies of the weights with adapters merged."""
        return self._fused is not None

    def refresh(self) -> None:
        """Copy the policy's current weights; drop all graphs if weights have moved in memory."""
        if self._fused is not None:
            self._fused.refresh()
        # With members, adapters are swapped in the policy all the time; graphs read them from copies.
        read = (p for p in self.policy.model.parameters() if not (self.members and p.requires_grad))
        addresses = tuple(p.data_ptr() for p in read)
        if addresses != self._addresses:
            self.drop_graphs()
            self._addresses = addresses

    def drop_graphs(self) -> None:
        """Drop captured graphs; they refer to this runner and would keep it alive."""
        self._graphs.clear()
        self._samplers.clear()
        self._layouts.clear()
        self._pool = None  # freed with its last graph

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Compute prompts into their blocks and store the next-token logits on each."""
        self._prompts.compute(prefixes, self.hidden)

    def prefill_passes(self, prefixes: Sequence[Prefix]) -> Iterator[None]:
        """Like `prefill`, but run one pass per iteration."""
        return self._prompts.passes(prefixes, self.hidden)

    def join(
        self,
        scheduler: Scheduler,
        slots_J: NDArray[np.int64],
        prefixes: Sequence[Prefix],
        sampling: Sampling,
        *,
        likely: bool = False,
        penalized: bool = False,
        masks_SW: Tensor | None = None,
        rule: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Start sequences in these slots and sample the first token of each.

        `likely`: also store the most likely tokens. `penalized`: some of the sequences have penalties.
        `masks_SW`: the tokens allowed in each slot. `rule`: changes the logits of these sequences.
        """
        if self.speculation is not None:
            self.speculation.begin(slots_J, [prefix.tokens for prefix in prefixes])
        state = self.state
        request_J = scheduler.request[slots_J]
        state.host_prompt_length[slots_J] = scheduler.prompt_length[request_J]
        width = scheduler.prompt_tables.shape[1]
        state.host_prompt_table[slots_J, :width] = scheduler.prompt_tables[request_J]
        temperature_J = scheduler.temperatures(slots_J, 1.0 if sampling.greedy else sampling.temperature)
        seed_J, adapter_J = scheduler.seed[slots_J].view(np.int64), scheduler.adapter[slots_J]
        new_4J = np.stack([slots_J, seed_J, adapter_J, np.reciprocal(temperature_J).view(np.int32)])
        rows_J = torch.empty(len(slots_J), dtype=torch.int32, device=self.device)
        launch(
            kernels.begin_sequences,
            (len(slots_J),),
            to_device(new_4J, self.device),
            rows_J, state.seed, state.adapter, state.scale, state.length, state.done,
            len(slots_J),
            num_warps=1,
        )  # fmt: skip
        logits_JV = torch.stack([p.logits_V for p in prefixes if p.logits_V is not None])
        if penalized:
            assert self._penalties is not None, "set before a sequence joins"
            logits_JV = self._penalties.apply(logits_JV, rows_J, state.token, count=False)
        if rule is not None:
            logits_JV = rule(logits_JV.float())
        if masks_SW is not None:
            self._copy_masks(masks_SW)
        self._sample(logits_JV, rows_J, sampling, likely=likely, masked=masks_SW is not None)

    def set_penalties(self, slot: int, penalties: Penalties | None, prompt: Sequence[int]) -> None:
        """Set the penalties of a sequence before it joins."""
        if penalties is not None and self._penalties is None:
            self._penalties = kernels.PenaltyState(
                slots=self.state.slots, vocabulary=self.policy.vocabulary, device=self.device
            )
        if self._penalties is not None:
            self._penalties.set(slot, penalties, prompt)

    def step(
        self,
        scheduler: Scheduler,
        slots_R: NDArray[np.int64],
        sampling: Sampling,
        *,
        likely: bool = False,
        penalized: bool = False,
        masks: Callable[[], Tensor] | None = None,
        rule: Callable[[Tensor], Tensor] | None = None,
        width: int = 1,
    ) -> None:
        """Sample one token for each sequence in these slots that has not ended.

        `width`: sample up to so many tokens for each, of which all but one are drafted.
        `masks` returns the tokens allowed in each slot, and `rule` changes the logits of the rows. The host
        calls them after it has issued the layers, so they may wait for the tokens of the step before.
        """
        state = self.state
        rows, key_heads = min(bucket(len(slots_R)), state.slots), self.policy.key_heads
        if width > 1:
            rows = width * sequences_of_a_step(len(slots_R))
        splits = prompt_splits(rows, key_heads=key_heads, longest=self._longest_prompt(scheduler))
        slots_R = np.repeat(slots_R, width)
        parts = own_splits(scheduler.length[slots_R], key_heads=key_heads)
        late = masks is not None or rule is not None
        settings = None if late else sampling
        graph = self._graph(rows, width, splits, parts, settings, likely and not late, penalized)
        sample = self._late_sampler(rows, sampling, likely, masks is not None) if late else None
        columns = scheduler.tables.shape[1]
        state.host_table[: len(scheduler.tables), :columns] = scheduler.tables
        state.host_room[: len(scheduler.room)] = np.minimum(scheduler.room, scheduler.limit)
        state.set_rows(slots_R, scheduler.request[slots_R])
        state.push()
        graph()
        if sample is not None:
            if rule is not None:
                assert self._logits is not None, "the layers run first"
                self._logits[: len(slots_R)] = rule(self._logits[: len(slots_R)].clone())
            if masks is not None:
                self._copy_masks(masks())
            sample()

    def status(
        self, *, likely: bool = False, drafted: bool = False
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start copying the last step's results to the host; return the buffer and its completion event.

        `drafted`: those of a step with drafts, for `Speculation.unpack`.
        """
        status = self.state.status_and_likely if likely else self.state.status
        if drafted:
            assert self.speculation is not None
            status = self.speculation.results
        if self.device.type != "cuda":
            return status.clone(), None
        copy = torch.empty_like(status, device="cpu", pin_memory=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copy.copy_(status, non_blocking=True)
        arrived.record()
        return copy, arrived

    def _longest_prompt(self, scheduler: Scheduler) -> int:
        """Return an upper bound on the length of prompts, from the runner so that calls share their graphs.

        With deterministic kernels from the call alone (`Capacity.of`).
        """
        width = self.state.prompt_width
        if torch.are_deterministic_algorithms_enabled():
            width = padded(scheduler.prompt_tables.shape[1], least=1)
        return width * self.block_size

    def _graph(
        self,
        rows: int,
        width: int,
        splits: int,
        parts: int,
        sampling: Sampling | None,
        likely: bool,
        penalized: bool,
    ) -> Callable[[], None]:
        settings = None if sampling is None else replace(sampling, stop=())
        key = (rows, width, splits, parts, settings, likely, penalized)
        if key not in self._graphs:
            if len(self._graphs) + len(self._samplers) >= MOST_GRAPHS:
                torch.cuda.synchronize()
                self.drop_graphs()
            layout = DecodeLayout.build(
                self.cache,
                self.state,
                rows=rows,
                heads=self.policy.heads,
                splits=splits,
                own_splits=parts,
                side=self._side,
            )
            self._layouts.append(layout)  # a graph holds addresses, not references to tensors
            self._graphs[key] = self._captured(
                (lambda: self._drafted_step(layout, sampling, width))
                if width > 1 and sampling is not None
                else (lambda: self._step(layout, sampling, likely=likely, penalized=penalized))
            )
        return self._graphs[key]

    def _late_sampler(self, rows: int, sampling: Sampling, likely: bool, masked: bool) -> Callable[[], None]:
        """Return the step that samples from the logits that the layers alone have left."""
        key = (rows, replace(sampling, stop=()), likely, masked)
        if key not in self._samplers:
            self._samplers[key] = self._captured(
                lambda: self._sample_late(rows, sampling, likely=likely, masked=masked)
            )
        return self._samplers[key]

    def _sample_late(self, rows: int, sampling: Sampling, *, likely: bool, masked: bool) -> None:
        assert self._logits is not None, "the layers run first"
        self._sample(self._logits[:rows], self.state.rows, sampling, likely=likely, masked=masked)

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        stream = self._capturing
        if stream is None:
            return step
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self.state.idle()
        step()
        if not self._graphs and not runs_without_sync(step):
            self._capturing = None
            return step
        return captured(step, stream=stream, pool=self._pool)

    def _step(
        self, layout: DecodeLayout, sampling: Sampling | None, *, likely: bool, penalized: bool
    ) -> None:
        state, rows = self.state, layout.rows
        launch(
            kernels.open_step,
            (rows,),
            state.rows, state.length, state.token, state.prompt_length, state.table,
            state.tokens, state.positions, state.slot_mapping, state.row_length, state.own_width,
            PAGE=self.block_size,
            num_warps=1,
        )  # fmt: skip
        hidden_RM = self.hidden(state.tokens[:rows], state.positions[:rows], layout)
        logits_RV = self.policy.logits(hidden_RM)
        if penalized:
            assert self._penalties is not None, "set before a sequence joins"
            logits_RV = self._penalties.apply(logits_RV, state.rows, state.token, count=True)
        if sampling is not None:
            self._sample(logits_RV, state.rows, sampling, likely=likely)
            return
        if self._logits is None:  # not while a graph is captured: the step has run before
            self._logits = torch.empty(state.slots, logits_RV.shape[1], device=self.device)
        self._logits[:rows] = logits_RV

    def _drafted_step(self, layout: DecodeLayout, sampling: Sampling, width: int) -> None:
        """Like `_step`, with `width` rows of each sequence."""
        state, rows, drafts = self.state, layout.rows, self.speculation
        assert drafts is not None
        drafts.open(state, rows // width, width=width, page=self.block_size)
        hidden_RM = self.hidden(state.tokens[:rows], state.positions[:rows], layout)
        self._sample(self.policy.logits(hidden_RM), drafts.own, sampling, likely=False, of=drafts)
        drafts.close(state, rows // width, width=width)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: DecodeLayout | PrefillLayout) -> Tensor:
        forward = self.policy.hidden if self._fused is None else self._fused.hidden
        return forward(tokens_T, positions_T, layout)

    def _copy_masks(self, masks_SW: Tensor) -> None:
        """Copy the masks of the first slots to the device."""
        slots, words = masks_SW.shape
        if self._masks is None:
            self._masks = torch.full((self.state.slots + 1, words), -1, dtype=torch.int32, device=self.device)
        self._masks[:slots].copy_(masks_SW, non_blocking=True)

    def _apply_masks(self, logits_RV: Tensor, rows_R: Tensor) -> None:
        """Exclude tokens in place, by the masks of the rows' slots."""
        assert self._masks is not None
        rows, vocabulary = logits_RV.shape
        launch(
            kernels.apply_masks,
            (rows, -(-vocabulary // kernels.CHUNK)),
            logits_RV, self._masks, rows_R, vocabulary, self._masks.shape[1],
            CHUNK=kernels.CHUNK,
            num_warps=4,
        )  # fmt: skip

    def _sample(
        self,
        logits_RV: Tensor,
        rows_R: Tensor,
        sampling: Sampling,
        *,
        likely: bool,
        masked: bool = False,
        of: StepState | Speculation | None = None,
    ) -> None:
        """Sample the next token of each row and advance its sequence; masks overwrite the logits.

        `of`: holds the state of the sequences; for drafts, every lane is one.
        """
        state = self.state if of is None else of
        if masked:
            self._apply_masks(logits_RV, rows_R)
        scaled = sampling.greedy or sampling.truncates
        if sampling.truncates and not sampling.greedy:
            scale_R1 = state.scale.index_select(0, rows_R[: len(logits_RV)])[:, None]
            logits_RV = scaled_logits(logits_RV.float() * scale_R1, replace(sampling, temperature=1.0))
        logits_RV = logits_RV.contiguous()
        rows, vocabulary = logits_RV.shape
        if likely:
            self.state.keep_likeliest(logits_RV.float(), rows_R[:rows].long(), scaled=scaled)
        chunks = -(-vocabulary // kernels.CHUNK)
        best, total, weighted = torch.empty(3, rows, chunks, device=self.device)
        best_at = torch.empty(rows, chunks, dtype=torch.int32, device=self.device)
        launch(
            kernels.sum_chunks,
            (rows, chunks),
            logits_RV, best, best_at, total, weighted, rows_R, state.scale, vocabulary, chunks,
            CHUNK=kernels.CHUNK,
            GREEDY=sampling.greedy,
            SCALED=scaled,
            early=True,
            num_warps=4,
        )  # fmt: skip
        launch(
            kernels.close_step,
            (rows,),
            logits_RV, best, best_at, total, weighted, rows_R, state.seed, state.length,
            state.token, state.done, state.logprob, state.entropy, self._ends,
            state.scale, vocabulary, chunks, sampling.max_tokens,
            CHUNK=kernels.CHUNK,
            CHUNKS=padded(chunks, least=2),
            PADDED_ENDS=len(self._ends),
            GREEDY=sampling.greedy,
            SCALED=scaled,
            early=True,
            num_warps=8,
        )  # fmt: skip
        if self.speculation is not None and self.speculation is not of:
            self.speculation.remember(self.state, rows_R, rows)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream on a GPU, None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _end_tokens(policy: Policy) -> Tensor:
    """Return the end-of-sequence tokens, padded with an id that no token has."""
    ends = sorted(policy.end_tokens)
    filled = [*ends, *[-1] * (padded(len(ends), least=2) - len(ends))]
    return torch.tensor(filled, dtype=torch.int32, device=policy.device)
