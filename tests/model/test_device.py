"""Deterministic kernels, and memory that runs out."""

from __future__ import annotations

import pytest
import torch

from groupwise.errors import ConfigError
from groupwise.model.device import deterministic_kernels, explain_out_of_memory


def test_an_operation_without_a_deterministic_kernel_names_the_setting():
    with (
        pytest.raises(ConfigError, match=r"uses put_, .* set run.deterministic=false"),
        deterministic_kernels(torch.device("cuda"), on=True),
    ):
        torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))  # torch refuses it on a CPU, too
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_error_inside_of_deterministic_kernels_stays_as_it_is():
    with (
        pytest.raises(RuntimeError, match="size"),
        deterministic_kernels(torch.device("cuda"), on=True),
    ):
        torch.zeros(3) + torch.zeros(4)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("MPS backend out of memory (MPS allocated: 16.00 GB)"),
    ],
)
def test_memory_that_runs_out_is_a_sentence_that_says_what_to_do(error: Exception):
    with (
        pytest.raises(ConfigError, match=r"^out of memory while reading; lower it$"),
        explain_out_of_memory("reading", "lower it"),
    ):
        raise error


def test_memory_that_a_cpu_does_not_have_is_a_sentence():
    with pytest.raises(ConfigError, match="out of memory"), explain_out_of_memory("reading", "lower it"):
        torch.empty(1 << 60, dtype=torch.int8)


def test_other_errors_are_not_about_memory():
    with pytest.raises(RuntimeError, match="size"), explain_out_of_memory("reading", "lower it"):
        torch.zeros(3) + torch.zeros(4)
