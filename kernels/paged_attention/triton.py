"""Paged attention on a GPU by our own kernels, `triton_kernels.py`: what they are launched with, and when.

A step is at most two launches per layer: one over the rows with a single query, one over the tiles of the others. Few
long rows are cut into splits, so that no processor idles, and merged by a third, small one.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..tensors import dense_heads, starts_of
from ..toolchain import triton as gpu
from ..toolchain.triton import LEAST_DOT, power_of_two
from ..transfer import Transfer
from .capabilities import Capabilities
from .protocol import GroupBatch, GroupMeta, LayerParams, upload

LEAST_SPLIT_TOKENS = 256
"""A shorter split costs more to merge than it gains."""
MOST_SPLITS = 64


class Size(NamedTuple):
    """A head size as the kernel takes it: a power of two and a padded rest."""

    dim: int
    main: int
    rest: int

    @classmethod
    def of(cls, dim: int) -> "Size":
        main = max(LEAST_DOT, 1 << (dim.bit_length() - 1))
        return cls(dim, main, max(LEAST_DOT, power_of_two(dim - main)) if dim > main else 0)


class Shape(NamedTuple):
    """What a launch is compiled for, beside the layer's own facts."""

    rows: int
    keys: int
    warps: int
    stages: int


def shape_for(key_dim: int, value_dim: int, group: int, itemsize: int, one_query: bool) -> Shape:
    """Tiles that fit the registers and the shared memory of an H100: `bench/ahead.py` says what each takes.

    Nothing is spilled in 16 bits. In float32, which takes three products for one, heads of 256 numbers spill a little
    and latents much: that is for judging others, not for serving.
    """
    widest = max(key_dim, value_dim)
    if itemsize == 4:
        rows = max(LEAST_DOT, power_of_two(group)) if one_query and widest <= 128 else LEAST_DOT
        if one_query:
            return Shape(min(rows, 64), 32, 4, 2) if widest <= 192 else Shape(rows, 16, 8, 2)
        if widest <= 128:
            return Shape(64 if widest <= 64 else 32, 32, 8, 2)
        return Shape(32 if widest <= 192 else 16, 16, 8, 2)
    if one_query:
        rows = min(max(LEAST_DOT, power_of_two(group)), 64 if widest <= 256 else 32)
        return Shape(rows, 64 if widest <= 128 else 32, 4 if widest <= 256 else 8, 3 if widest <= 256 else 2)
    if widest > 256:
        return Shape(32, 32, 8, 2)
    return Shape(128, 64 if widest <= 192 else 32, 8, 3 if widest <= 128 else 2)


class Tiles(NamedTuple):
    """Where the tiles of one launch lie: request and number within it, [tiles] int32 each."""

    row: Tensor
    number: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """Rows that are attended to together."""

    rows: np.ndarray
    queries: np.ndarray  # of each
    most_keys: int  # that a tile may read: an upper bound
    tiles: dict[tuple[int, int], Tiles] = field(default_factory=dict)  # by (group, rows of a tile)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    block_table: Tensor  # [R,P] int32
    query_start: Tensor  # [R+1] int32
    kv_len: Tensor  # [R] int32
    singles: _Launch | None
    longer: _Launch | None
    rule: int
    span: int
    block_tokens: int


class TritonBackend:
    """Every feature, any page size, any head size whose tile fits the device."""

    name: ClassVar[str] = "triton"
    by_name_only: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        wide_frames=True,
    )

    @classmethod
    def lacks(cls) -> str | None:
        return gpu.missing()

    def __init__(self) -> None:
        from . import triton_kernels as paged_attention  # here and not above: triton may be missing

        self._kernels: Any = paged_attention
        self.processors: int | None = None  # what a launch should keep busy; None: as many as the device has

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        page, offset = batch.token_places()
        singles = np.flatnonzero(batch.query_lens == 1)
        longer = np.flatnonzero(batch.query_lens > 1)
        plan = _Plan(
            upload(np.ascontiguousarray(batch.block_table, dtype=np.int32), device),
            upload(starts_of(batch.query_lens), device),
            upload(batch.kv_lens.astype(np.int32), device),
            _launch(batch, singles) if len(singles) else None,
            _launch(batch, longer) if len(longer) else None,
            *_rule(batch),
            batch.block_tokens,
        )
        return GroupMeta(upload(page, device), upload(offset, device), plan)

    def frame(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        rows, width = batch.block_table.shape
        every = np.arange(rows)
        place = torch.zeros(rows, dtype=torch.int64, device=device)
        most_keys = width * batch.block_tokens
        span = batch.window_tokens or batch.chunk_tokens or most_keys
        plan = _Plan(
            torch.zeros(rows, width, dtype=torch.int32, device=device),
            upload(np.arange(rows + 1, dtype=np.int32), device),
            torch.ones(rows, dtype=torch.int32, device=device),
            _Launch(every, np.ones(rows, dtype=np.int64), min(span, most_keys)),
            None,
            *_rule(batch),
            batch.block_tokens,
        )
        return GroupMeta(place, place.clone(), plan)

    def narrow(self, frame: GroupMeta, rows: int) -> GroupMeta:
        plan: _Plan = frame.plan
        assert plan.singles is not None, "a frame's rows have one query each"
        every = np.arange(rows)
        part = replace(
            plan,
            block_table=plan.block_table[:rows],
            query_start=plan.query_start[: rows + 1],
            kv_len=plan.kv_len[:rows],
            singles=_Launch(every, np.ones(rows, dtype=np.int64), plan.singles.most_keys),
        )
        return GroupMeta(frame.token_page[:rows], frame.token_offset[:rows], part)

    def refill(self, frame: GroupMeta, batch: GroupBatch, transfer: Transfer) -> None:
        plan: _Plan = frame.plan
        for buffer, values in (
            *zip((frame.token_page, frame.token_offset), batch.token_places(), strict=True),
            (plan.block_table[:, : batch.block_table.shape[1]], batch.block_table),
            (plan.kv_len, batch.kv_lens),
        ):
            transfer.put(buffer, values)

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: GroupMeta) -> None:
        k_TKD, v_TKD = dense_heads(k_TKD), dense_heads(v_TKD)
        tokens, heads, key_dim = k_TKD.shape
        if tokens == 0:
            return
        value_dim = v_TKD.shape[2]
        self._kernels.write[(tokens,)](
            k_TKD, v_TKD, kv_view, meta.token_page, meta.token_offset,
            *k_TKD.stride()[:2], *v_TKD.stride()[:2], *kv_view.stride()[:3],
            HEADS=heads, HEADS_PADDED=power_of_two(heads),
            KEY_DIM=key_dim, KEY_PADDED=power_of_two(key_dim),
            VALUE_DIM=value_dim, VALUE_PADDED=power_of_two(value_dim),
        )  # fmt: skip

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: GroupMeta, out_THD: Tensor) -> None:
        plan: _Plan = meta.plan
        q_THD = dense_heads(q_THD)
        for launch in (plan.singles, plan.longer):
            if launch is not None:
                self._attend(q_THD, kv_view, params, plan, launch, out_THD)

    def _attend(
        self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, plan: _Plan, launch: _Launch, out_THD: Tensor
    ) -> None:
        heads, key_dim = q_THD.shape[1:]
        kv_heads, value_dim = kv_view.shape[2], out_THD.shape[2]
        group, one_query = heads // kv_heads, launch is plan.singles
        # Tiles as large as fit; long rows in splits where tiles alone would leave processors idle.
        shape = shape_for(key_dim, value_dim, group, q_THD.itemsize, one_query)
        tiles = _tiles(launch, group, shape.rows, q_THD.device)
        programs = len(tiles.row) * kv_heads
        splits = self._splits(programs, launch.most_keys, q_THD.device)
        partial = q_THD.new_empty(
            programs * splits * shape.rows * (value_dim + 2) if splits > 1 else 1, dtype=torch.float32
        )
        sinks = q_THD if params.sinks is None else params.sinks
        key, value = Size.of(key_dim), Size.of(value_dim)
        self._kernels.attend[(len(tiles.row), kv_heads, splits)](
            q_THD, kv_view, out_THD, partial, sinks, plan.block_table, tiles.row, tiles.number, plan.query_start,
            plan.kv_len,
            *q_THD.stride()[:2], *out_THD.stride()[:2], *kv_view.stride()[:3], plan.block_table.stride(0),
            params.scale, params.softcap or 1.0, plan.span,
            GROUP=group, ROWS=shape.rows, KEYS=shape.keys, PAGE=plan.block_tokens, SPLITS=splits,
            KEY_DIM=key.dim, KEY_MAIN=key.main, KEY_REST=key.rest,
            VALUE_DIM=value.dim, VALUE_MAIN=value.main, VALUE_REST=value.rest,
            VALUE_AT=0 if params.latent_values is not None else key_dim,
            RULE=plan.rule, ONE_QUERY=one_query, HAS_SOFTCAP=params.softcap is not None,
            HAS_SINKS=params.sinks is not None, PRECISION=precision_of(q_THD.dtype),
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        # Splits of a row are merged in a second launch.
        if splits > 1:
            self._kernels.merge[(len(tiles.row), kv_heads, shape.rows)](
                partial, out_THD, sinks, tiles.row, tiles.number, plan.query_start, *out_THD.stride()[:2],
                GROUP=group, ROWS=shape.rows, SPLITS=splits, SPLITS_PADDED=power_of_two(splits),
                VALUE_DIM=value_dim, VALUE_PADDED=power_of_two(value_dim), HAS_SINKS=params.sinks is not None,
            )  # fmt: skip

    def _splits(self, programs: int, most_keys: int, device: torch.device) -> int:
        """Rounded to a power of two, because each count is compiled by itself."""
        wanted = 2 * (self.processors or _processors(device)) // programs
        useful = min(wanted, most_keys // LEAST_SPLIT_TOKENS, MOST_SPLITS)
        return power_of_two(useful + 1) // 2 if useful > 1 else 1


def _rule(batch: GroupBatch) -> tuple[int, int]:
    """The kernel's name for what queries see, and the tokens of a window or chunk."""
    if not batch.is_causal:
        return 3, 0
    if batch.window_tokens is not None:
        return 1, batch.window_tokens
    return (0, 0) if batch.chunk_tokens is None else (2, batch.chunk_tokens)


def _launch(batch: GroupBatch, rows: np.ndarray) -> _Launch:
    ends, queries = batch.kv_lens[rows].astype(np.int64), batch.query_lens[rows].astype(np.int64)
    oldest = batch.oldest_visible(ends - queries) if batch.is_causal else 0 * ends
    return _Launch(rows, queries, int((ends - oldest).max()))


def _tiles(launch: _Launch, group: int, tile_rows: int, device: torch.device) -> Tiles:
    """Made once per launch and shape, because layers of one group may differ in their query heads."""
    tiles = launch.tiles.get((group, tile_rows))
    if tiles is None:
        counts = -(-launch.queries * group // tile_rows)
        row = np.repeat(launch.rows, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        # The last tiles of a prompt see most, so they start first.
        number = np.repeat(counts, counts) - 1 - (np.arange(len(row)) - first)
        tiles = Tiles(upload(row.astype(np.int32), device), upload(number.astype(np.int32), device))
        launch.tiles[group, tile_rows] = tiles
    return tiles


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def precision_of(dtype: torch.dtype) -> str:
    """Of matrix products of float32: three of short numbers, almost exact; the other kinds know one way only."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
