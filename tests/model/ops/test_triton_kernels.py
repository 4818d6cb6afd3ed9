"""The update's small kernels, interpreted, against what they compute in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)
from groupwise.model.attention.segment_attention import merge
from groupwise.model.ops import triton_kernels
from groupwise.model.ops.rotary import rotate, sine_halves


@pytest.mark.parametrize("shape", [(3, 5), (1, 40, 70)])
def test_the_gated_silu_and_its_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(shape, requires_grad=True) for _ in range(2))
    grad = torch.randn(shape)
    expected = silu(gate) * up
    expected.backward(grad)
    torch.testing.assert_close(triton_kernels.gated_silu(gate.detach(), up.detach()), expected.detach())
    gated, dgate, dup = grad.clone(), gate.detach().clone(), up.detach().clone()
    triton_kernels.gated_silu_backward_(gated, dgate, dup)
    torch.testing.assert_close(gated, expected.detach())
    torch.testing.assert_close(dgate, gate.grad)
    torch.testing.assert_close(dup, up.grad)


@pytest.mark.parametrize(("heads", "size"), [(3, 8), (5, 12)])
def test_a_turn_is_that_of_torch_and_turning_back_is_its_transpose(heads: int, size: int) -> None:
    torch.manual_seed(0)
    x_TND = torch.randn(7, heads, size, requires_grad=True)
    cos_TD, sin_TD = torch.randn(2, 7, size)
    expected = rotate(x_TND.detach(), cos_TD[:, None], *sine_halves(sin_TD[:, None]))
    torch.testing.assert_close(
        triton_kernels.rotate_heads(x_TND.detach(), cos_TD, sin_TD, back=False), expected
    )

    half = size // 2
    swapped = torch.cat([-x_TND[..., half:], x_TND[..., :half]], -1)
    grad = torch.randn_like(expected)
    (x_TND * cos_TD[:, None] + swapped * sin_TD[:, None]).backward(grad)
    torch.testing.assert_close(triton_kernels.rotate_heads(grad, cos_TD, sin_TD, back=True), x_TND.grad)


def test_merging_into_an_output_is_merging() -> None:
    torch.manual_seed(0)
    one, other = ((torch.randn(6, 3, 8), torch.randn(3, 6).T) for _ in range(2))
    expected = merge(one, other)
    before_TH = one[1].clone()
    lse_TH = triton_kernels.merge_into(*one, *other)
    torch.testing.assert_close(one[0], expected[0])
    torch.testing.assert_close(lse_TH, expected[1])
    assert torch.equal(one[1], before_TH), "what every warp reads is left alone"
