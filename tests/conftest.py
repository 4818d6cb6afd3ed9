"""Every test runs offline and on one thread, so that it gives the same result everywhere."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

# Set before anything imports torch or transformers, which read these once.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # `make test-gpu` sets it to 0

pytest.register_assert_rewrite("tests.support")

# In the background of a shell Ctrl-C is ignored, and would be in every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def small_policy() -> Any:
    """A policy of two random layers with grouped query heads and the built-in tokenizer, in float32."""
    from tests.support.small_models import policy_of, small_model

    return policy_of(small_model())
