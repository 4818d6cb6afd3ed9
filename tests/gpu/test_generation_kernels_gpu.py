"""The kernels between the matrix products of a decode step, on the device, against plain torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from groupwise.engine import sampler
from groupwise.engine.cuda import fused_layers, graph_weights, sampling_kernels
from groupwise.engine.cuda.attention_kernels import launch, padded
from groupwise.engine.cuda.graph_weights import FP8, FP8Rows, FP8Weight, in_fp8
from groupwise.model.device import deterministic_kernels
from groupwise.records import Sampling
from tests.support.cuda_checks import DEVICE, DTYPES, HALF, assert_near, assert_repeatable, relative


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 896, 1536, 4097])
@pytest.mark.parametrize("tokens", [1, 65])
def test_the_residual_sum_and_its_norm_are_those_of_torch(tokens, size, dtype):
    x, delta, weight = random(tokens, size, dtype=dtype), random(tokens, 2 * size, dtype=dtype), random(size)
    weight = weight.to(dtype)
    out = torch.full_like(x, torch.nan)
    total = (x.float() + delta[:, :size].float()).to(dtype)
    launch(
        fused_layers.add_norm,
        (tokens,),
        x, delta, weight, out, out, 1e-6, delta.stride(0),
        ADD=True, SIZE=size, PADDED=padded(size, least=1), FP8=False, early=True, num_warps=4,
    )  # fmt: skip
    assert torch.equal(x, total)
    exact = total.double()
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert_near(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1536, 8960, 4097])
def test_the_gated_activation_is_that_of_torch(size, dtype):
    gate_up = random(33, 2 * size, dtype=dtype)
    out = torch.full((33, size), torch.nan, dtype=dtype, device=DEVICE)
    launch(
        fused_layers.silu_and_multiply,
        (33, -(-size // 1024)),
        gate_up, out, gate_up.stride(0),
        SIZE=size, BLOCK=1024, early=True, num_warps=4,
    )  # fmt: skip
    gate, up = gate_up.double().split(size, dim=1)
    assert_near(out, silu(gate) * up, dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"),
    [(9, 3, 64), (14, 2, 64), (8, 1, 80), (12, 2, 96), (28, 4, 128), (4, 2, 256)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_are_rotated_and_stored(heads, key_heads, size, with_norms, dtype):
    tokens, blocks = 21, 40
    qkv = random(tokens, (heads + 2 * key_heads) * size, dtype=dtype)
    cos, sin = random(tokens, size // 2), random(tokens, size // 2)
    q_weight, k_weight = random(size, dtype=dtype), random(size, dtype=dtype)
    keys, values = torch.full((2, blocks, key_heads, size), torch.nan, dtype=dtype, device=DEVICE)
    places = torch.randperm(blocks, device=DEVICE)[:tokens]
    q, k, v = qkv.view(tokens, -1, size).double().split([heads, key_heads, key_heads], dim=1)
    if with_norms:
        q, k = normed(q, q_weight.double()), normed(k, k_weight.double())

    def rotated(x: Tensor) -> Tensor:
        low, high = x.split(size // 2, dim=-1)
        c, s = (y.to(dtype).double()[:, None] for y in (cos, sin))
        return torch.cat([low * c - high * s, high * c + low * s], dim=-1)

    launch(
        fused_layers.rotate_and_store,
        (tokens,),
        qkv, cos, sin, q_weight, k_weight, keys, values, keys, values, places, 1.0, 1e-6, qkv.stride(0),
        HEADS=heads, KEY_HEADS=key_heads, SIZE=size, HALF=padded(size // 2, least=1),
        PADDED=padded(heads + key_heads, least=1), PADDED_KEYS=padded(key_heads, least=1),
        NORMED=with_norms, FP8=False, early=True, num_warps=4,
    )  # fmt: skip
    assert_near(qkv.view(tokens, -1, size)[:, :heads], rotated(q), dtype)
    assert_near(keys[places], rotated(k), dtype)
    assert torch.equal(values[places].double(), v)
    untouched = torch.ones(blocks, dtype=torch.bool, device=DEVICE)
    untouched[places] = False
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()


def test_rotating_and_storing_gives_the_same_bits_every_time():
    tokens, heads, key_heads, size = 512, 12, 2, 128
    qkv = random(tokens, (heads + 2 * key_heads) * size, dtype=HALF)
    cos, sin = random(tokens, size // 2), random(tokens, size // 2)
    q_weight, k_weight = random(size, dtype=HALF), random(size, dtype=HALF)
    keys, values = torch.zeros(2, tokens, key_heads, size, dtype=HALF, device=DEVICE)
    places = torch.randperm(tokens, device=DEVICE)

    def compute() -> list[Tensor]:
        own = qkv.clone()
        launch(
            fused_layers.rotate_and_store,
            (tokens,),
            own, cos, sin, q_weight, k_weight, keys, values, keys, values, places, 1.0, 1e-6, own.stride(0),
            HEADS=heads, KEY_HEADS=key_heads, SIZE=size, HALF=size // 2,
            PADDED=padded(heads + key_heads, least=1), PADDED_KEYS=padded(key_heads, least=1),
            NORMED=True, FP8=False, early=True, num_warps=4,
        )  # fmt: skip
        return [own, keys, values]

    assert_repeatable(compute)


def values_of(rows: FP8Rows) -> Tensor:
    return rows.values_TI.double() * rows.scale_T1


def nearest_in_fp8(x: Tensor) -> FP8Rows:
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return FP8Rows((x.float() / scale).to(FP8), scale)


def assert_rounded(rows: FP8Rows, expected: Tensor) -> None:
    """Every number is one of the two in FP8 beside the expected one, the scale that of the largest."""
    scale = expected.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    assert torch.allclose(rows.scale_T1.double(), scale, rtol=1e-2)
    step = (2.0 ** torch.floor((expected / scale).abs().clamp_min(2**-6).log2()) / 8) * scale
    assert bool(((values_of(rows) - expected).abs() <= 1.01 * step).all())


@pytest.mark.parametrize("size", [16, 1536, 8960])
def test_rows_in_fp8_are_the_nearest_numbers(size):
    x = random(33, 2 * size, dtype=HALF)[:, :size] * torch.logspace(-4, 4, 33, device=DEVICE)[:, None].to(
        HALF
    )
    x[5] = 0
    assert_rounded(in_fp8(x), x.double())


@pytest.mark.parametrize("size", [576, 1536])
def test_rows_in_fp8_of_the_residual_sum_and_its_norm_are_those_of_torch(size):
    x, delta, weight = random(65, size, dtype=HALF), random(65, size, dtype=HALF), random(size, dtype=HALF)
    exact = (x.float() + delta.float()).to(HALF).double()
    rows = fused_layers._add_norm(x, delta, fused_layers.Norm(weight, 1e-6), fp8=True)
    assert torch.equal(x.double(), exact)
    assert isinstance(rows, FP8Rows)
    assert_rounded(rows, exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double())


@pytest.mark.parametrize("size", [16, 1536, 8960])
def test_rows_in_fp8_of_the_gated_activation_are_those_of_torch(size):
    gate_up = random(33, 2 * size, dtype=HALF)
    rows = fused_layers._silu_and_multiply(gate_up, fp8=True)
    assert isinstance(rows, FP8Rows)
    gate, up = gate_up.double().split(size, dim=1)
    assert_rounded(rows, silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 8, 65, 512])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_product_in_fp8_is_that_of_the_rounded_matrices(rows, bias):
    layers = [torch.nn.Linear(1536, size, bias=bias, device=DEVICE, dtype=HALF) for size in (1536, 256, 256)]
    product = FP8Weight(*layers, like=layers[0].weight)
    x = random(rows, 1536, dtype=HALF)
    expected = [values_of(in_fp8(x)) @ values_of(nearest_in_fp8(layer.weight)).T for layer in layers]
    if bias:
        expected = [y + layer.bias.double() for y, layer in zip(expected, layers, strict=True)]
    assert_near(product(x), torch.cat(expected, 1), HALF)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (8, 1, 80), (28, 4, 128), (4, 2, 256)])
def test_keys_are_rotated_and_stored_in_fp8(heads, key_heads, size):
    tokens, blocks = 21, 40
    qkv = random(tokens, (heads + 2 * key_heads) * size, dtype=HALF)
    cos, sin, weight = random(tokens, size // 2), random(tokens, size // 2), random(size, dtype=HALF)
    plain = torch.zeros(2, blocks, key_heads, size, dtype=HALF, device=DEVICE)
    stored = torch.zeros(2, blocks, key_heads, size, dtype=FP8, device=DEVICE)
    scales = torch.full((2, blocks, key_heads), torch.nan, device=DEVICE)
    places = torch.randperm(blocks, device=DEVICE)[:tokens]
    for cache, own_scales in ((plain, plain), (stored, scales)):
        launch(
            fused_layers.rotate_and_store,
            (tokens,),
            qkv.clone(), cos, sin, weight, weight, *cache, *own_scales, places, 1.0, 1e-6, qkv.stride(0),
            HEADS=heads, KEY_HEADS=key_heads, SIZE=size, HALF=padded(size // 2, least=1),
            PADDED=padded(heads + key_heads, least=1), PADDED_KEYS=padded(key_heads, least=1),
            NORMED=False, FP8=cache is stored, early=True, num_warps=4,
        )  # fmt: skip
    for numbers, scale, expected in zip(stored, scales, plain, strict=True):
        rows = FP8Rows(numbers.view(torch.uint8)[places].view(FP8), scale[places][..., None])
        assert_rounded(rows, expected[places].double())
    untouched = torch.ones(blocks, dtype=torch.bool, device=DEVICE)
    untouched[places] = False
    assert scales[:, untouched].isnan().all()


def add_own_products(y: Tensor, up: Tensor, adapter: Tensor, widths: list[int], rank: int) -> None:
    """Add each row's own B product to its outputs, in place."""
    rows, outputs = len(y), sum(widths)
    starts = np.cumsum([0, *widths[:-1]])
    parts = torch.tensor(np.stack([starts, widths], 1), dtype=torch.int32, device=DEVICE)
    launch(
        graph_weights.add_own,
        (-(-rows // graph_weights.ROWS), -(-max(widths) // graph_weights.COLUMNS), len(widths)),
        y, up, adapter, parts, rows, y.stride(0), outputs, up.stride(0),
        SIZE=len(up), RANK=rank, PADDED=padded(rank),
        ROWS=graph_weights.ROWS, COLUMNS=graph_weights.COLUMNS, num_warps=4,
    )  # fmt: skip


@pytest.mark.parametrize("rank", [4, 16, 33])
@pytest.mark.parametrize("members", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_gets_the_product_of_its_own_adapter(members, rank, dtype):
    widths = [200, 64, 64]
    rows, outputs, size = 150, sum(widths), members * rank
    y = random(rows, outputs + len(widths) * size, dtype=dtype)
    up = random(size, outputs, dtype=dtype)
    adapter = torch.sort(torch.randint(-1, members, (rows,), device=DEVICE)).values
    starts = np.cumsum([0, *widths[:-1]])
    expected = y[:, :outputs].double().clone()
    for row, number in enumerate(adapter.tolist()):
        for part, (start, width) in enumerate(zip(starts, widths, strict=True)):
            if number >= 0:
                low = y[row, outputs + part * size + number * rank :][:rank].double()
                expected[row, start : start + width] += (
                    low @ up[number * rank : (number + 1) * rank, start : start + width].double()
                )
    add_own_products(y, up, adapter, widths, rank)
    assert_near(y[:, :outputs], expected, dtype)


def test_own_products_give_the_same_bits_every_time():
    widths, rank, members = [512, 256, 256], 16, 4
    up = random(members * rank, sum(widths), dtype=HALF)
    y = random(512, sum(widths) + len(widths) * len(up), dtype=HALF)
    adapter = torch.sort(torch.randint(-1, members, (512,), device=DEVICE)).values

    def compute() -> list[Tensor]:
        own = y.clone()
        add_own_products(own, up, adapter, widths, rank)
        return [own]

    assert_repeatable(compute)


class Draw:
    """One sampled token of each row, by the kernels of a decode step."""

    def __init__(self, logits_RV: Tensor, sampling: Sampling, *, lengths: list[int], ends: list[int]) -> None:
        self.logits_RV, self.sampling = logits_RV, sampling
        rows = len(logits_RV)
        self.slot_R = torch.randperm(rows, device=DEVICE).int()

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=DEVICE)

        self.seed = torch.randint(-(2**62), 2**62, (rows,), device=DEVICE)
        self.length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.token, self.done = full(-1, torch.int32), full(0, torch.int32)
        self.logprob, self.entropy = full(torch.nan, torch.float32), full(torch.nan, torch.float32)
        self.scale = full(1 / sampling.temperature if not sampling.greedy else 1.0, torch.float32)
        self.ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (tokens_R, logprobs_R, entropies_R) in row order."""
        rows, vocabulary = self.logits_RV.shape
        chunks = -(-vocabulary // sampling_kernels.CHUNK)
        best, total, weighted = torch.full((3, rows, chunks), torch.nan, device=DEVICE)
        best_at = torch.full((rows, chunks), -1, dtype=torch.int32, device=DEVICE)
        greedy = self.sampling.greedy
        launch(
            sampling_kernels.sum_chunks,
            (rows, chunks),
            self.logits_RV, best, best_at, total, weighted, self.slot_R, self.scale, vocabulary, chunks,
            CHUNK=sampling_kernels.CHUNK, GREEDY=greedy, SCALED=greedy, early=True, num_warps=4,
        )  # fmt: skip
        launch(
            sampling_kernels.close_step,
            (rows,),
            self.logits_RV, best, best_at, total, weighted, self.slot_R, self.seed, self.length,
            self.token, self.done, self.logprob, self.entropy, self.ends,
            self.scale, vocabulary, chunks, self.sampling.max_tokens,
            CHUNK=sampling_kernels.CHUNK, CHUNKS=padded(chunks, least=2), PADDED_ENDS=len(self.ends),
            GREEDY=greedy, SCALED=greedy, early=True, num_warps=8,
        )  # fmt: skip
        at = self.slot_R.long()
        return self.token[at], self.logprob[at], self.entropy[at]

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        at = self.slot_R.long().cpu().numpy()
        noise = sampler.uniforms(
            self.seed.cpu().numpy().view(np.uint64)[at], self.length.cpu().numpy()[at].astype(np.uint64)
        )
        return sampler.draw(self.logits_RV.cpu().float(), self.sampling, torch.from_numpy(noise))


VOCABULARIES = [2, 272, 4095, 4096, 4097, 49152, 151936]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_are_sampled_as_on_a_cpu(vocabulary, temperature):
    rows = 64
    logits_RV = 3 * random(rows, vocabulary)
    logits_RV[5, :-1] = -torch.inf  # one token left
    draw = Draw(
        logits_RV, Sampling(temperature=temperature, max_tokens=50), lengths=[7] * rows, ends=[-1, -1]
    )
    expected = draw.expected()
    tokens, logprobs, entropies = (x.cpu() for x in draw())
    # A token at the border of its noise may differ by rounding of a sum.
    assert int((tokens != expected[0]).sum()) <= 1
    same = tokens == expected[0]
    assert torch.allclose(logprobs[same], expected[1][same], atol=2e-5, rtol=2e-5)
    assert torch.allclose(entropies[same], expected[2][same], atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}])
def test_deterministic_kernels_draw_the_same_tokens(settings):
    logits = 4 * random(16, 5001)
    noise = torch.rand(16, dtype=torch.float64, device=DEVICE)
    expected, logprobs, _ = sampler.draw(logits, Sampling(**settings), noise)
    with deterministic_kernels(DEVICE, on=True):
        tokens, repeated, _ = sampler.draw(logits, Sampling(**settings), noise)
    assert torch.equal(tokens, expected)
    assert relative(repeated, logprobs) < 1e-4


def test_sampled_tokens_follow_their_probabilities():
    logits_V = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 0.5], device=DEVICE)
    rows = 40000 if DEVICE.type == "cuda" else 40
    draw = Draw(
        logits_V.repeat(rows, 1), Sampling(temperature=1.0, max_tokens=9), lengths=[0] * rows, ends=[-1, -1]
    )
    counts = torch.bincount(draw()[0].long(), minlength=5).cpu().float() / rows
    if DEVICE.type == "cuda":
        # Five standard deviations of a share of 40,000 draws are at most 0.0125.
        assert torch.allclose(counts, logits_V.softmax(-1).cpu(), atol=0.0125)
    assert counts[3] == 0


def test_a_sequence_ends_at_an_end_token_and_at_its_limit_and_an_ended_one_stays_as_it_is():
    logits = torch.full((3, 300), -50.0, device=DEVICE)
    logits[0, 17] = logits[1, 18] = logits[2, 18] = 50.0
    draw = Draw(logits, Sampling(temperature=1.0, max_tokens=5), lengths=[2, 2, 2], ends=[17, -1])
    at = draw.slot_R.long()
    draw.length[at] = torch.tensor([2, 4, 2], dtype=torch.int32, device=DEVICE)
    draw()
    assert draw.done[at].tolist() == [1, 1, 0]
    assert draw.length[at].tolist() == [3, 5, 3]
    draw()
    assert draw.length[at].tolist() == [3, 5, 4]
    assert draw.token[at].tolist() == [17, 18, 18]


@pytest.mark.parametrize("broken", ["nan", "all -inf"])
def test_logits_that_no_token_can_be_sampled_from_give_nan(broken):
    logits = random(3, 5000)
    if broken == "nan":
        logits[1, 4500] = torch.nan
    else:
        logits[1] = -torch.inf
    draw = Draw(logits, Sampling(temperature=1.0, max_tokens=5), lengths=[0] * 3, ends=[-1, -1])
    _, _, entropies = draw()
    assert entropies.isnan().tolist() == [False, True, False]


def test_sampling_gives_the_same_bits_every_time():
    logits = 3 * random(512, 151936)

    def compute() -> list[Tensor]:
        torch.manual_seed(1)
        return list(Draw(logits, Sampling(temperature=1.0, max_tokens=9), lengths=[0] * 512, ends=[-1, -1])())

    assert_repeatable(compute)


def begun() -> list[Tensor]:
    """Begin sequences in slots 4 and 1 of six: rows, seeds, adapters, inverse temperatures, lengths, done."""
    slots, seeds, adapters = [4, 1], [-(2**62), 2**62 + 3], [2, 0]
    scales = np.array([0.5, 1.25], dtype=np.float32).view(np.int32)
    new = torch.from_numpy(np.stack([slots, seeds, adapters, scales])).to(DEVICE)
    kinds = (torch.int64, torch.int64, torch.float32, torch.int32, torch.int32)
    seed, adapter, scale, length, done = (torch.full((6,), 9, dtype=kind, device=DEVICE) for kind in kinds)
    rows = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    launch(
        sampling_kernels.begin_sequences,
        (2,),
        new, rows, seed, adapter, scale, length, done, 2,
        num_warps=1,
    )  # fmt: skip
    return [rows, seed, adapter, scale, length, done]


def test_sequences_begin_in_their_slots_and_leave_the_others():
    rows, seed, adapter, scale, length, done = (x.tolist() for x in begun())
    assert rows == [4, 1]
    assert seed == [9, 2**62 + 3, 9, 9, -(2**62), 9]
    assert adapter == [9, 0, 9, 9, 2, 9]
    assert scale == [9.0, 1.25, 9.0, 9.0, 0.5, 9.0]
    assert length == done == [9, 0, 9, 9, 0, 9]


def opened() -> list[Tensor]:
    """Open a step of slots 2, 0 and 1: tokens, positions, KV cache slots, and the lengths of the rows."""

    def on_device(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    rows, length, token = on_device([2, 0, 1]), on_device([1, 16, 17]), on_device([50, 60, 70])
    prompt, table = on_device([3, 10, 100]), on_device([[5, 9], [6, 9], [7, 8]])
    tokens, positions, places = (on_device([-1] * 3, torch.int64) for _ in range(3))
    row_length = on_device([-1] * 3)
    launch(
        sampling_kernels.open_step,
        (3,),
        rows, length, token, prompt, table, tokens, positions, places, row_length, 2,
        PAGE=16, num_warps=1,
    )  # fmt: skip
    return [tokens, positions, places, row_length]


def test_a_step_opens_with_the_last_token_its_position_and_its_place_in_the_cache():
    tokens, positions, places, row_length = (x.tolist() for x in opened())
    assert tokens == [70, 50, 60]
    assert row_length == [17, 1, 16]
    assert positions == [100 + 16, 3, 10 + 15]
    assert places == [8 * 16, 5 * 16, 6 * 16 + 15]  # the 17th token is the first of its second block


@pytest.mark.parametrize("compute", [begun, opened])
def test_beginning_and_opening_give_the_same_bits_every_time(compute):
    assert_repeatable(compute)


def test_penalties_give_the_same_bits_every_time():
    vocabulary, slots = 49159, 64
    state = sampling_kernels.PenaltyState(slots=slots, vocabulary=vocabulary, device=DEVICE)
    penalties = sampler.Penalties(bias=((3, 2.0),), repetition=1.5, frequency=0.3, presence=0.2)
    for slot in range(0, slots, 2):
        state.set(slot, penalties, (7, 8, slot))
    rows = torch.randperm(slots, device=DEVICE).int()
    logits, counts = random(slots, vocabulary), state.counts.clone()
    last = torch.full((slots + 1,), 7, dtype=torch.int32, device=DEVICE)

    def compute() -> list[Tensor]:
        changed = logits.clone()
        state.counts.copy_(counts)
        return [state.apply(changed, rows, last, count=True), state.counts]

    assert_repeatable(compute)


@pytest.mark.parametrize("vocabulary", [300, 4096, 49152 + 7])
def test_penalties_on_the_device_are_those_of_the_cpu(vocabulary):
    rows, slots = (64, 70) if DEVICE.type == "cuda" else (5, 8)
    state = sampling_kernels.PenaltyState(slots=slots, vocabulary=vocabulary, device=DEVICE)
    generator = np.random.default_rng(3)
    slot_R = generator.permutation(slots)[:rows]
    penalties = [
        None
        if row % 4 == 3
        else sampler.Penalties(
            bias=((row, 5.0), (vocabulary - 1, -100.0)) if row % 2 else (),
            repetition=(0.5, 1.0, 1.8)[row % 3],
            frequency=0.3 * (row % 5),
            presence=(row % 3) - 1.0,
        )
        for row in range(rows)
    ]
    prompts = [tuple(generator.integers(0, vocabulary, 9).tolist()) for _ in range(rows)]
    for slot, one, prompt in zip(slot_R.tolist(), penalties, prompts, strict=True):
        state.set(slot, one, prompt)
    rows_R = torch.tensor(slot_R, dtype=torch.int32, device=DEVICE)
    tokens_S = torch.zeros(slots + 1, dtype=torch.int32, device=DEVICE)
    written: list[list[int]] = [[] for _ in range(rows)]
    for step in range(4):
        logits = 4 * random(rows, vocabulary)
        changed = logits.clone()
        changed = state.apply(changed, rows_R, tokens_S, count=step > 0)
        for row, one in enumerate(penalties):
            if one is None:
                assert torch.equal(changed[row], logits[row])
            else:
                expected = one.apply(logits[row], prompts[row], np.array(written[row], dtype=np.int64))
                assert torch.allclose(changed[row], expected, atol=1e-4)
            written[row].append([row, 7, prompts[row][0]][(row + step) % 3])
            tokens_S[slot_R[row]] = written[row][-1]


def test_a_layer_of_kernels_gives_the_same_bits_every_time():
    """Dependent launches overlap: a kernel that does not wait for its input shows here."""
    x_start, delta, weight = random(512, 1536, dtype=torch.bfloat16), random(512, 1536), random(1536)
    delta, weight = delta.to(torch.bfloat16), weight.to(torch.bfloat16)
    down = random(1536, 3072, dtype=torch.bfloat16) / 40

    def compute() -> list[Tensor]:
        # The next tensors lie in this memory. Otherwise it would hold the values of the last repetition,
        # and a kernel that reads too early would read what it should.
        poison = [torch.full((512, 3072), math.nan, device=DEVICE, dtype=torch.bfloat16) for _ in range(16)]
        del poison
        x = x_start.clone()
        norm = fused_layers.Norm(weight, 1e-6)
        for _ in range(4):
            h = fused_layers._add_norm(x, delta, norm)
            gate_up = h @ down
            h = fused_layers._silu_and_multiply(gate_up)
            x = fused_layers._add_norm(x, h, norm)
        return [x]

    assert_repeatable(compute)
    assert relative(compute()[0], x_start) > 0
