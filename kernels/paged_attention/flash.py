"""FlashAttention over our pages, as two packages ship it: FA3 in `vllm`, and FA2 in the retired `vllm-flash-attn`.

Both take pages [pages, tokens, K, D] of any page and token stride, so keys and values are two views of our fused pages
and nothing is copied. Neither knows chunks: a chunk is a short sequence of its own, with a piece of the block table.

    row of 40 tokens, chunks of 16, 30 of them new      queries 10-15      keys  0-15      blocks 0
                                                        queries 16-31      keys 16-31      blocks 1
                                                        queries 32-39      keys 32-39      blocks 2

They load whole tiles of a page and mask afterwards, and a mask does not hide NaN. So pages must not hold what layers of
another kind left behind. A request whose own numbers are NaN may spoil the request that gets its pages next. So this
backend is taken only when it is asked for by name.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..tensors import dense_heads, starts_of
from ..transfer import Transfer
from .capabilities import Capabilities
from .protocol import GroupBatch, GroupMeta, LayerParams, upload


@dataclass(frozen=True, slots=True)
class Flash:
    """What a package offers.

    attend    its `flash_attn_varlen_func`
    schedule  its `get_scheduler_metadata`, which FA3 takes once for all layers; FA2 has none
    """

    attend: Callable[..., Any]
    schedule: Callable[..., Tensor] | None


def find_flash(name: str) -> Flash | str:
    """What the package `name` offers; or, in words, why it cannot be loaded."""
    try:
        module = importlib.import_module(name)
        why_not = getattr(module, "fa_version_unsupported_reason", None)  # only where there are several versions
        if why_not is not None and not module.is_fa_version_supported(3):
            return f"needs FlashAttention 3, which this machine cannot run: {why_not(3)}"
        return Flash(module.flash_attn_varlen_func, getattr(module, "get_scheduler_metadata", None))
    except Exception as error:  # noqa: BLE001  (compiled code can fail to load in any way)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"needs the package {name.split('.')[0].replace('_', '-')}, which cannot be loaded: {reason}"


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Rows as the function takes them; with chunks, a row for each chunk that has queries."""

    block_table: Tensor  # [R,P] int32
    query_start: Tensor  # [R+1] int32
    kv_len: Tensor  # [R] int32
    kv_start: Tensor  # [R+1] int32: what FA2 asks for instead
    most_queries: int
    most_keys: int
    window: tuple[int, int]
    is_causal: bool
    block_tokens: int
    schedules: dict[tuple, Tensor] = field(default_factory=dict)  # by what a layer asks


class FlashBackend:
    """FA3, from `vllm`. By name only: see above."""

    name: ClassVar[str] = "flash"
    by_name_only: ClassVar[bool] = True
    module: ClassVar[str] = "vllm.vllm_flash_attn"
    version: ClassVar[int] = 3
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_sizes=frozenset((dim, dim) for dim in range(8, 257, 8)),
        page_multiple=16,
        latent=False,
        any_bytes=False,
        wide_frames=True,
        one_order=False,
    )

    @classmethod
    def lacks(cls) -> str | None:
        found = find_flash(cls.module)
        return found if isinstance(found, str) else None

    def __init__(self, flash: Flash | None = None):
        found = flash or find_flash(self.module)
        assert not isinstance(found, str), found
        self._flash = found

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        page, offset = batch.token_places()
        return GroupMeta(upload(page, device), upload(offset, device), _plan(batch, device))

    def frame(self, batch: GroupBatch, device: torch.device) -> GroupMeta | None:
        if batch.chunk_tokens is not None:  # where a chunk begins would be another shape each time
            return None
        rows, width = batch.block_table.shape
        full = np.full(rows, width * batch.block_tokens, dtype=np.int32)
        place = torch.zeros(rows, dtype=torch.int64, device=device)
        return GroupMeta(place, place.clone(), _plan(replace(batch, kv_lens=full), device))

    def narrow(self, frame: GroupMeta, rows: int, tokens: int | None = None) -> GroupMeta:
        plan: _Plan = frame.plan
        part = replace(
            plan,
            block_table=plan.block_table[:rows],
            query_start=plan.query_start[: rows + 1],
            kv_len=plan.kv_len[:rows],
            kv_start=plan.kv_start[: rows + 1],
            schedules={},
        )
        return GroupMeta(frame.token_page[:rows], frame.token_offset[:rows], part)

    def refill(self, frame: GroupMeta, batch: GroupBatch, transfer: Transfer) -> bool:
        plan: _Plan = frame.plan
        for buffer, values in (
            *zip((frame.token_page, frame.token_offset), batch.token_places(), strict=True),
            (plan.block_table[:, : batch.block_table.shape[1]], batch.block_table),
            (plan.kv_len, batch.kv_lens),
            (plan.kv_start, starts_of(batch.kv_lens)),
        ):
            transfer.put(buffer, values)
        transfer.then(lambda: self._schedule_anew(plan))
        return True

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: GroupMeta) -> None:
        kv_view[meta.token_page, meta.token_offset] = torch.cat((k_TKD, v_TKD), dim=-1)

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: GroupMeta, out_THD: Tensor) -> None:
        plan: _Plan = meta.plan
        _, heads, dim = q_THD.shape
        keys, values = _canonical(kv_view[..., :dim]), _canonical(kv_view[..., dim:])
        arguments: dict[str, Any] = {
            "max_seqlen_q": plan.most_queries,
            "max_seqlen_k": plan.most_keys,
            "cu_seqlens_q": plan.query_start,
            "softmax_scale": params.scale,
            "causal": plan.is_causal,
            "window_size": plan.window,
            "softcap": params.softcap or 0.0,
            "block_table": plan.block_table,
            "out": out_THD,
        }
        if self.version == 3:
            key = (heads, kv_view.shape[2], dim, out_THD.shape[2], q_THD.dtype, params.softcap is not None)
            if key not in plan.schedules:
                plan.schedules[key] = self._schedule(plan, key)
            arguments |= {"seqused_k": plan.kv_len, "scheduler_metadata": plan.schedules[key], "fa_version": 3}
            if params.sinks is not None:
                arguments["s_aux"] = params.sinks.to(q_THD.dtype)
        else:
            arguments["cu_seqlens_k"] = plan.kv_start
        self._flash.attend(dense_heads(q_THD), keys, values, **arguments)

    def _schedule_anew(self, plan: _Plan) -> None:
        for key, schedule in plan.schedules.items():
            schedule.copy_(self._schedule(plan, key))

    def _schedule(self, plan: _Plan, key: tuple) -> Tensor:
        heads, kv_heads, key_dim, value_dim, dtype, has_softcap = key
        assert self._flash.schedule is not None
        return self._flash.schedule(
            batch_size=len(plan.kv_len),
            max_seqlen_q=plan.most_queries,
            max_seqlen_k=plan.most_keys,
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            headdim=key_dim,
            headdim_v=value_dim,
            cache_seqlens=plan.kv_len,
            qkv_dtype=dtype,
            cu_seqlens_q=plan.query_start,
            page_size=plan.block_tokens,
            causal=plan.is_causal,
            window_size=plan.window,
            has_softcap=has_softcap,
        )


class LegacyFlashBackend(FlashBackend):
    """FA2, from the retired package `vllm-flash-attn`, which wants a torch of its time."""

    name: ClassVar[str] = "flash-legacy"
    module: ClassVar[str] = "vllm_flash_attn"
    version: ClassVar[int] = 2
    capabilities: ClassVar[Capabilities] = replace(FlashBackend.capabilities, sinks=False)


def _plan(batch: GroupBatch, device: torch.device) -> _Plan:
    batch = _one_row_per_chunk(batch)
    behind = -1 if batch.window_tokens is None else batch.window_tokens - 1
    return _Plan(
        block_table=upload(np.ascontiguousarray(batch.block_table, dtype=np.int32), device),
        query_start=upload(starts_of(batch.query_lens), device),
        kv_len=upload(batch.kv_lens.astype(np.int32), device),
        kv_start=upload(starts_of(batch.kv_lens), device),
        most_queries=int(batch.query_lens.max(initial=0)),
        most_keys=int(batch.kv_lens.max(initial=0)),
        window=(behind, 0 if batch.is_causal and behind >= 0 else -1),
        is_causal=batch.is_causal,
        block_tokens=batch.block_tokens,
    )


def _one_row_per_chunk(batch: GroupBatch) -> GroupBatch:
    """The same queries over the same keys, as rows that begin where their chunk does."""
    chunk = batch.chunk_tokens
    if chunk is None:
        return batch
    assert chunk % batch.block_tokens == 0, "chunks begin where blocks do"
    wide = chunk // batch.block_tokens
    tables, query_lens, kv_lens = [], [], []
    for table, queries, end in zip(batch.block_table, batch.query_lens.tolist(), batch.kv_lens.tolist(), strict=True):
        start = end - queries
        # A row per chunk that its queries reach into, counted from where the chunk begins.
        while start < end:
            begin = start // chunk * chunk
            stop = min(end, begin + chunk)
            first = begin // batch.block_tokens
            piece = table[first : first + wide]
            tables.append(np.pad(piece, (0, wide - len(piece))))
            query_lens.append(stop - start)
            kv_lens.append(stop - begin)
            start = stop
    return replace(
        batch,
        block_table=np.array(tables, dtype=np.int32).reshape(-1, wide),
        query_lens=np.array(query_lens, dtype=np.int32),
        kv_lens=np.array(kv_lens, dtype=np.int32),
        chunk_tokens=None,
    )


def _canonical(view: Tensor) -> Tensor:
    """A single head may have any stride, and hardware that copies tiles takes offence at an odd one."""
    if view.shape[2] != 1:
        return view
    page, token, _, dim = view.stride()
    return view.as_strided(view.shape, (page, token, view.shape[3], dim))
