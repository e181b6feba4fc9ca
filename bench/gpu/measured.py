"""What one H100 showed, as `docs/gpu.md` tells it: what the cost model takes from it, and what it is held against.

NVIDIA H100 80GB, 132 processors; weights are random, shapes real, bfloat16.
"""

from typing import NamedTuple

COPY_GB_PER_S, READ_GB_PER_S = 2440.0, 3060.0
PROCESSORS = 132


class Step(NamedTuple):
    """A recorded decode step; the worker's part of it."""

    model: str  # of `models.py`
    rows: str  # with tokens of each: "64 x 4k", or several such with commas between
    ms: float
    floor_ms: float

    @property
    def lengths(self) -> tuple[int, ...]:
        sizes = (part.removesuffix("k").split(" x ") for part in self.rows.split(", "))
        return tuple(1024 * int(tokens) for count, tokens in sizes for _ in range(int(count)))


STEPS = (
    Step("gemma-3-27b", "1 x 1k", 21.4, 17.8),
    Step("gemma-3-27b", "16 x 1k", 24.4, 20.4),
    Step("gemma-3-27b", "1 x 4k", 21.5, 17.9),
    Step("gemma-3-27b", "16 x 4k", 26.0, 21.7),
    Step("gpt-oss-20b", "1 x 1k", 4.2, 2.4),
    Step("gpt-oss-20b", "16 x 1k", 14.2, 12.0),
    Step("gpt-oss-20b", "64 x 1k", 16.6, 13.9),
    Step("gpt-oss-20b", "1 x 4k", 4.3, 2.4),
    Step("gpt-oss-20b", "16 x 4k", 14.7, 12.4),
    Step("gpt-oss-20b", "64 x 4k", 18.4, 15.5),
    Step("gpt-oss-20b", "63 x 1k, 1 x 64k", 17.2, 14.4),
    Step("llama-3.1-8b", "1 x 1k", 6.5, 5.0),
    Step("llama-3.1-8b", "16 x 1k", 7.4, 5.6),
    Step("llama-3.1-8b", "64 x 1k", 10.0, 7.8),
    Step("llama-3.1-8b", "1 x 4k", 6.8, 5.1),
    Step("llama-3.1-8b", "16 x 4k", 9.5, 7.7),
    Step("llama-3.1-8b", "64 x 4k", 18.6, 16.4),
    Step("llama-3.1-8b", "63 x 1k, 1 x 64k", 12.8, 10.7),
    Step("gemma-3-4b", "1 x 1k", 4.4, 2.6),
    Step("gemma-3-4b", "16 x 4k", 5.4, 3.6),
    Step("gemma-3-4b", "64 x 4k", 9.3, 6.9),
    Step("bamba-9b", "1 x 1k", 7.9, 6.1),
    Step("bamba-9b", "16 x 1k", 9.5, 7.4),
    Step("bamba-9b", "64 x 1k", 14.7, 11.5),
    Step("bamba-9b", "1 x 4k", 7.9, 6.2),
    Step("bamba-9b", "16 x 4k", 9.7, 7.6),
    Step("bamba-9b", "64 x 4k", 15.5, 12.3),
    Step("bamba-9b", "63 x 1k, 1 x 64k", 14.9, 11.8),
)

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
