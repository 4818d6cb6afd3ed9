"""The update's kernels and its attention, on the device, against plain torch in higher precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from groupwise.model.attention.packed import PackedLayout
from groupwise.model.attention.segment_attention import merge
from groupwise.model.ops import triton_kernels
from groupwise.model.ops.logits import float_logits
from groupwise.model.ops.rotary import rotate, sine_halves
from tests.support.cuda_checks import (
    DEVICE,
    DTYPES,
    HALF,
    TOLERANCE,
    assert_near,
    assert_repeatable,
    relative,
)
from tests.support.packed_rows import naive_attention, visible

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""Of the interpreter, for lanes that a mask hides."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1023), (17, 8960), (4096, 1025)])
def test_swiglu_and_its_gradients_are_those_of_torch(shape, dtype):
    gate, up, grad = (random(*shape, dtype=dtype) for _ in range(3))
    exact = [x.double().requires_grad_() for x in (gate, up)]
    expected = silu(exact[0]) * exact[1]
    expected.backward(grad.double())
    assert_near(triton_kernels.gated_silu(gate, up), expected.detach(), dtype)
    product = grad.clone()
    triton_kernels.gated_silu_backward_(product, gate, up)
    assert_near(product, expected.detach(), dtype)
    assert_near(gate, exact[0].grad, dtype)
    assert_near(up, exact[1].grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(1, 64), (9, 64), (7, 80), (12, 96), (28, 128), (3, 256)])
def test_rotary_embeddings_and_their_transpose_are_those_of_torch(heads, size, dtype):
    x_TND = random(33, heads, size, dtype=dtype)
    cos_TD, sin_TD = random(33, size), random(33, size)
    exact = x_TND.double().requires_grad_()
    expected = rotate(exact, cos_TD.double()[:, None], *sine_halves(sin_TD.double()[:, None]))
    grad = random(33, heads, size, dtype=dtype)
    expected.backward(grad.double())
    assert_near(triton_kernels.rotate_heads(x_TND, cos_TD, sin_TD, back=False), expected.detach(), dtype)
    assert_near(triton_kernels.rotate_heads(grad, cos_TD, sin_TD, back=True), exact.grad, dtype)


def test_swiglu_and_rotary_give_the_same_bits_every_time():
    gate, up, grad = (random(2048, 1025, dtype=HALF) for _ in range(3))
    x_TND, cos_TD, sin_TD = random(512, 12, 128, dtype=HALF), random(512, 128), random(512, 128)

    def compute() -> list[Tensor]:
        product, own_gate, own_up = grad.clone(), gate.clone(), up.clone()
        triton_kernels.gated_silu_backward_(product, own_gate, own_up)
        turned = [triton_kernels.rotate_heads(x_TND, cos_TD, sin_TD, back=back) for back in (False, True)]
        return [triton_kernels.gated_silu(gate, up), product, own_gate, own_up, *turned]

    assert_repeatable(compute)


def attentions(
    tokens: int, heads: int, size: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Two attention outputs with their log-sum-exps, laid out as the flash kernel does."""
    one, other = ((random(tokens, heads, size, dtype=dtype), 3 * random(heads, tokens).T) for _ in range(2))
    return one, other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(1, 64), (9, 64), (7, 80), (12, 96), (28, 128), (3, 256)])
def test_two_attentions_merge_into_one(heads, size, dtype):
    one, other = attentions(300, heads, size, dtype)
    expected, lse = merge((one[0].double(), one[1].double()), (other[0].double(), other[1].double()))
    merged_lse = triton_kernels.merge_into(*one, *other)
    assert_near(one[0], expected, dtype)
    assert_near(merged_lse, lse, torch.float32)


@pytest.mark.parametrize(("heads", "size"), [(9, 64), (12, 128), (28, 128), (8, 256)])
def test_merging_gives_the_same_bits_every_time(heads, size):
    """The log-sum-exps that every warp reads must not change under a late warp."""
    one, other = attentions(4096, heads, size, torch.bfloat16)
    output = torch.empty_like(one[0])
    lse = torch.empty_like(one[1])

    def compute() -> list[Tensor]:
        output.copy_(one[0])
        lse.copy_(one[1])
        return [triton_kernels.merge_into(output, lse, *other), output]

    assert_repeatable(compute)
    expected, _ = merge((one[0].double(), one[1].double()), (other[0].double(), other[1].double()))
    compute()
    assert_near(output, expected, torch.bfloat16)


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 272), (33, 4096), (5, 151936), (700, 49153)])
def test_token_log_probabilities_and_their_gradients_are_those_of_full_logits(
    tokens, vocabulary, bias, frozen_head
):
    hidden_NM, weight_VM = random(tokens, 64), 0.3 * random(vocabulary, 64)
    bias_V = random(vocabulary) if bias else None
    tokens_N = torch.randint(vocabulary, (tokens,), device=DEVICE)
    grad_N = random(tokens)
    ours = [x.clone().requires_grad_(not frozen_head or n == 0) for n, x in enumerate((hidden_NM, weight_VM))]
    logprobs_N, entropy_N = triton_kernels.FusedTokenLogprobs.apply(*ours, bias_V, tokens_N, 0.7)
    logprobs_N.backward(grad_N)

    exact = [x.double().requires_grad_() for x in (hidden_NM, weight_VM)]
    logits = exact[0] @ exact[1].T
    every_NV = ((logits if bias_V is None else logits + bias_V.double()) / 0.7).log_softmax(-1)
    expected_N = every_NV.gather(1, tokens_N[:, None]).squeeze(1)
    expected_N.backward(grad_N.double())

    # Matrix products of float32 may be made in TF32 on a GPU.
    assert relative(logprobs_N.detach(), expected_N.detach()) < 1e-3
    assert relative(entropy_N, -(every_NV.exp() * every_NV).sum(-1).detach()) < 1e-3
    assert relative(ours[0].grad, exact[0].grad) < 3e-3
    if not frozen_head:
        assert relative(ours[1].grad, exact[1].grad) < 3e-3


@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_in_float32_and_their_gradients_are_those_of_a_plain_product(with_bias):
    hidden, weight, bias = random(33, 272), random(1000, 272), random(1000)
    inputs = [x.to(HALF).requires_grad_() for x in (hidden, weight, bias)[: 2 + with_bias]]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    logits = float_logits(*inputs, *(() if with_bias else (None,)))
    assert logits.dtype == torch.float32
    expected = linear(*exact)
    assert_near(logits.detach(), expected.detach(), torch.float32)
    grad = random(33, 1000)
    logits.backward(grad)
    expected.backward(grad.double())
    for own, reference in zip(inputs, exact, strict=True):
        assert_near(own.grad, reference.grad, HALF)


def test_token_log_probabilities_give_the_same_bits_every_time():
    hidden_NM = random(512, 256, dtype=torch.bfloat16)
    weight_VM = random(50001, 256, dtype=torch.bfloat16)
    tokens_N = torch.randint(50001, (512,), device=DEVICE)

    def compute() -> list[Tensor]:
        hidden = hidden_NM.clone().requires_grad_()
        logprobs_N, entropy_N = triton_kernels.FusedTokenLogprobs.apply(
            hidden, weight_VM, None, tokens_N, 1.0
        )
        logprobs_N.sum().backward()
        return [logprobs_N.detach(), entropy_N, hidden.grad]

    assert_repeatable(compute)


ROWS = [
    [(5, [])],
    [(1, [1])],
    [(37, [1, 0, 63, 64, 65]), (128, [127, 2])],
    [(300, [200] * 8)],
]


@pytest.mark.parametrize("groups", ROWS)
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"),
    [(9, 3, 64), (14, 2, 64), (8, 8, 80), (8, 2, 96), (12, 2, 128), (4, 1, 256)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_attention_and_its_gradients_are_masked_softmax(groups, heads, key_heads, size, dtype):
    total = sum(prompt + sum(members) for prompt, members in groups)
    row = [random(h, total, size, dtype=dtype) for h in (heads, key_heads, key_heads)]
    grad_THD = random(total, heads, size, dtype=dtype)
    ours = [x.clone().requires_grad_() for x in row]
    layout = PackedLayout.build(groups, device=DEVICE)
    output_THD = layout.attend(*(x[None] for x in ours), layer=0, scale=size**-0.5)[0]
    output_THD.backward(grad_THD)

    exact = [x.double().requires_grad_() for x in row]
    expected_THD = naive_attention(*exact, visible(groups).to(DEVICE), size**-0.5)
    expected_THD.backward(grad_THD.double())
    assert_near(output_THD.detach(), expected_THD.detach(), dtype)
    for got, wanted in zip(ours, exact, strict=True):
        # The gradients of queries and keys vanish where there is but one key to attend to.
        error = float((got.grad.double() - wanted.grad).norm())
        assert error < 2 * TOLERANCE[dtype] * max(1.0, float(wanted.grad.norm()))


def test_packed_attention_gives_the_same_bits_every_time():
    groups = [(300, [200] * 8), (41, [17, 90])]
    total = sum(prompt + sum(members) for prompt, members in groups)
    row = [random(1, heads, total, 128, dtype=torch.bfloat16) for heads in (12, 2, 2)]
    layout = PackedLayout.build(groups, device=DEVICE)
    assert_repeatable(lambda: [layout.attend(*row, layer=0, scale=0.1)])
