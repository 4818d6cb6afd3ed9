"""All randomness of a run derives from its seed and from what it is for, not from a generator's state."""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on every part: (run seed, step, example, member)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
