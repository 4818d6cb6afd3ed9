"""Triton kernels on a CPU, interpreted, one program after another (`conftest` asks Triton for it)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 reads a loop's bounds in a way that numpy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index
