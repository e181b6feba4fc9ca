"""Attention over an encoder's keys, which have no order, and over latents, which are keys and values in one."""

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import (
    Backend,
    GroupBatch,
    GroupMeta,
    LayerParams,
    NativeBackend,
    ReferenceBackend,
    TorchBackend,
    TritonBackend,
)
from intarsia.kernels.transfer import Transfer
from intarsia.tests.kernels.scenes import CPU, cut_short

KINDS = (ReferenceBackend, TorchBackend, NativeBackend, TritonBackend)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    if lacks := request.param.lacks():
        pytest.skip(lacks)
    return request.param()


def poisoned(pages: int, block_tokens: int, heads: int, width: int) -> Tensor:
    return torch.full((pages, block_tokens, heads, width), float("nan"))


def attention(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scale: float, mask_TL: Tensor | None = None) -> Tensor:
    group = q_THD.shape[1] // k_LKD.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).double() for x in (k_LKD, v_LKD))
    logits = torch.einsum("thd,lhd->htl", q_THD.double(), k) * scale
    if mask_TL is not None:
        logits = logits.masked_fill(~mask_TL, float("-inf"))
    return torch.einsum("htl,lhd->thd", logits.softmax(-1), v).float()


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_every_query_sees_all_keys_of_its_encoder_and_no_byte_behind_them(backend: Backend, block_tokens: int):
    rows = [(1, 9), (12, 5), (200, 33), (1, 1), (3, 16)]  # (queries, keys): more of either
    blocks = -(-33 // block_tokens)
    table = 1 + np.random.default_rng(0).permutation(len(rows) * blocks).reshape(len(rows), blocks).astype(np.int32)
    pages = poisoned(len(rows) * blocks + 1, block_tokens, 2, 8 + 6)
    query_lens, kv_lens = np.array(rows, dtype=np.int32).T
    generator = torch.Generator().manual_seed(3)
    expected, queries = [], []
    for row, (count, keys) in enumerate(rows):
        k, v = torch.randn(keys, 2, 8, generator=generator), torch.randn(keys, 2, 6, generator=generator)
        block, offset = np.divmod(np.arange(keys), block_tokens)
        meta = GroupMeta(torch.from_numpy(table[row, block].astype(np.int64)), torch.from_numpy(offset), plan=None)
        backend.write(pages, k, v, meta)
        queries.append(torch.randn(count, 4, 8, generator=generator))
        expected.append(attention(queries[-1], k, v, 0.3))
    batch = GroupBatch(table, query_lens, kv_lens, block_tokens, is_causal=False)
    out = torch.full((int(query_lens.sum()), 4, 6), float("nan"))
    backend.attend(torch.cat(queries), pages, LayerParams(0.3), backend.prepare(batch, CPU), out)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


class Encoders:
    """Rows with keys of an encoder, and rows without any: nothing is seen where there are none."""

    def __init__(self, block_tokens: int):
        self.rows = ((1, 9), (12, 5), (1, 0), (30, 33), (5, 0), (1, 1), (3, 16), (1, 33))  # (queries, keys)
        self.backend = TritonBackend()
        self._size = block_tokens
        blocks = -(-33 // block_tokens)
        places = np.random.default_rng(0).permutation(len(self.rows) * blocks).reshape(len(self.rows), blocks)
        self._table = 1 + places.astype(np.int32)
        self._pages = poisoned(places.size + 1, block_tokens, 2, 8 + 6)
        generator = torch.Generator().manual_seed(3)
        self._q = [torch.randn(queries, 4, 8, generator=generator) for queries, _ in self.rows]
        self.expected = []
        for row, (queries, keys) in enumerate(self.rows):
            k, v = torch.randn(keys, 2, 8, generator=generator), torch.randn(keys, 2, 6, generator=generator)
            block, offset = np.divmod(np.arange(keys), block_tokens)
            page = torch.from_numpy(self._table[row, block].astype(np.int64))
            self.backend.write(self._pages, k, v, GroupMeta(page, torch.from_numpy(offset), plan=None))
            nothing = torch.full((queries, 4, 6), float("nan"))
            self.expected.append(attention(self._q[row], k, v, 0.3) if keys else nothing)

    def batch(self, rows: list[int]) -> GroupBatch:
        query_lens, kv_lens = np.array([self.rows[row] for row in rows], dtype=np.int32).T
        width = max(1, -(-int(kv_lens.max()) // self._size))
        return GroupBatch(self._table[rows, :width], query_lens, kv_lens, self._size, is_causal=False)

    def frame(self, rows: int, tokens: int) -> GroupMeta:
        lens = np.ones(rows, dtype=np.int32)
        lens[0] += tokens - rows
        table = np.zeros((rows, self._table.shape[1]), np.int32)
        batch = GroupBatch(table, lens, 0 * lens, self._size, is_causal=False)
        return self.backend.frame(batch, CPU)

    def check(self, rows: list[int], frame: GroupMeta, tokens: int) -> None:
        """What a frame of so many tokens gives for these rows."""
        transfer = Transfer(CPU)
        assert self.backend.refill(frame, self.batch(rows), transfer)
        transfer.run()
        expected = torch.cat([self.expected[row] for row in rows])
        q = torch.full((tokens, 4, 8), float("nan"))
        q[: len(expected)] = torch.cat([self._q[row] for row in rows])
        out = torch.full((tokens, 4, 6), float("nan"))
        self.backend.attend(q, self._pages, LayerParams(0.3), frame, out)
        torch.testing.assert_close(out[: len(expected)], expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert out[len(expected) :].isnan().all(), "tokens that fill up get no result"
        # The same bits as in a step that goes the usual way.
        usual = torch.full_like(expected, float("nan"))
        batch = self.batch(rows)
        self.backend.attend(q[: len(expected)], self._pages, LayerParams(0.3), self.backend.prepare(batch, CPU), usual)
        assert torch.equal(out[: len(expected)].nan_to_num(9.0), usual.nan_to_num(9.0))


@pytest.fixture(params=[5, 16])
def encoders(request: pytest.FixtureRequest) -> Encoders:
    if lacks := TritonBackend.lacks():
        pytest.skip(lacks)
    return Encoders(request.param)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_decode_frame_shows_encoder_keys_and_rows_without_keys_get_no_result(
    encoders: Encoders, is_cut: bool, monkeypatch: pytest.MonkeyPatch
):
    if is_cut:
        cut_short(monkeypatch)
    largest = encoders.frame(4, 4)
    for rows in ([0, 2, 5, 7], [2, 7], [2], [7, 0, 5], [2, 2, 0]):
        encoders.check(rows, largest, 4)
    encoders.check([2, 7], encoders.backend.narrow(largest, 2), 2)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_mixed_frame_shows_encoder_keys_and_rows_without_keys_get_no_result(
    encoders: Encoders, is_cut: bool, monkeypatch: pytest.MonkeyPatch
):
    if is_cut:
        cut_short(monkeypatch)
    largest = encoders.frame(8, 64)
    for rows in (list(range(8)), [4, 2], [3], [2, 1, 0, 4, 6]):
        encoders.check(rows, largest, 64)
    encoders.check([6, 4, 7, 2], encoders.backend.narrow(largest, 5, 12), 12)


def test_encoder_keys_have_no_window():
    with pytest.raises(AssertionError, match="no order"):
        GroupBatch(np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.ones(1, np.int32), 4, 3, is_causal=False)


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
@pytest.mark.parametrize("window_tokens", [None, 7])
def test_a_latent_is_key_and_value_in_one(backend: Backend, block_tokens: int, window_tokens: int | None):
    width, values, heads = 12, 8, 4
    rows = [(1, 20), (30, 30), (4, 11), (1, 1)]  # (new, all)
    blocks = -(-30 // block_tokens)
    table = 1 + np.random.default_rng(1).permutation(len(rows) * blocks).reshape(len(rows), blocks).astype(np.int32)
    pages = poisoned(len(rows) * blocks + 1, block_tokens, 1, width)
    query_lens, kv_lens = np.array(rows, dtype=np.int32).T
    generator = torch.Generator().manual_seed(4)
    latents = [torch.randn(total, 1, width, generator=generator) for _, total in rows]
    queries = [torch.randn(new, heads, width, generator=generator) for new, _ in rows]
    expected = []
    for row, (new, total) in enumerate(rows):
        block, offset = np.divmod(np.arange(total - new), block_tokens)
        pages[table[row, block], offset] = latents[row][: total - new]
        position = torch.arange(total)
        distance = position[total - new :, None] - position[None]
        mask = (distance >= 0) & (distance < (window_tokens or total))
        expected.append(attention(queries[row], latents[row], latents[row][..., :values], 0.2, mask))
    batch = GroupBatch(table, query_lens, kv_lens, block_tokens, window_tokens)
    meta = backend.prepare(batch, CPU)
    new = torch.cat([latent[total - count :] for latent, (count, total) in zip(latents, rows, strict=True)])
    backend.write(pages, new, new[..., :0], meta)
    out = torch.full((int(query_lens.sum()), heads, values), float("nan"))
    backend.attend(torch.cat(queries), pages, LayerParams(0.2, latent_values=values), meta, out)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_a_latent_with_softcap_and_sinks_is_right_by_hand_too():
    """The fused form knows neither; both forms must take values from the same place."""
    generator = torch.Generator().manual_seed(5)
    latent = torch.randn(9, 1, 6, generator=generator)
    q = torch.randn(9, 2, 6, generator=generator)
    params = LayerParams(0.4, 2.0, torch.tensor([0.3, -0.2]), latent_values=4)
    outs = []
    for backend in (kind() for kind in KINDS if kind.lacks() is None):
        pages = poisoned(3, 8, 1, 6)
        batch = GroupBatch(np.array([[1, 2]], np.int32), np.array([9], np.int32), np.array([9], np.int32), 8)
        meta = backend.prepare(batch, CPU)
        backend.write(pages, latent, latent[..., :0], meta)
        outs.append(torch.full((9, 2, 4), float("nan")))
        backend.attend(q, pages, params, meta, outs[-1])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)
