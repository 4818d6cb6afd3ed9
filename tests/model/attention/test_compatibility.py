"""Which errors decide how a model is computed, and which end the run."""

from __future__ import annotations

import pytest
import torch

from groupwise.model.attention.compatibility import check_attention
from tests.support.small_models import small_model

SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("histc does not have a deterministic implementation, but you set"),
]


@pytest.mark.parametrize("error", SHORT)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_model_is_not_demoted_because_memory_was_short(error, after):
    model, passes = small_model(), []

    def fail_later(*args: object) -> None:
        passes.append(1)
        if len(passes) > after:
            raise error

    model.model.layers[0].register_forward_pre_hook(fail_later)
    with pytest.raises(type(error)) as raised:
        check_attention(model, name="small")
    assert raised.value is error


def test_a_model_whose_layers_fail_with_packed_rows_takes_the_general_path():
    model = small_model()

    def refuse_packed(module: object, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[1] == 24:  # the packed row: a prompt of 10 and two answers of 7
            raise RuntimeError("one answer at a time")

    model.model.layers[0].register_forward_pre_hook(refuse_packed)
    general = check_attention(model, name="small")
    assert general is not None
    assert general.reason == "does not support packed attention (one answer at a time)"
