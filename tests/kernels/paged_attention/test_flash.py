"""What we hand to FlashAttention, by a function in its place that takes the same arguments and means the same by them.

The real one runs on GPUs only; `bench/gpu_battery.py` checks it there.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import FlashBackend, GroupBatch, LayerParams, LegacyFlashBackend
from intarsia.kernels.paged_attention.flash import Flash
from intarsia.kernels.transfer import Transfer
from intarsia.tests.kernels.scenes import CPU, Scene, World, assert_exact

calls: list[dict[str, Any]] = []


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int, *,
    cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float, causal: bool,
    window_size: tuple[int, int], softcap: float, block_table: Tensor, out: Tensor,
    scheduler_metadata: Tensor | None = None, s_aux: Tensor | None = None, fa_version: int = 2,
) -> None:  # fmt: skip
    """As its documentation has it: rows end together with their keys, windows count neighbours, and are inclusive."""
    calls.append({"q": q, "k": k, "v": v, "scheduler_metadata": scheduler_metadata, "fa_version": fa_version})
    assert (cu_seqlens_k is None) != (seqused_k is None), "exactly one"
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and k.shape[1] % 16 == 0
    assert block_table.dtype == cu_seqlens_q.dtype == torch.int32
    lens = seqused_k if cu_seqlens_k is None else cu_seqlens_k.diff()
    assert lens is not None
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k >= lens.max()
    left, right = window_size
    right = 0 if causal else right
    for row, end in enumerate(lens.tolist()):
        first, last = cu_seqlens_q[row : row + 2].tolist()
        if first == last:
            continue
        pages = block_table[row, : -(-end // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:end].double() for x in (k, v))
        share = q.shape[1] // k.shape[2]
        keys, values = (x.repeat_interleave(share, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        offset = torch.arange(end) - (torch.arange(last - first) + end - (last - first))[:, None]
        seen = (offset <= right if right >= 0 else offset == offset) & (
            offset >= -left if left >= 0 else offset == offset
        )
        scores = scores.masked_fill(~seen, float("-inf"))
        if s_aux is not None:
            scores = torch.cat((scores, s_aux.double()[:, None, None].expand(-1, last - first, 1)), -1)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :end], values).to(out.dtype)


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None, page_size: int | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), has_softcap: bool = False, num_splits: int = 0,
) -> Tensor:  # fmt: skip
    assert len(cache_seqlens) == batch_size
    return cache_seqlens * num_heads_q


@pytest.fixture(params=[FlashBackend, LegacyFlashBackend], ids=["FA3", "FA2"])
def backend(request: pytest.FixtureRequest) -> FlashBackend:
    calls.clear()
    schedule = get_scheduler_metadata if request.param.version == 3 else None
    return request.param(Flash(flash_attn_varlen_func, schedule))


def run(scene: Scene, backend: FlashBackend) -> World:
    world = World(scene)
    world.raw.nan_to_num_() if world.raw.is_floating_point() else world.raw.zero_()  # what any_bytes=False asks for
    world.write_past()
    assert_exact(world, world.run(backend))
    return world


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window_tokens", [None, 1, 12, 16, 40])
def test_prompts_and_single_queries_see_what_they_should(backend: FlashBackend, dtype, window_tokens):
    rows = ((1, 40), (1, 3), (7, 7), (9, 30), (0, 5), (2, 50), (16, 16))
    run(Scene(rows, window_tokens=window_tokens, dtype=dtype), backend)


@pytest.mark.parametrize("chunk_tokens", [16, 32, 48])
def test_chunks_become_rows_of_their_own(backend: FlashBackend, chunk_tokens: int):
    rows = ((1, 16), (1, 17), (40, 40), (0, 9), (30, 70), (1, 48), (100, 100))
    run(Scene(rows, chunk_tokens=chunk_tokens, dtype=torch.float16), backend)


def test_softcap_reaches_the_kernel_and_sinks_do_where_there_are_any(backend: FlashBackend):
    rows = ((1, 40), (9, 9), (7, 30))
    run(Scene(rows, softcap=1.5, dtype=torch.float16), backend)
    if backend.capabilities.sinks:
        run(Scene(rows, sinks=True, dtype=torch.float16), backend)


def test_keys_and_values_are_views_of_the_pages_and_nothing_is_copied(backend: FlashBackend):
    world = run(Scene(((1, 20), (3, 3)), dtype=torch.float16, layers=2, padding_bytes=64), backend)
    for call, view in zip(calls, world.views, strict=True):
        assert call["k"].data_ptr() == view.data_ptr()
        assert call["v"].data_ptr() == view.data_ptr() + 16 * 2
        assert call["k"].stride()[:3] == view.stride()[:3]


def test_a_single_head_gets_the_stride_of_a_dense_one(backend: FlashBackend):
    run(Scene(((1, 20), (3, 3)), heads=4, kv_heads=1, dtype=torch.float16), backend)
    assert calls[0]["k"].stride(2) == 16


def test_the_schedule_is_made_once_for_all_layers_of_a_group_and_step():
    made = []
    backend = FlashBackend(
        Flash(flash_attn_varlen_func, lambda **told: made.append(told) or get_scheduler_metadata(**told))
    )
    calls.clear()
    run(Scene(((1, 20), (3, 3)), layers=3, dtype=torch.float16), backend)
    assert len(made) == 1 and len(calls) == 3
    assert all(call["scheduler_metadata"] is calls[0]["scheduler_metadata"] for call in calls)
    assert all(call["fa_version"] == 3 for call in calls)


def test_a_frame_holds_one_step_after_another_in_tensors_that_stay(backend: FlashBackend):
    world = World(Scene(((1, 40), (1, 9)), dtype=torch.float16, window_tokens=12))
    world.raw.zero_()
    world.write_past()
    frame = backend.frame(world.batch, CPU)
    assert frame is not None
    shorter = GroupBatch(world.batch.block_table, world.batch.query_lens, np.array([9, 4], np.int32), 16, 12)
    q, k, v = world.packed(world.q), world.packed(world.k[0]), world.packed(world.v[0])
    out = torch.full((2, 4, 16), float("nan"), dtype=torch.float16)
    backend.refill(frame, shorter, transfer := Transfer(CPU))
    transfer.run()
    backend.attend(q, world.views[0], world.scene.params, frame, out)
    table, lens = frame.plan.block_table.data_ptr(), frame.plan.kv_len.data_ptr()
    schedules = [schedule.data_ptr() for schedule in frame.plan.schedules.values()]
    backend.refill(frame, world.batch, transfer := Transfer(CPU))
    transfer.run()
    backend.write(world.views[0], k, v, frame)
    backend.attend(q, world.views[0], world.scene.params, frame, out)
    assert_exact(world, [out])
    assert (frame.plan.block_table.data_ptr(), frame.plan.kv_len.data_ptr()) == (table, lens)
    assert schedules == [schedule.data_ptr() for schedule in frame.plan.schedules.values()]


def test_an_encoder_is_seen_whole(backend: FlashBackend):
    generator = torch.Generator().manual_seed(0)
    pages = torch.zeros(4, 16, 2, 32, dtype=torch.float16)
    keys = torch.randn(20, 2, 32, generator=generator).to(torch.float16)
    pages[2], pages[1, :4] = keys[:16], keys[16:]
    q = torch.randn(5, 2, 16, generator=generator).to(torch.float16)
    batch = GroupBatch(
        np.array([[2, 1]], np.int32), np.array([5], np.int32), np.array([20], np.int32), 16, is_causal=False
    )
    out = torch.full((5, 2, 16), float("nan"), dtype=torch.float16)
    backend.attend(q, pages, LayerParams(0.25), backend.prepare(batch, CPU), out)
    weights = (torch.einsum("qhd,khd->hqk", q.double(), keys[..., :16].double()) * 0.25).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, keys[..., 16:].double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
