"""Scenes of one step over a poisoned pool, for every attention backend.

All bytes of a pool are 0xFF at first, NaN in every float type, and only what a query may see is ever written. So the
null page, page tails, padding and what fell out of the window are NaN.

Suffixes: T packed tokens, H query heads, K kv heads, D head size, Q queries of a row, L tokens of a row.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import Backend, Biases, GroupBatch, LayerParams, worklist

CPU = torch.device("cpu")
FLOAT32_ERROR = 1e-6
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0, 2.0, -0.5, 1.0, 0.1])


SLOPES = torch.tensor([0.5, 0.25, 0.0625, 0.03, 0.7, 0.11, 0.02, 1.0])


# A scene: some rows of one step, their tokens, and a pool that holds just what they may see


@dataclass(frozen=True)
class Scene:
    rows: tuple[tuple[int, int], ...]  # (query_len, kv_len)
    block_tokens: int = 16
    window_tokens: int | None = None
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False
    extent: int = 0  # tokens for which queries have biases; 0: none
    layers: int = 1  # that share each page
    padding_bytes: int = 0  # behind the content of each page
    chunk_tokens: int | None = None
    seed: int = 0

    @property
    def params(self) -> LayerParams:
        return LayerParams(
            self.key_dim**-0.5,
            self.softcap,
            SINKS[: self.heads] if self.sinks else None,
            slopes=SLOPES[: self.heads] if self.slopes else None,
        )


class World:
    """One scene made real. Block tables are permuted, and blocks that no query can see are 0."""

    def __init__(self, scene: Scene):
        self.scene = scene
        generator = torch.Generator().manual_seed(scene.seed)
        self.batch = self._batch(np.random.default_rng(scene.seed))
        self.pages = int(self.batch.block_table.max(initial=0)) + 1
        self.raw, self.views = _pool(scene, self.pages)
        lengths = [kv_len for _, kv_len in scene.rows]

        def draw(heads: int, dim: int) -> list[Tensor]:
            return [torch.randn(length, heads, dim, generator=generator).to(scene.dtype) for length in lengths]

        self.q = draw(scene.heads, scene.key_dim)
        self.k = [draw(scene.kv_heads, scene.key_dim) for _ in self.views]
        self.v = [draw(scene.kv_heads, scene.value_dim) for _ in self.views]
        mixtures = [torch.randn(length, scene.heads, 3, generator=generator).to(scene.dtype) for length in lengths]
        self.mixtures, self.profiles = mixtures, torch.randn(3, scene.extent, generator=generator).to(scene.dtype)
        self.sinks = [torch.randn(length, scene.heads, generator=generator).to(scene.dtype) for length in lengths]
        self.write_past()

    @property
    def params(self) -> LayerParams:
        if not self.scene.extent:
            return self.scene.params
        sinks = self.packed(self.sinks) if self.scene.sinks else None
        return replace(self.scene.params, sinks=None, biases=Biases(self.packed(self.mixtures), self.profiles, sinks))

    def _batch(self, random: np.random.Generator) -> GroupBatch:
        """First a batch of zeros that knows the window rule, then its table filled with permuted pages."""
        scene = self.scene
        query_lens, kv_lens = np.array(scene.rows, np.int32).reshape(-1, 2).T
        blocks = int(max(-(-kv_lens // scene.block_tokens), default=0)) + 1  # one more than needed: a tail of zeros
        table = np.zeros((len(scene.rows), blocks), np.int32)
        free = iter(random.permutation(table.size) + 1)
        for row, (query_len, kv_len) in enumerate(scene.rows):
            first = _oldest(scene, kv_len - query_len) // scene.block_tokens
            for block in range(first, -(-kv_len // scene.block_tokens)):
                table[row, block] = next(free)
        return GroupBatch(table, query_lens, kv_lens, scene.block_tokens, scene.window_tokens, scene.chunk_tokens)

    def write_past(self) -> None:
        for row, (query_len, kv_len) in enumerate(self.scene.rows):
            self.write_by_hand(row, range(_oldest(self.scene, kv_len - query_len), kv_len - query_len))

    def write_by_hand(self, row: int, positions: range) -> None:
        for position in positions:
            for view, k, v in zip(self.views, self.k, self.v):
                view[self.place(row, position)] = torch.cat((k[row][position], v[row][position]), dim=-1)

    def place(self, row: int, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.scene.block_tokens)
        return int(self.batch.block_table[row, block]), offset

    def packed(self, rows: list[Tensor]) -> Tensor:
        """[T,..]: the new tokens of all rows."""
        new = [tokens[kv_len - query_len : kv_len] for tokens, (query_len, kv_len) in zip(rows, self.scene.rows)]
        return torch.cat(new) if new else torch.empty(0)

    def run(self, backend: Backend) -> list[Tensor]:
        """[T,H,Dv] of each layer, as the runner would get it."""
        meta = backend.prepare(self.batch, CPU)
        outs = []
        for view, k, v in zip(self.views, self.k, self.v):
            q = self.packed(self.q)
            out = torch.full((*q.shape[:2], self.scene.value_dim), float("nan"), dtype=self.scene.dtype)
            backend.write(view, self.packed(k), self.packed(v), meta)
            backend.attend(q, view, self.params, meta, out)
            outs.append(out)
        return outs

    def dense(self, dtype: torch.dtype, layer: int = 0) -> Tensor:
        """[T,H,Dv]: the same by plain dense attention in `dtype`."""
        rows = [
            _dense(
                self.scene,
                self.q[row].to(dtype),
                self.k[layer][row].to(dtype),
                self.v[layer][row].to(dtype),
                self.mixtures[row].to(dtype) @ self.profiles.to(dtype),
                self.sinks[row].to(dtype) if self.scene.extent else SINKS[: self.scene.heads].to(dtype),
            )
            for row in range(len(self.scene.rows))
        ]
        return self.packed(rows)


def _oldest(scene: Scene, position: int) -> int:
    if scene.chunk_tokens is not None:
        return position // scene.chunk_tokens * scene.chunk_tokens
    return 0 if scene.window_tokens is None else max(0, position - scene.window_tokens + 1)


def _pool(scene: Scene, pages: int) -> tuple[Tensor, list[Tensor]]:
    """Raw bytes, all NaN, and each layer's view of them: [page, token, kv head, K|V]."""
    inner = (scene.block_tokens, scene.kv_heads, scene.key_dim + scene.value_dim)
    content = int(np.prod(inner))
    page_stride = content * scene.layers + scene.padding_bytes // scene.dtype.itemsize
    raw = torch.full((pages * page_stride * scene.dtype.itemsize,), 0xFF, dtype=torch.uint8)
    strides = (page_stride, inner[1] * inner[2], inner[2], 1)
    views = [
        raw.view(scene.dtype).as_strided((pages, *inner), strides, layer * content) for layer in range(scene.layers)
    ]
    return raw, views


def _dense(scene: Scene, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, biases_LHE: Tensor, sinks: Tensor) -> Tensor:
    """Attention as the papers write it: all scores, a mask, a softmax. sinks: [H], or of each query [L,H]"""
    share = scene.heads // scene.kv_heads
    k_LHD, v_LHD = k_LKD.repeat_interleave(share, 1), v_LKD.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * scene.key_dim**-0.5
    if scene.softcap is not None:
        scores = scene.softcap * torch.tanh(scores / scene.softcap)
    position = torch.arange(len(q_LHD))
    back = position[:, None] - position
    if scene.slopes:
        scores = scores - SLOPES[: scene.heads, None, None].to(scores.dtype) * back
    for far in range(scene.extent):
        scores = scores + torch.where(back == far, biases_LHE[:, :, far].T[:, :, None], 0.0)
    visible = (back >= 0) & (back < (scene.window_tokens or len(q_LHD) + 1))
    if scene.chunk_tokens is not None:
        visible &= position[:, None] // scene.chunk_tokens == position // scene.chunk_tokens
    scores = scores.masked_fill(~visible, float("-inf"))
    if scene.sinks:
        sink = sinks.expand(len(q_LHD), -1).T.unsqueeze(-1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(q_LHD)]
    return torch.einsum("hqk,khd->qhd", weights, v_LHD)


def assert_exact(world: World, outs: list[Tensor]) -> None:
    """Flash-attention's rule: at most twice the error of plain torch in the same dtype, and float32 within 1e-6."""
    for layer, out in enumerate(outs):
        truth = world.dense(torch.float64, layer)
        error = (out.double() - truth).abs()
        plain_error = (world.dense(world.scene.dtype, layer).double() - truth).abs().max()
        bound = max(2 * float(plain_error), FLOAT32_ERROR * max(1.0, float(truth.abs().max())))
        assert float(error.max()) <= bound, f"error {float(error.max()):.2e}, allowed {bound:.2e}"  # NaN fails too


def cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our GPU kernels cut rows of a few tokens, as they do those of thousands."""
    for name, value in (("LEAST_CUT_TOKENS", 4), ("SINGLE_CUTS", 1), ("LONGER_CUTS", 1)):
        monkeypatch.setattr(worklist, name, value)


def check(scene: Scene, backend: Backend) -> None:
    world = World(scene)
    assert_exact(world, world.run(backend))
