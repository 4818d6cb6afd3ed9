"""Deterministic kernels."""

from __future__ import annotations

import pytest
import torch

from groupwise.errors import ConfigError
from groupwise.model.device import deterministic_kernels


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
