"""A case of attention made real: pages, tables, queries, and what a query's answer is in float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import BACKENDS, FlashBackend, GroupBatch, GroupMeta, LayerParams, Needs
from intarsia.kernels.transfer import Transfer

from .device import Bench
from .shapes import Attention

LONGEST_TOKENS = 131_072
"""As an engine's frames have it: tables are as wide as its longest request."""


class World:
    """Permuted tables over random pages."""

    def __init__(self, scene: Attention, dtype: torch.dtype, bench: Bench, *, poison: bool = False, seed: int = 0):
        """poison: pages are NaN wherever a row has no live token"""
        bench.seed(f"{scene.name} {seed}")
        self.scene, self.dtype, self.device = scene, dtype, bench.device
        query_lens, kv_lens = np.array(scene.rows, dtype=np.int32).T
        counts = -(-kv_lens // scene.block_tokens)
        order = (np.random.default_rng(seed).permutation(int(counts.sum())) + 1).astype(np.int32)
        table = np.zeros((len(scene.rows), int(counts.max())), dtype=np.int32)
        for row, (start, count) in enumerate(zip(np.cumsum(counts) - counts, counts, strict=True)):
            table[row, :count] = order[start : start + count]
        self.pages = bench.random(len(order) + 1, scene.block_tokens, scene.kv_heads, scene.width, dtype=dtype)
        if poison:
            self._poison(table, kv_lens)
        self.q = bench.random(scene.tokens, scene.heads, scene.key_dim, dtype=dtype)
        self.out = torch.full((scene.tokens, scene.heads, scene.value_dim), torch.nan, dtype=dtype, device=self.device)
        sinks = bench.random(scene.heads, dtype=dtype) if scene.sinks else None
        latent = scene.value_dim if scene.latent else None
        self.params = LayerParams(scene.key_dim**-0.5, scene.softcap, sinks, latent)
        self.batch = GroupBatch(
            table, query_lens.copy(), kv_lens.copy(), scene.block_tokens, scene.window, scene.chunk
        )  # fmt: skip

    def _poison(self, table: np.ndarray, kv_lens: np.ndarray) -> None:
        live = np.zeros(self.pages.shape[:2], dtype=bool)
        for row, end in enumerate(kv_lens.tolist()):
            block, offset = np.divmod(np.arange(end), self.scene.block_tokens)
            live[table[row, block], offset] = True
        mask = torch.from_numpy(live).to(self.device)
        self.pages = torch.where(mask[:, :, None, None], self.pages, torch.nan)

    def run(self, backend: Any, meta: GroupMeta) -> Tensor:
        backend.attend(self.q, self.pages, self.params, meta, self.out)
        return self.out

    def frame(self, backend: Any, bench: Bench) -> GroupMeta | None:
        """As recorded steps have it: of fixed shape, filled with this step. None: the backend has none."""
        rows, width = self.batch.block_table.shape
        if backend.capabilities.wide_frames and not bench.is_rehearsed:
            width = max(width, LONGEST_TOKENS // self.scene.block_tokens)
        ones = np.ones(rows, dtype=np.int32)
        widest = replace(self.batch, block_table=np.zeros((rows, width), dtype=np.int32), kv_lens=ones)
        frame = backend.frame(widest, self.device)
        if frame is None:
            return None
        meta = backend.narrow(frame, rows) if backend.capabilities.wide_frames else frame
        transfer = Transfer(self.device)
        backend.refill(meta, self.batch, transfer)
        transfer.run()
        return meta

    def exact(self, row: int, query: int) -> Tensor:
        """[H,Dv] in float64: the answer to a query of a row, from the keys that its table names."""
        scene, batch = self.scene, self.batch
        position = int(batch.kv_lens[row] - batch.query_lens[row]) + query
        first = int(batch.oldest_visible(position))
        blocks = torch.from_numpy(batch.block_table[row, : position // scene.block_tokens + 1].astype(np.int64))
        kv = self.pages[blocks.to(self.device)].flatten(0, 1)[first : position + 1].double()
        keys, values = (
            kv[..., : scene.key_dim],
            kv[..., : scene.value_dim] if scene.latent else kv[..., scene.key_dim :],
        )
        q = self.q[int(batch.first_token()[row]) + query].double().view(scene.kv_heads, -1, scene.key_dim)
        scores = torch.einsum("kgd,lkd->kgl", q, keys) * self.params.scale
        if scene.softcap:
            scores = scene.softcap * torch.tanh(scores / scene.softcap)
        if self.params.sinks is not None:
            sinks = self.params.sinks.double().view(scene.kv_heads, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : len(kv)]
        return torch.einsum("kgl,lkd->kgd", weights, values).flatten(0, 1)

    def samples(self) -> list[tuple[int, int]]:
        """Queries that are looked at: the first and the last of the first, the longest and the last row."""
        lens = self.batch.query_lens
        rows = {0, int(self.batch.kv_lens.argmax()), len(lens) - 1}
        return sorted({(row, query) for row in rows for query in (0, int(lens[row]) - 1)})


def needs_of(scene: Attention, dtype: torch.dtype) -> Needs:
    return Needs(
        dtype, scene.heads, scene.kv_heads, scene.key_dim, scene.value_dim, scene.window is not None,
        scene.chunk is not None, scene.softcap is not None, scene.sinks, scene.latent, block_tokens=scene.block_tokens,
    )  # fmt: skip


def backends(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Those that a GPU may run, by name; in place of one that cannot be had here, why not."""
    for kind in BACKENDS:
        if bench.device.type not in kind.capabilities.devices:
            continue
        if bench.is_rehearsed and kind is FlashBackend:
            from .rehearsal import flash

            yield kind.name, kind(flash())
        else:
            yield kind.name, kind.lacks() or kind()


def refusal(backend: Any, scene: Attention, dtype: torch.dtype, bench: Bench) -> str | None:
    """Why a backend does not run a case, if it does not."""
    if isinstance(backend, str):
        return backend
    kinds = backend.capabilities.dtypes | ({torch.float32} if bench.is_rehearsed else set())
    return replace(backend.capabilities, dtypes=kinds).refusal(needs_of(scene, dtype), bench.device)


def is_judged(name: str, bench: Bench) -> bool:
    return not (bench.is_rehearsed and name == "flash")  # which is played
