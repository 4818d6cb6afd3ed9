"""Triton kernels on a CPU, interpreted, one program after another (`conftest` asks Triton for it).

Import this module before any kernel. The interpreter prepares `triton.language` anew for every call of a
function and rebuilds the type of every value, which takes longer than the arithmetic. Here it does both
once; what a kernel computes stays the same. Numbers are rounded to FP8 by torch: the interpreter's own
conversion loses the carry of the mantissa.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.language import core
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang
_new_block_type = core.block_type.__init__
_new_tensor = core.tensor.__init__
_convert_float = interpreter._convert_float


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 reads a loop's bounds in a way that numpy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@cache
def _patch_once(fn: Callable[..., Any]) -> Any:
    """Prepare the language for a function at its first call, and leave it prepared."""
    _patch_language(fn)
    return SimpleNamespace(restore=lambda: None)


_block_types: dict[tuple[Any, ...], tuple[Any, int, str]] = {}


def _block_type_from_cache(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape))
    if key not in _block_types:
        _new_block_type(self, element_ty, shape)
        _block_types[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _block_types[key]


_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _tensor_with_shape_from_cache(self: Any, handle: Any, type: Any) -> None:
    key = tuple(type.shape.values) if type.is_block() else ()
    if key not in _shapes:
        _new_tensor(self, handle, type)
        _shapes[key] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[key]


def _convert_as_torch(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    if (input_dtype.name, output_dtype.name) == ("fp32", "fp8e4nv"):
        return torch.from_numpy(input).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return _convert_float(input, input_dtype, output_dtype, rounding_mode)


interpreter._convert_float = _convert_as_torch
interpreter._patch_lang_tensor = _patch_with_index
interpreter._patch_lang = _patch_once
core.block_type.__init__ = _block_type_from_cache
core.tensor.__init__ = _tensor_with_shape_from_cache
