"""What one H100 showed, as `docs/gpu.md` tells it: what the cost model takes from it, and what it is held against.

NVIDIA H100 80GB, 132 processors; weights are random, shapes real, bfloat16.
"""

from typing import NamedTuple

COPY_GB_PER_S, READ_GB_PER_S = 2440.0, 3060.0
PROCESSORS = 132


class Step(NamedTuple):
    """A recorded decode step; the worker's part of it."""

    model: str  # of `models.py`
    rows: int
    tokens: int  # of each row
    ms: float
    floor_ms: float


STEPS = (
    Step("gemma-3-27b", 1, 1024, 20.9, 17.8),
    Step("gemma-3-27b", 16, 1024, 24.1, 20.4),
    Step("gemma-3-27b", 16, 4096, 25.8, 21.7),
    Step("gpt-oss-20b", 1, 1024, 4.2, 2.4),
    Step("gpt-oss-20b", 16, 1024, 14.2, 12.0),
    Step("gpt-oss-20b", 64, 1024, 16.7, 13.9),
    Step("gpt-oss-20b", 16, 4096, 14.7, 12.3),
    Step("llama-3.1-8b", 1, 1024, 6.6, 4.9),
    Step("llama-3.1-8b", 16, 1024, 7.3, 5.6),
    Step("llama-3.1-8b", 64, 1024, 10.0, 7.8),
    Step("llama-3.1-8b", 1, 4096, 6.8, 5.1),
    Step("gemma-3-4b", 1, 1024, 4.4, 2.6),
    Step("gemma-3-4b", 16, 4096, 5.4, 3.6),
    Step("gemma-3-4b", 64, 4096, 9.3, 6.9),
    Step("bamba-9b", 1, 1024, 8.8, 6.1),
    Step("bamba-9b", 16, 1024, 10.8, 7.4),
)

KERNELS_THEN = {"bamba-9b": 1076}
"""Of a step, where there were more when it was measured than there are now: 37 in a state layer of Bamba, now 13."""

ATTENTION_US = {
    "decode 64 x 4k": 375.0,
    "decode 64 ragged: 63 x 1k, 1 x 64k": 195.0,
    "gemma-3-27b decode 64 x 4k": 726.0,
    "gemma-3-27b decode 64 x 4k, window 1k": 197.0,
    "decode 64 x 16k, chunk 8k": 691.0,
    "decode 64 x 4k, head 64, sinks": 218.0,
    "decode 64 x 4k, head 256, softcap": 754.0,
    "decode 256 x 1k": 394.0,
    "decode 2 x 128k, merges": 365.0,
    "decode 1 x 1k": 14.8,
    "decode 1 x 32k, merges": 59.0,
}
"""Attention of one layer, by the case of `shapes.py`."""

PRODUCT_US = {"llama-3.1-8b qkv": 21.0, "llama-3.1-8b gate and up": 85.0}
"""torch's, of up to 16 rows; by the weight of `products.py`."""

EXPERTS_US = {1: 95.0, 16: 539.0, 64: 575.0}
"""Experts of gpt-oss 20B, a layer; by tokens."""
EXPERTS_FLOOR_US = {1: 65.0, 16: 489.0, 64: 521.0}

CHAIN_US, CHAIN_KERNELS = 14.8, 4
"""Norms, rotary positions and gate of a Gemma 3 27B layer, 64 tokens."""

STATES_US = 217.0
"""Mamba-2 as Bamba 9B has it, a layer, 64 rows of a token."""

GREEDY_US = 20.0
"""Tokens of 64 rows out of 262,144."""
