"""Packed attention is plain masked attention, and packing loses nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain

import pytest
import torch
from torch import Tensor

from groupwise.learner.micro_batch import micro_batches, pack
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.attention.segment_attention import (
    attend,
    attend_backward,
    merge,
    plain_attend,
    plain_attend_backward,
    similar_sizes,
)
from groupwise.records import Sample
from tests.support.packed_rows import Groups, naive_attention, visible

CPU = torch.device("cpu")


def ragged_groups(seed: int) -> Groups:
    draw = random.Random(seed)
    return [
        (draw.randint(1, 30), [draw.choice([0, 1, 2, 7, 19, 40]) for _ in range(draw.randint(1, 4))])
        for _ in range(draw.randint(1, 4))
    ]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().norm() / expected.detach().norm().clamp_min(1e-30))


@pytest.mark.parametrize(
    "groups",
    [
        *(ragged_groups(seed) for seed in range(8)),
        [(5, []), (3, [])],  # prompts alone, as the engine prefills them
        [(5, [0, 0])],  # answers of one token have no token of their own in the row
        [(4, [0]), (20, [3, 0, 60]), (1, [1])],
    ],
)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_packed_attention_and_its_gradients_equal_masked_softmax(groups: Groups, key_heads: int) -> None:
    torch.manual_seed(0)
    total = sum(prompt + sum(members) for prompt, members in groups)
    row = [torch.randn(heads, total, 8) for heads in (4, key_heads, key_heads)]
    grad_THD = torch.randn(total, 4, 8)

    ours = [x.clone().requires_grad_() for x in row]
    layout = PackedLayout.build(groups, device=CPU)
    output_THD = layout.attend(*(x[None] for x in ours), layer=0, scale=0.3)[0]
    output_THD.backward(grad_THD)

    exact = [x.double().requires_grad_() for x in row]
    expected_THD = naive_attention(*exact, visible(groups), 0.3)
    expected_THD.backward(grad_THD.double())

    assert relative(output_THD, expected_THD) < 1e-5
    for got, wanted in zip(ours, exact, strict=True):
        # The gradients of queries and keys vanish where there is but one key to look at.
        assert float((got.grad - wanted.grad).norm()) < 1e-5 * max(1.0, float(wanted.grad.norm()))


Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@pytest.mark.parametrize(
    ("forward", "backward"), [(attend, attend_backward), (plain_attend, plain_attend_backward)]
)
@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, True), (False, False)])
def test_each_implementation_attends_as_softmax_does(
    forward: Callable[..., tuple[Tensor, Tensor]], backward: Backward, causal: bool, masked: bool
) -> None:
    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2, 4))
    mask = torch.zeros(2, 1, 1, 6).index_fill_(3, torch.tensor([5]), -torch.inf) if masked else None
    options = {"causal": causal, "mask": mask, "scale": 0.3}
    output, lse = forward(q, k, v, **options)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    k_all, v_all = (x.repeat_interleave(2, 1) for x in exact[1:])
    scores = exact[0] @ k_all.transpose(-1, -2) * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores + mask
    expected = scores.softmax(-1) @ v_all
    expected.backward(grad.double())

    assert relative(output, expected) < 1e-5
    assert relative(lse, scores.logsumexp(-1)) < 1e-5
    for got, wanted in zip(backward(grad, q, k, v, output, lse, **options), exact, strict=True):
        assert relative(got, wanted.grad) < 1e-5


@pytest.mark.parametrize("backward", [attend_backward, plain_attend_backward])
def test_a_query_with_infinite_normaliser_takes_no_part_in_any_gradient(backward: Backward) -> None:
    torch.manual_seed(2)
    q, k, v, grad = (torch.randn(1, 2, 5, 8) for _ in range(4))
    options = {"causal": True, "mask": None, "scale": 0.3}
    output, lse = attend(q, k, v, **options)
    lse[:, :, 3:] = torch.inf
    without = backward(grad, q, k, v, output, lse, **options)
    grad[:, :, 3:] = 0.0
    _, lse = attend(q, k, v, **options)
    for got, wanted in zip(without, backward(grad, q, k, v, output, lse, **options), strict=True):
        assert torch.equal(got, wanted)


def test_attention_over_two_sets_of_keys_merges_into_attention_over_their_union() -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    options = {"causal": False, "mask": None, "scale": 0.3}
    one, other = (attend(q, k[:, :, part], v[:, :, part], **options) for part in (slice(4), slice(4, None)))
    whole = attend(q, k, v, **options)
    for got, wanted in zip(merge(one, other), whole, strict=True):
        assert relative(got, wanted) < 1e-6


def test_segments_in_one_block_are_of_like_length() -> None:
    lengths = torch.randint(1, 3000, (200, 1), generator=torch.Generator().manual_seed(0)).numpy()
    blocks = similar_sizes(lengths)
    assert sorted(chain.from_iterable(block.tolist() for block in blocks)) == list(range(200))
    for block in blocks:
        assert max(lengths[block].max(), 16) <= 1.42 * max(lengths[block].min(), 16)


def sample(prompt: tuple[int, ...], reply: tuple[int, ...], *, group: int, trained: str = "") -> Sample:
    """Return a sample; `trained` has one character for each reply token, 1 where it is trained."""
    marks = [mark == "1" for mark in trained or "1" * len(reply)]
    size = len(prompt)
    return Sample(
        tokens=prompt + reply,
        trained=(False,) * size + tuple(marks),
        logprobs=(0.0,) * size + tuple(-t / 10 for t in reply),
        entropies=(0.0,) * (size + len(reply)),
        advantages=(0.0,) * size + tuple(float(t) for t in reply),
        prefix=size,
        group=group,
    )


def test_a_packed_row_is_prompts_then_members_without_their_last_tokens() -> None:
    samples = [
        sample((5, 6), (7, 2), group=0),
        sample((5, 6), (8, 9, 2), group=0, trained="101"),
        sample((4,), (2,), group=1),
    ]
    batch = pack(samples, device=CPU)
    assert batch.tokens_T.tolist() == [5, 6, 4, 7, 8, 9]
    assert batch.positions_T.tolist() == [0, 1, 0, 2, 2, 3]
    assert batch.predictor_N.tolist() == [1, 3, 1, 5, 2]
    assert batch.targets_N.tolist() == [7, 2, 8, 2, 2]
    assert batch.sequence_N.tolist() == [0, 0, 1, 1, 2]
    assert batch.advantages_N.tolist() == [7, 2, 8, 2, 2]
    torch.testing.assert_close(batch.sampled_N, torch.tensor([-0.7, -0.2, -0.8, -0.2, -0.2]))


def test_samples_of_one_group_with_different_prompts_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="share their prompt"):
        pack([sample((5, 6), (7,), group=0), sample((5, 9), (7,), group=0)], device=CPU)


def test_micro_batches_count_a_shared_prompt_once_in_each() -> None:
    samples = [sample((5,) * 10, (7,) * 4, group=g) for g in (0, 0, 0, 1)]
    assert micro_batches(samples, budget=18) == [[0, 1], [2], [3]]
    assert micro_batches(samples, budget=35) == [[0, 1, 2], [3]]
    assert micro_batches(samples, budget=100) == [[0, 1, 2, 3]]


def test_a_sample_over_the_budget_gets_a_micro_batch_of_its_own() -> None:
    samples = [sample((5,) * 10, (7,) * 4, group=g) for g in (0, 0, 1)]
    assert micro_batches(samples, budget=1) == [[0], [1], [2]]


def test_micro_batches_bring_the_members_of_a_group_together() -> None:
    samples = [sample((5,), (7, 2), group=g) for g in (1, 0, 1, 0)]
    assert micro_batches(samples, budget=100) == [[1, 3, 0, 2]]
