"""JSON as browsers read it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


def as_json(value: Any) -> str:
    """Write a value in one line; what is not finite becomes null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(without_nan(value), ensure_ascii=False, separators=(",", ":"))


def without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nan(inner) for inner in value]
    return value
