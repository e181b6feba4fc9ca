"""Paged attention on a GPU by our own kernels, `triton_kernels.py`: what they are launched with, and when.

A step is at most three launches per layer: one over items of rows with a single query, one over items of the others,
each with the tiles that fit it, and a small one that merges the items of rows that are cut (`worklist.py`).
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..tensors import dense_heads, starts_of
from ..toolchain import triton as gpu
from ..toolchain.triton import LEAST_DOT, power_of_two, precision_of
from ..transfer import Transfer
from .capabilities import Capabilities
from .protocol import GroupBatch, GroupMeta, LayerParams, upload
from .worklist import MERGED_ROWS, MOST_RECORD_BYTES, FrameShape, FrameWork, StepWork, Tiling

PROGRAMS_PER_PROCESSOR = 16
"""That a launch has at most. Three or four of them run at a time: the next begins where one ends early. A recorded step
launches as many as may be needed, and those that find nothing to do return."""

MERGED_AT_ONCE = 16
"""Cuts whose sums a program reads in one go."""


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
    at_once: bool = False  # all keys in one loop; else three loops, which hide nothing where nothing is to be hidden
    ahead: bool = False  # with the scores of a turn computed in the turn before; only at once


def shape_for(
    key_dim: int, value_dim: int, group: int, itemsize: int, one_query: bool, *, is_biased: bool = False
) -> Shape:
    """Tiles that fit the registers and the shared memory of an H100 (`bench/ahead.py` says what each takes), and were
    the fastest of a dozen there in 16 bits.

    In 16 bits nothing is spilled; heads of more than 128 numbers would be with `ahead`. In float32, which takes three
    products for one, heads of 80, 128 and 256 numbers spill a little and latents much: that is for judging others, not
    for serving. There each way is taken by some sizes.
    """
    widest = max(key_dim, value_dim)
    if itemsize == 4:
        rows = max(LEAST_DOT, power_of_two(group)) if one_query and widest <= 128 else LEAST_DOT
        if one_query:
            return Shape(min(rows, 64), 32, 4, 2) if widest <= 192 else Shape(rows, 16, 8, 2)
        if widest < 128:
            rows, warps = (64, 4) if widest <= 64 else (32, 8)
            return Shape(rows, 32, warps, 2, at_once=True, ahead=True)
        if widest == 128:
            return Shape(32, 32, 8, 2)
        return Shape(32, 16, 8, 2, at_once=True) if widest <= 192 else Shape(16, 16, 8, 2)
    if one_query:
        rows = min(max(LEAST_DOT, power_of_two(group)), 64 if widest <= 256 else 32)
        return Shape(rows, 64 if widest <= 128 else 32, 4, 3 if widest <= 128 else 2)
    if widest > 256:
        return Shape(32, 32, 8, 2)
    if is_biased:
        return Shape(64, 32, 8, 2)
    if widest > 192:
        return Shape(128, 32, 8, 3, at_once=True)
    if widest > 128:
        return Shape(128, 64, 8, 2, at_once=True)
    if widest > 64:
        return Shape(128, 64, 8, 3, at_once=True)
    return Shape(64, 128, 4, 2, at_once=True, ahead=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    block_table: Tensor  # [R,P] int32, or the numbers of all held tables
    query_start: Tensor  # [R+1] int32
    kv_len: Tensor  # [R] int32
    table_start: Tensor  # [R] int64: where the pages of each row begin in `block_table`
    work: StepWork | FrameWork
    rule: int
    span: int
    block_tokens: int


class _Call(NamedTuple):
    """What `attend` is asked for, and room for what is merged."""

    q_THD: Tensor
    kv_view: Tensor
    params: LayerParams
    plan: _Plan
    partial: Tensor  # [records, K, Dv + 2]
    out_THD: Tensor
    sinks: Tensor | None  # [H], or [T,H]
    biases_THE: Tensor | None  # float32

    @property
    def sink_constants(self) -> dict[str, bool]:
        sinks = self.sinks
        return {"HAS_SINKS": sinks is not None, "SINKS_OF_QUERIES": sinks is not None and sinks.dim() == 2}


class TritonBackend:
    """Every feature, any page size, any head size whose tile fits the device."""

    name: ClassVar[str] = "triton"
    by_name_only: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        wide_frames=True,
        slopes=True,
        biases=True,
        mixed_frames=True,
        held_tables=True,
        merge_bytes=MOST_RECORD_BYTES,
    )

    @classmethod
    def lacks(cls) -> str | None:
        return gpu.missing()

    def __init__(self) -> None:
        from . import triton_kernels as paged_attention  # here and not above: triton may be missing

        self._kernels: Any = paged_attention

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        page, offset = batch.token_places()
        plan = _Plan(
            _table(batch, device),
            upload(starts_of(batch.query_lens), device),
            upload(batch.kv_lens.astype(np.int32), device),
            upload(_table_starts(batch), device),
            StepWork(batch),
            *_rule(batch),
            batch.block_tokens,
        )
        return GroupMeta(upload(page, device), upload(offset, device), plan)

    def frame(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        rows, width = len(batch.query_lens), batch.block_table.shape[1]
        tokens = int(batch.query_lens.sum())
        span = batch.window_tokens or batch.chunk_tokens
        most_keys = width * batch.block_tokens
        is_mixed = bool((batch.query_lens != 1).any())
        seen = most_keys if span is None else min(span + is_mixed * tokens, most_keys)
        shape = FrameShape(rows, tokens, seen, is_mixed)
        place = torch.zeros(tokens * batch.is_causal, dtype=torch.int64, device=device)
        starts = torch.arange(rows, device=device) * width  # are put anew where tables are held
        plan = _Plan(
            torch.zeros(rows, width, dtype=torch.int32, device=device) if batch.held is None else _table(batch, device),
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            starts,
            FrameWork(shape, shape),
            *_rule(batch),
            batch.block_tokens,
        )
        return GroupMeta(place, place.clone(), plan)

    def narrow(self, frame: GroupMeta, rows: int, tokens: int | None = None) -> GroupMeta:
        plan: _Plan = frame.plan
        assert isinstance(plan.work, FrameWork)
        tokens = rows if tokens is None else tokens
        part = replace(
            plan,
            query_start=plan.query_start[: rows + 1],
            kv_len=plan.kv_len[:rows],
            table_start=plan.table_start[:rows],
            work=plan.work.narrowed(rows, tokens),
        )
        return GroupMeta(frame.token_page[:tokens], frame.token_offset[:tokens], part)

    def refill(self, frame: GroupMeta, batch: GroupBatch, transfer: Transfer) -> bool:
        plan: _Plan = frame.plan
        assert isinstance(plan.work, FrameWork)
        lists = plan.work.refilled(batch)
        if lists is None:
            return False
        page, offset = batch.token_places()
        more_rows, more_tokens = len(plan.kv_len) - len(batch.kv_lens), len(frame.token_page) - len(page)
        if batch.held is None:
            rows, width = batch.block_table.shape
            transfer.put(plan.block_table[:rows, :width], batch.block_table)
        else:
            batch.held.tables.put(transfer)
            transfer.put(plan.table_start, np.pad(batch.held.starts, (0, more_rows)))
        for buffer, values in (
            (frame.token_page, np.pad(page, (0, more_tokens))),
            (frame.token_offset, np.pad(offset, (0, more_tokens))),
            (plan.query_start, np.pad(starts_of(batch.query_lens), (0, more_rows), mode="edge")),
            (plan.kv_len, np.pad(batch.kv_lens, (0, more_rows))),
            *lists,
        ):
            transfer.put(buffer, values)
        return True

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
        q_THD = dense_heads(q_THD)
        heads, key_dim = q_THD.shape[1:]
        kv_heads, value_dim = kv_view.shape[2], out_THD.shape[2]
        group, record = heads // kv_heads, kv_heads * (value_dim + 2)
        single, longer = (
            shape_for(key_dim, value_dim, group, q_THD.itemsize, is_single, is_biased=params.biases is not None)
            for is_single in (True, False)
        )
        tiling = Tiling(group, single.rows, longer.rows, 4 * record)
        sinks, biases_THE = params.sinks, None
        if params.biases is not None:
            biases_THE = params.biases.of(slice(None)).contiguous()
            sinks = None if params.biases.sinks_TH is None else params.biases.sinks_TH.contiguous()
        for work, sizes in meta.plan.work.lists(tiling, q_THD.device):
            partial = q_THD.new_empty(max(1, sizes.records * record), dtype=torch.float32)
            call = _Call(q_THD, kv_view, params, meta.plan, partial, out_THD, sinks, biases_THE)
            # Two launches, because in one all programs would have the registers of the larger tile (`docs/gpu.md`).
            if sizes.singles:
                self._attend(call, single, work.singles, sizes.singles, is_single=True)
            if sizes.longer:
                self._attend(call, longer, work.longer, sizes.longer, is_single=False)
            if sizes.merges:
                self._merge(call, work.merges, sizes.merges, MERGED_ROWS if sizes.longer else min(group, MERGED_ROWS))

    def _attend(self, call: _Call, shape: Shape, items: Tensor, count: int, *, is_single: bool) -> None:
        q_THD, kv_view, params, plan, partial, out_THD, sinks, biases_THE = call
        unread, slopes = q_THD, params.slopes
        scores_as_is = slopes is None and biases_THE is None  # but for their scale and softcap
        heads, key_dim = q_THD.shape[1:]
        kv_heads = kv_view.shape[2]
        key, value = Size.of(key_dim), Size.of(out_THD.shape[2])
        self._kernels.attend[(kv_heads, _programs(count, kv_heads, q_THD.device))](
            q_THD, kv_view, out_THD, partial, unread if sinks is None else sinks, unread if slopes is None else slopes,
            unread if biases_THE is None else biases_THE, plan.block_table, items, plan.query_start, plan.kv_len,
            plan.table_start, *q_THD.stride()[:2], *out_THD.stride()[:2], *kv_view.stride()[:3],
            params.scale, params.softcap or 1.0, plan.span,
            GROUP=heads // kv_heads, ROWS=shape.rows, KEYS=shape.keys, PAGE=plan.block_tokens,
            KEY_DIM=key.dim, KEY_MAIN=key.main, KEY_REST=key.rest,
            VALUE_DIM=value.dim, VALUE_MAIN=value.main, VALUE_REST=value.rest,
            VALUE_AT=0 if params.latent_values is not None else key_dim,
            RULE=plan.rule, ONE_QUERY=is_single, HAS_SOFTCAP=params.softcap is not None,
            HAS_SLOPES=slopes is not None, EXTENT=0 if biases_THE is None else biases_THE.shape[2],
            AT_ONCE=shape.at_once and params.scale > 0 and scores_as_is, AHEAD=shape.ahead, **call.sink_constants,
            PRECISION=precision_of(q_THD.dtype),
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip

    def _merge(self, call: _Call, merges: Tensor, count: int, rows: int) -> None:
        out_THD, kv_heads = call.out_THD, call.kv_view.shape[2]
        value_dim = out_THD.shape[2]
        self._kernels.merge[(kv_heads, _programs(count, kv_heads * rows, out_THD.device), rows)](
            call.partial, out_THD, out_THD if call.sinks is None else call.sinks, merges, call.plan.query_start,
            *out_THD.stride()[:2],
            GROUP=out_THD.shape[1] // kv_heads, CUTS=MERGED_AT_ONCE,
            VALUE_DIM=value_dim, VALUE_PADDED=power_of_two(value_dim), **call.sink_constants,
        )  # fmt: skip


def _programs(count: int, others: int, device: torch.device) -> int:
    """For each of so many others: one for each entry of a list, or as many as keep the device busy."""
    return min(count, max(1, PROGRAMS_PER_PROCESSOR * _processors(device) // others))


def _table(batch: GroupBatch, device: torch.device) -> Tensor:
    """The pages of a step's rows, on the device."""
    if batch.held is None:
        return upload(np.ascontiguousarray(batch.block_table, dtype=np.int32), device)
    batch.held.tables.send()
    return batch.held.tables.numbers


def _table_starts(batch: GroupBatch) -> np.ndarray:
    """[R] int64: where the pages of each row begin there."""
    rows, width = batch.block_table.shape
    return np.arange(rows, dtype=np.int64) * width if batch.held is None else batch.held.starts


def _rule(batch: GroupBatch) -> tuple[int, int]:
    """The kernel's name for what queries see, and the tokens of a window or chunk."""
    if not batch.is_causal:
        return 3, 0
    if batch.window_tokens is not None:
        return 1, batch.window_tokens
    return (0, 0) if batch.chunk_tokens is None else (2, batch.chunk_tokens)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
