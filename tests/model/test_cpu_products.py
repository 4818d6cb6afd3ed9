"""Matrix products on a CPU, by MKL and by oneDNN."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from groupwise.model import device
from groupwise.model.device import (
    add_product,
    has_faster_onednn,
    product,
    repeatable_linear,
    rows_to_add,
    uses_onednn,
)
from groupwise.model.ops.lora_linear import use_fast_linears

onednn_here = pytest.mark.skipif(
    not has_faster_onednn(), reason="oneDNN is used on AMD processors with AVX-512"
)


@pytest.fixture(params=["MKL", "oneDNN"])
def library(request, monkeypatch) -> str:
    monkeypatch.setattr(device, "has_faster_onednn", lambda: request.param == "oneDNN")
    monkeypatch.setattr(device, "SMALL_MATRIX", 1)
    return str(request.param)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


LAYOUTS = {
    "rows": lambda: (random(70, 48), random(48, 90)),
    "transposed left": lambda: (random(48, 70).T, random(48, 90)),
    "transposed right": lambda: (random(70, 48), random(90, 48).T),
    "both transposed": lambda: (random(48, 70).T, random(90, 48).T),
    "columns of larger ones": lambda: (random(70, 100)[:, 3:51], random(48, 200)[:, 5:95]),
    "every second": lambda: (random(140, 48)[::2], random(48, 180)[:, ::2]),
    "one row": lambda: (random(1, 48), random(48, 90)),
    "one column": lambda: (random(70, 48), random(48, 1)),
    "one in between": lambda: (random(70, 1), random(1, 90)),
    "a row repeated": lambda: (random(1, 48).expand(70, 48), random(1, 48).expand(90, 48).T),
    "no rows": lambda: (random(0, 48), random(48, 90)),
    "no columns": lambda: (random(70, 48), random(48, 0)),
    "nothing in between": lambda: (random(70, 0), random(0, 90)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_is_that_of_double_precision(library, layout):
    left, right = LAYOUTS[layout]()
    exact = (left.double() @ right.double()).float()
    assert torch.allclose(product(left, right), exact, atol=1e-4)
    start = random(*exact.shape)
    total = start.clone()
    add_product(total, left, right)
    assert torch.allclose(total, start + exact, atol=1e-4)
    unset = torch.full_like(exact, float("nan"))
    add_product(unset, left, right, add=False)
    assert torch.allclose(unset, exact, atol=1e-4)


def test_a_product_is_added_to_columns_and_to_another_precision(library):
    left, right, total = random(6, 16), random(16, 4), torch.zeros(6, 10)
    add_product(total[:, 3:7], left, right)
    assert torch.allclose(total[:, 3:7], left @ right, atol=1e-5)
    assert not total[:, :3].any()
    assert not total[:, 7:].any()
    wide = torch.zeros(6, 4)
    add_product(wide, left.bfloat16(), right.bfloat16())
    assert torch.allclose(wide, left @ right, atol=0.2)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 33, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_those_of_linear(library, rows, biased):
    x_NI, weight_OI, bias_O = random(rows, 48), random(80, 48), random(80) if biased else None
    exact_NO = torch.nn.functional.linear(
        x_NI.double(), weight_OI.double(), None if bias_O is None else bias_O.double()
    )
    y_NO = repeatable_linear(x_NI, weight_OI, bias_O)
    assert y_NO.shape == (rows, 80)
    assert torch.allclose(y_NO.double(), exact_NO, atol=1e-4)


@onednn_here
def test_a_row_has_the_same_bits_beside_any_other_rows_and_on_any_number_of_threads():
    x_NI, weight_OI, before = random(600, 192), random(272, 192), torch.get_num_threads()
    whole_NO = repeatable_linear(x_NI, weight_OI, None)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 5, 16, 17, 40, 333, 600):
                assert torch.equal(repeatable_linear(x_NI[:rows], weight_OI, None), whole_NO[:rows])
                assert torch.equal(repeatable_linear(x_NI[-rows:], weight_OI, None), whole_NO[-rows:])
    finally:
        torch.set_num_threads(before)


def test_gradients_pass_through(library):
    x_NI, weight_OI = random(6, 16).requires_grad_(), random(4, 16).requires_grad_()
    repeatable_linear(x_NI, weight_OI, None).sum().backward()
    assert torch.allclose(x_NI.grad, weight_OI.detach().sum(0).expand(6, 16), atol=1e-5)
    assert torch.allclose(weight_OI.grad, x_NI.detach().sum(0).expand(4, 16), atol=1e-5)


@pytest.mark.parametrize("shape", [(48,), (1, 48), (5, 48), (2, 10, 48), (0, 48)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_computes_what_torch_computes(library, shape, biased):
    plain = nn.Linear(48, 80, bias=biased)
    fast = copy.deepcopy(plain)
    use_fast_linears(fast)
    assert ("forward" in vars(fast)) == (library == "oneDNN")
    inputs = [random(*shape).requires_grad_() for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((plain, fast), inputs, strict=True)]
    assert outputs[1].shape == outputs[0].shape
    for output in outputs:
        output.clamp_(max=1.0).square().sum().backward()  # in place, as some models do
    weights = zip(*([p.grad for p in layer.parameters()] for layer in (plain, fast)), strict=True)
    for one, other in [outputs, [x.grad for x in inputs], *weights]:
        assert torch.allclose(one, other, atol=1e-3)


def test_a_frozen_layer_keeps_no_input_for_the_backward_pass(library):
    layer, kept = nn.Linear(48, 80).requires_grad_(False), []
    use_fast_linears(layer)
    x_NI = random(5, 48).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda t: t):
        layer(x_NI)
    assert (5, 48) not in kept
    layer.requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda t: t):
        layer(x_NI)
    assert (5, 48) in kept


def test_a_bias_may_be_strided_and_may_alone_need_a_gradient(library):
    x_NI, weight_OI, bias_O = random(20, 48), random(80, 48), random(160)[::2].requires_grad_()
    exact_NO = (x_NI.double() @ weight_OI.double().T + bias_O.double()).float()
    with torch.no_grad():
        assert torch.allclose(repeatable_linear(x_NI, weight_OI, bias_O), exact_NO, atol=1e-4)
    (gradient,) = torch.autograd.grad(repeatable_linear(x_NI, weight_OI, bias_O).sum(), bias_O)
    assert torch.equal(gradient, torch.full((80,), 20.0))


def test_generation_uses_few_numbers_of_rows():
    padded = [rows + rows_to_add(rows) for rows in range(1, 5000)]
    assert padded[:20] == [2, *range(2, 17), 32, 32, 32, 32]
    assert padded[383] == 384
    assert padded[384] == 416
    assert len(set(padded[:1023])) < 60
    assert all(rows <= new <= 1.5 * rows + 16 for rows, new in enumerate(padded, 1))
    assert padded[2000:] == list(range(2001, 5000))


@onednn_here
def test_memory_does_not_grow_with_the_number_of_different_lengths():
    """Kernels that are compiled for a length are forgotten. In a process of its own: caches are read once."""
    run = subprocess.run([sys.executable, "-c", MANY_LENGTHS], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 200


MANY_LENGTHS = """
import torch
from groupwise.model.device import product

def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

x, weight = torch.randn(3000, 192), torch.randn(192, 192)
for rows in (1, 2):
    product(x[:rows], weight)
before = megabytes()
for rows in range(1030, 1630):
    product(x[:rows], weight)
print(megabytes() - before)
"""


def test_small_matrices_and_other_precisions_stay_with_torch(monkeypatch):
    monkeypatch.setattr(device, "has_faster_onednn", lambda: True)
    one, other = random(2, 128), random(128, 128)
    assert uses_onednn(one, other)
    assert uses_onednn(one[:1], other)
    assert not uses_onednn(one, other[:, 1:])
    for kind in (torch.float64, torch.bfloat16):
        assert not uses_onednn(one.to(kind), other.to(kind))
    assert not uses_onednn(one.to("meta"), other.to("meta"))


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_onednn_multiplies_on_amd_processors_with_avx512(
    tmp_path: Path, monkeypatch, vendor, capability, faster
):
    if vendor:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 26\n")
    monkeypatch.setattr(device, "PROC", tmp_path)
    monkeypatch.setattr(device.platform, "processor", lambda: "Intel64 Family 6")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert has_faster_onednn.__wrapped__() is faster
