"""What is measured: layers, rows and models. Free of torch."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Attention:
    """Rows of (queries, tokens of the sequence), and the layer they run through."""

    name: str
    rows: Rows
    heads: int = 32
    kv_heads: int = 8
    key_dim: int = 128
    value_dim: int = 128
    block_tokens: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False

    def visible(self, position: int) -> int:
        if self.chunk is not None:
            return position % self.chunk + 1
        return min(position + 1, self.window or position + 1)

    @property
    def tokens(self) -> int:
        return sum(queries for queries, _ in self.rows)

    @property
    def is_decode(self) -> bool:
        return all(queries == 1 for queries, _ in self.rows)

    @property
    def width(self) -> int:
        """Numbers of a token in its page, of one head."""
        return self.key_dim if self.latent else self.key_dim + self.value_dim

    @property
    def flops(self) -> float:
        """Of both products: every query with every key it sees."""
        pairs = sum(self.visible(end - n - 1) for queries, end in self.rows for n in range(queries))
        return 2.0 * pairs * self.heads * (self.key_dim + self.value_dim)

    def bytes(self, itemsize: int) -> float:
        """That must be read and written at least: the keys and values some query of a row sees, once, and q and out."""
        keys = sum(min(end, self.visible(end - queries) + queries - 1) for queries, end in self.rows)
        return itemsize * (
            keys * self.kv_heads * self.width + self.tokens * self.heads * (self.key_dim + self.value_dim)
        )

    def tiny(self) -> "Attention":
        """The same kind of case, as small as it gets: for a rehearsal."""
        group = min(2, self.heads // self.kv_heads)
        kv_heads = min(2, self.kv_heads)
        rows = [(20, 20) if queries == end > 1 else (min(queries, 9), min(end, 24)) for queries, end in self.rows]
        rows = list(dict.fromkeys(rows))
        rows = (rows * 2)[: max(2, len(rows))][:3]
        key_dim = 32 if self.latent or self.key_dim != self.value_dim else 16
        return replace(
            self,
            rows=tuple((min(queries, end), end) for queries, end in rows),
            heads=group * kv_heads,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=16,
            block_tokens=24 if self.block_tokens % 16 else 16,
            window=self.window and 7,
            chunk=self.chunk and 16,
        )


def decode(rows: int, length: int) -> Rows:
    return ((1, length),) * rows


GEMMA_27B: dict[str, Any] = {"heads": 32, "kv_heads": 16}

ATTENTION = (
    Attention("decode 64 x 4k", decode(64, 4096)),
    Attention("prefill 8k", ((8192, 8192),)),
    Attention("decode 64 ragged: 63 x 1k, 1 x 64k", (*decode(63, 1024), (1, 65536))),
    Attention("gemma-3-27b decode 64 x 4k", decode(64, 4096), **GEMMA_27B),
    Attention("gemma-3-27b decode 64 x 4k, window 1k", decode(64, 4096), **GEMMA_27B, window=1024),
    Attention("gemma-3-27b prefill 8k", ((8192, 8192),), **GEMMA_27B),
    Attention("gemma-3-27b prefill 8k, window 1k", ((8192, 8192),), **GEMMA_27B, window=1024),
    Attention("prefill 128 on 8k", ((128, 8320),)),
    Attention("mixed: 63 x 4k decode, prefill 1k on 3k", (*decode(63, 4096), (1024, 4096))),
    Attention("decode 1 x 1k", decode(1, 1024)),
    Attention("decode 1 x 32k, merges", decode(1, 32768)),
    Attention("decode 2 x 128k, merges", decode(2, 131072)),
    Attention("decode 8 x 8k", decode(8, 8192)),
    Attention("decode 16 x 4k", decode(16, 4096)),
    Attention("decode 256 x 1k", decode(256, 1024)),
    Attention("decode 64 x 4k, page 64", decode(64, 4096), block_tokens=64),
    Attention("decode 64 x 2k, window 1k", decode(64, 2048), window=1024),
    Attention("decode 64 x 16k, window 1k", decode(64, 16384), window=1024),
    Attention("decode 64 x 16k, chunk 8k", decode(64, 16000), chunk=8192),
    Attention("decode 64 x 4k, head 64, sinks", decode(64, 4096), heads=64, key_dim=64, value_dim=64, sinks=True),
    Attention("decode 64 x 4k, head 256, softcap", decode(64, 4096), 16, 8, 256, 256, softcap=50.0),
    Attention("decode 64 x 4k, latent", decode(64, 4096), 16, 1, 576, 512, 64, latent=True),
    Attention("prefill 2k on 14k", ((2048, 16384),)),
    Attention("prefill 8k, window 1k", ((8192, 8192),), window=1024),
    Attention("prefill 8k, head 256", ((8192, 8192),), 16, 8, 256, 256),
    Attention("prefill 4 x 2k, head 64", ((2048, 2048),) * 4, 64, 8, 64, 64),
)

WRITES = (
    Attention("write 64 tokens", decode(64, 4096), **GEMMA_27B),
    Attention("write 8k tokens", ((8192, 8192),), **GEMMA_27B),
    Attention("write 2k tokens, head 256", ((2048, 2048),), 8, 4, 256, 256),
)

ERRORS = (
    Attention("ragged decode", ((1, 1), (1, 15), (1, 16), (1, 17), (1, 700), (1, 333)), 8, 2, 64, 64),
    Attention("prompts", ((33, 33), (1, 9), (7, 90), (150, 150)), 8, 2, 64, 64),
    Attention("window", ((33, 33), (1, 90), (1, 11), (7, 90), (150, 180)), 8, 2, 64, 64, window=12),
    Attention("chunk", ((33, 33), (1, 90), (1, 49), (150, 180)), 8, 2, 64, 64, chunk=48),
    Attention("softcap and sinks", ((33, 33), (1, 90), (7, 90)), 8, 2, 64, 64, softcap=2.0, sinks=True),
    Attention("sinks", ((33, 33), (1, 90), (7, 90)), 8, 2, 64, 64, sinks=True),
    Attention("heads of 80, pages of 24", ((33, 33), (1, 90), (7, 90)), 8, 2, 80, 80, block_tokens=24),
    Attention("heads of 192 and 128", ((33, 33), (1, 90), (7, 90)), 8, 2, 192, 128),
    Attention("heads of 256", ((33, 33), (1, 90), (7, 90)), 8, 2, 256, 256),
    Attention("latent", ((33, 33), (1, 90), (7, 90)), 16, 1, 576, 512, latent=True),
    Attention("one kv head of 71", ((5, 5), (1, 90)), 71, 1, 64, 64),
    Attention("long row in parts", ((1, 20000),), 8, 2, 128, 128),
    Attention("a long row among short ones", (*decode(7, 100), (1, 20000)), 8, 2, 128, 128),
)


class Layer(NamedTuple):
    """What is done to each token by itself in a decoder layer."""

    name: str
    width: int
    half: int  # of what is gated
    heads: int
    kv_heads: int
    head_dim: int
    has_head_norms: bool
    gate: str  # as `Activation` names it

    def tiny(self) -> "Layer":
        return self._replace(width=32, half=48, heads=2, kv_heads=1, head_dim=16)


LAYERS = (
    Layer("gemma-3-4b", 2560, 10240, 8, 4, 256, True, "GELU_TANH"),
    Layer("gemma-3-27b", 5376, 21504, 32, 16, 128, True, "GELU_TANH"),
    Layer("llama-3.1-8b", 4096, 14336, 32, 8, 128, False, "SILU"),
)


class Engine(NamedTuple):
    """A model whose engine is measured; its config is in `models.py`."""

    name: str
    model: str
    share: float  # of the time, relative to the others
    enforce_eager: bool = False
    is_peer: bool = False


ENGINES = (
    Engine("gemma-3-4b", "gemma-3-4b", 4),
    Engine("gemma-3-27b", "gemma-3-27b", 6),
    Engine("llama-3.1-8b", "llama-3.1-8b", 4),
    Engine("gpt-oss-20b", "gpt-oss-20b", 5),
    Engine("bamba-9b", "bamba-9b", 5),
    Engine("gemma-3-4b, modules as they are", "gemma-3-4b", 2, enforce_eager=True),
    Engine("gemma-3-4b, continuous batching", "gemma-3-4b", 2, is_peer=True),
)
