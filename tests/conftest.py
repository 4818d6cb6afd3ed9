"""Every test runs offline and on one thread, so that it gives the same result everywhere."""

from __future__ import annotations

import os

# Set before anything imports torch or transformers, which read these once.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
