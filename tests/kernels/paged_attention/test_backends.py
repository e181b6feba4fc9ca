"""What every attention backend promises, checked against dense attention built straight from the mask.

Every scene starts in a poisoned pool: all bytes are 0xFF, NaN in every float type, and only what a query may see is
ever written. So the null page, page tails, padding and what fell out of the window are NaN in each of these tests.

Suffixes: T packed tokens, H query heads, K kv heads, D head size, Q queries of a row, L tokens of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

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
)
from intarsia.kernels.paged_attention import native as native_module
from intarsia.kernels.paged_attention import torch_sdpa as torch_sdpa_module

CPU = torch.device("cpu")
FLOAT32_ERROR = 1e-6
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0, 2.0, -0.5, 1.0, 0.1])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class FramedBackend(TorchBackend):
    """Steps of one query per row go through a frame that has held another step before."""

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        if not batch.is_causal or len(batch.query_lens) == 0 or (batch.query_lens != 1).any():
            return super().prepare(batch, device)
        frame = self.frame(batch, device)
        assert frame is not None
        for lens in (np.maximum(1, batch.kv_lens // 2), batch.kv_lens):
            self.refill(frame, replace(batch, kv_lens=lens))
        return frame


@pytest.fixture(
    params=["reference", "torch", "torch in small pieces", "torch in frames", "native", "native in small pieces"]
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param == "reference":
        return ReferenceBackend()
    if request.param == "torch in small pieces":  # several parts and tiles even in a scene of a few tokens
        monkeypatch.setattr(torch_sdpa_module, "SPREAD_TOKENS", 6)
        monkeypatch.setattr(torch_sdpa_module, "PART_TOKENS", 48)
        monkeypatch.setattr(torch_sdpa_module, "TILE_QUERIES", 5)
    if request.param == "torch in frames":
        return FramedBackend()
    if "native" in request.param and (lacks := NativeBackend.lacks()):
        pytest.skip(lacks)
    if request.param == "native in small pieces":
        monkeypatch.setattr(native_module, "PIECE_TOKENS", 6)
    return NativeBackend() if "native" in request.param else TorchBackend()


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
    layers: int = 1  # that share each page
    padding_bytes: int = 0  # behind the content of each page
    chunk_tokens: int | None = None
    seed: int = 0

    @property
    def params(self) -> LayerParams:
        return LayerParams(self.key_dim**-0.5, self.softcap, SINKS[: self.heads] if self.sinks else None)


class World:
    """One scene made real. Block tables are permuted, and blocks that nobody can see are 0."""

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
        self.write_past()

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
            backend.attend(q, view, self.scene.params, meta, out)
            outs.append(out)
        return outs

    def dense(self, dtype: torch.dtype, layer: int = 0) -> Tensor:
        """[T,H,Dv]: the same by plain dense attention in `dtype`."""
        rows = [
            _dense(self.scene, self.q[row].to(dtype), self.k[layer][row].to(dtype), self.v[layer][row].to(dtype))
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


def _dense(scene: Scene, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> Tensor:
    """Attention as the papers write it: all scores, a mask, a softmax."""
    share = scene.heads // scene.kv_heads
    k_LHD, v_LHD = k_LKD.repeat_interleave(share, 1), v_LKD.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * scene.key_dim**-0.5
    if scene.softcap is not None:
        scores = scene.softcap * torch.tanh(scores / scene.softcap)
    position = torch.arange(len(q_LHD))
    back = position[:, None] - position
    visible = (back >= 0) & (back < (scene.window_tokens or len(q_LHD) + 1))
    if scene.chunk_tokens is not None:
        visible &= position[:, None] // scene.chunk_tokens == position // scene.chunk_tokens
    scores = scores.masked_fill(~visible, float("-inf"))
    if scene.sinks:
        sink = SINKS[: scene.heads].to(scores.dtype)[:, None, None].expand(-1, len(q_LHD), 1)
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


def check(scene: Scene, backend: Backend) -> None:
    world = World(scene)
    assert_exact(world, world.run(backend))


# Lengths, pages, windows


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
@pytest.mark.parametrize("window_tokens", [None, 1, 12, 16, 17])
def test_decode_at_every_page_border_sees_exactly_its_tokens(backend, block_tokens, window_tokens):
    lengths = (1, 15, 16, 17, 31, 32, 33, 50)
    check(Scene(tuple((1, length) for length in lengths), block_tokens, window_tokens), backend)


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
@pytest.mark.parametrize("window_tokens", [None, 1, 12, 16, 17])
def test_prefill_at_every_page_border_sees_exactly_its_tokens(backend, block_tokens, window_tokens):
    lengths = (2, 15, 16, 17, 33)
    check(Scene(tuple((length, length) for length in lengths), block_tokens, window_tokens), backend)


@pytest.mark.parametrize("kv_len", [11, 12, 13, 14])
def test_window_of_12_around_its_edge_hides_the_13th_token_back(backend, kv_len):
    check(Scene(((1, kv_len), (3, kv_len)), block_tokens=4, window_tokens=12), backend)


@pytest.mark.parametrize("window_tokens", [None, 12])
def test_mixed_decode_and_prefill_with_context_are_each_right(backend, window_tokens):
    rows = ((1, 40), (1, 3), (1, 17), (7, 7), (9, 30), (2, 50), (16, 16))
    check(Scene(rows, window_tokens=window_tokens), backend)


def test_decode_rows_between_prefill_rows_find_their_own_tokens(backend):
    check(Scene(((1, 9), (4, 8), (1, 20), (3, 21), (1, 5))), backend)


def test_rows_of_very_different_length_are_each_right(backend):
    check(Scene(((1, 700), (1, 2), (1, 300), (1, 698), (1, 20), (1, 301))), backend)


def test_decode_rows_in_no_order_of_length_get_their_own_results(backend):
    check(Scene(((1, 60), (1, 30), (1, 45), (1, 10))), backend)


@pytest.mark.parametrize("window_tokens", [None, 12])
def test_prefill_longer_than_a_tile_is_right(backend, window_tokens):
    check(Scene(((150, 150), (140, 180)), window_tokens=window_tokens), backend)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 12, 16, 32])
def test_no_query_looks_across_the_border_of_its_chunk(backend, chunk_tokens):
    decode = tuple((1, length) for length in (1, 11, 12, 13, 16, 17, 32, 33))
    check(Scene(decode, block_tokens=4, chunk_tokens=chunk_tokens), backend)
    check(Scene(((1, 40), (7, 7), (9, 30), (2, 50), (150, 150), (140, 180)), chunk_tokens=chunk_tokens), backend)


# Heads, softcap, sinks


@pytest.mark.parametrize(
    "heads, kv_heads", [(4, 4), (4, 2), (8, 1), (1, 1), (6, 2)], ids=["MHA", "GQA", "MQA", "one", "3-each"]
)
@pytest.mark.parametrize("key_dim, value_dim", [(16, 16), (24, 8), (8, 24), (10, 10)])
def test_any_head_layout_is_right(backend, heads, kv_heads, key_dim, value_dim):
    scene = Scene(((1, 20), (1, 7), (1, 20), (5, 18)), heads=heads, kv_heads=kv_heads)
    check(replace(scene, key_dim=key_dim, value_dim=value_dim), backend)


@pytest.mark.parametrize("softcap, sinks", [(1.5, False), (None, True), (1.5, True)], ids=["softcap", "sinks", "both"])
@pytest.mark.parametrize("window_tokens", [None, 12])
def test_softcap_and_sinks_enter_the_softmax(backend, softcap, sinks, window_tokens):
    rows = ((1, 40), (1, 9), (9, 9), (7, 30))
    check(Scene(rows, softcap=softcap, sinks=sinks, window_tokens=window_tokens), backend)


def test_a_sink_far_above_every_logit_takes_all_the_weight(backend):
    world = World(Scene(((1, 20), (4, 9))))
    meta = backend.prepare(world.batch, CPU)
    q, out = world.packed(world.q), torch.full((5, 4, 16), float("nan"))
    backend.write(world.views[0], world.packed(world.k[0]), world.packed(world.v[0]), meta)
    backend.attend(q, world.views[0], LayerParams(0.25, sinks=torch.full((4,), 1e4)), meta, out)
    assert out.abs().max() < 1e-6


# Memory: who else's bytes lie around


@pytest.mark.parametrize("layers, padding_bytes", [(2, 0), (1, 64), (3, 64), (1, 36)])
def test_layers_that_share_padded_pages_keep_apart(backend, layers, padding_bytes):
    scene = Scene(((1, 33), (1, 5), (6, 20)), window_tokens=12, layers=layers, padding_bytes=padding_bytes)
    check(scene, backend)


def test_write_changes_only_the_slots_of_the_new_tokens(backend):
    scene = Scene(((1, 17), (5, 20)), layers=2, padding_bytes=64)
    world, expected = World(scene), World(scene)
    world.run(backend)
    expected.write_by_hand(0, range(16, 17))
    expected.write_by_hand(1, range(15, 20))
    assert torch.equal(world.raw, expected.raw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_that_held_float32_of_another_owner_do_not_leak_into_the_result(backend, dtype):
    world = World(Scene(((1, 3), (1, 30), (1, 18), (4, 21)), window_tokens=12, dtype=dtype))
    stale = torch.randint(0, 256, world.raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert not stale.view(dtype).isfinite().all(), "the garbage is too tame to prove anything"
    world.raw.copy_(stale)
    world.write_past()
    assert_exact(world, world.run(backend))


def test_a_row_whose_own_values_are_nan_hurts_no_other_row(backend):
    world = World(Scene(((1, 20), (1, 40), (1, 3), (4, 19))))
    for tensors in (world.k[0], world.v[0]):
        tensors[1].fill_(float("nan"))
    world.write_past()
    out = world.run(backend)[0]
    assert out[1].isnan().all()
    assert torch.cat((out[:1], out[2:])).isfinite().all()


def test_slots_are_int64_and_reach_beyond_two_to_the_31(backend, tmp_path):
    page_stride = 2**30 + 64  # page 2 starts past 2**31 items; a sparse file costs no memory
    scene = Scene(((1, 18), (3, 4)), dtype=torch.float16)
    world = World(scene)
    huge = torch.from_file(str(tmp_path / "pool"), shared=True, size=3 * page_stride + 2**12, dtype=scene.dtype)
    table = np.array([[2, 3], [1, 0]], np.int32)
    world.batch = replace(world.batch, block_table=table)
    world.views = [huge.as_strided((4, 16, 2, 32), (page_stride, 64, 32, 1))]
    world.write_past()
    assert_exact(world, world.run(backend))
    meta = backend.prepare(world.batch, CPU)
    assert meta.token_page.dtype == meta.token_offset.dtype == torch.int64


# Batches


@pytest.mark.parametrize("rows", [(), ((0, 0),), ((0, 20), (0, 0)), ((1, 9), (0, 0), (0, 30), (4, 6), (0, 4))])
@pytest.mark.parametrize("window_tokens", [None, 12])
def test_empty_rows_are_harmless(backend, rows, window_tokens):
    world = World(Scene(rows, window_tokens=window_tokens))
    if world.batch.query_lens.sum():
        assert_exact(world, world.run(backend))
    else:
        meta, nothing = backend.prepare(world.batch, CPU), torch.empty(0, 4, 16)
        backend.write(world.views[0], nothing[:, :2], nothing[:, :2], meta)
        backend.attend(nothing, world.views[0], world.scene.params, meta, nothing)


@pytest.mark.parametrize("window_tokens", [None, 12])
@pytest.mark.parametrize("cuts", [(20, 37), (1, 2, 37), (16, 32, 36, 37), tuple(range(1, 38))])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(backend, cuts, window_tokens):
    whole = World(Scene(((37, 37),), window_tokens=window_tokens))
    view = torch.full_like(whole.views[0], float("nan"))
    out, start = [], 0
    for end in cuts:
        batch = replace(whole.batch, query_lens=np.array([end - start]), kv_lens=np.array([end]))
        meta = backend.prepare(batch, CPU)
        q, k, v = (tokens[start:end] for tokens in (whole.q[0], whole.k[0][0], whole.v[0][0]))
        backend.write(view, k, v, meta)
        out.append(torch.full((end - start, 4, 16), float("nan")))
        backend.attend(q, view, whole.scene.params, meta, out[-1])
        start = end
    assert_exact(whole, [torch.cat(out)])
    if backend.name == "reference":
        assert torch.equal(torch.cat(out), whole.run(backend)[0]), "the reference promises the same bits"


def test_the_reference_gives_a_row_the_same_bits_in_any_company():
    rows = ((1, 20), (1, 33), (5, 30))
    world = World(Scene(rows, window_tokens=12))
    together = world.run(ReferenceBackend())[0].split([query_len for query_len, _ in rows])
    for row in range(len(rows)):
        query_len, kv_len = rows[row]
        batch = replace(
            world.batch,
            block_table=world.batch.block_table[row : row + 1],
            query_lens=np.array([query_len]),
            kv_lens=np.array([kv_len]),
        )
        alone = torch.empty_like(together[row])
        backend = ReferenceBackend()
        q = world.q[row][kv_len - query_len :]
        backend.attend(q, world.views[0], world.scene.params, backend.prepare(batch, CPU), alone)
        assert torch.equal(alone, together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (1.5, True)], ids=["plain", "softcap and sinks"])
def test_error_is_at_most_twice_that_of_plain_torch(backend, dtype, softcap, sinks):
    rows = ((1, 60), (1, 33), (1, 47), (40, 40), (11, 55))
    check(Scene(rows, dtype=dtype, softcap=softcap, sinks=sinks, key_dim=64, value_dim=64, heads=8), backend)


@pytest.mark.parametrize("seed", range(12))
def test_random_scenes_match_dense_attention(backend, seed):
    print(f"seed {seed}")
    random = Random(seed)
    kv_lens = [random.randint(1, 70) for _ in range(random.randint(1, 9))]
    kv_heads = random.randint(1, 3)
    scene = Scene(
        rows=tuple((random.choice([1, 1, random.randint(0, kv_len)]), kv_len) for kv_len in kv_lens),
        block_tokens=random.choice([1, 3, 8, 16]),
        window_tokens=random.choice([None, 1, 7, 16, 30]),
        kv_heads=kv_heads,
        heads=kv_heads * random.randint(1, 2),
        value_dim=random.choice([8, 16]),
        softcap=random.choice([None, 2.0]),
        sinks=random.choice([False, True]),
        layers=random.randint(1, 2),
        padding_bytes=random.choice([0, 64]),
        seed=seed,
    )
    print(scene)
    if sum(query_len for query_len, _ in scene.rows):
        check(scene, backend)


# What is the torch backend's own


def test_torch_gathers_a_window_at_the_same_cost_at_any_context():
    def gathered(kv_len: int) -> int:
        table = np.ones((1, kv_len // 16 + 1), np.int32)
        batch = GroupBatch(table, np.array([1]), np.array([kv_len]), 16, window_tokens=64)
        return sum(len(part.pages) for part in TorchBackend().prepare(batch, CPU).plan)

    assert [gathered(kv_len) for kv_len in (64, 640, 6400)] == [4, 4, 4]


def test_torch_workspace_is_reused_and_survives_inference_mode():
    backend, world = TorchBackend(), World(Scene(((1, 40), (1, 20))))
    with torch.inference_mode():
        first = world.run(backend)[0].clone()
    address = backend._workspace.data_ptr()
    assert torch.equal(world.run(backend)[0], first)
    assert_exact(world := World(Scene(((1, 9),), dtype=torch.bfloat16)), world.run(backend))
    assert backend._workspace.data_ptr() == address


# What a batch refuses


@pytest.mark.parametrize(
    "query_len, kv_len, why", [(1, 9, "longer than its block table"), (3, 2, "counts the new tokens too")]
)
def test_a_batch_that_can_not_be_is_refused(query_len, kv_len, why):
    with pytest.raises(AssertionError, match=why):
        GroupBatch(np.ones((1, 2), np.int32), np.array([query_len]), np.array([kv_len]), block_tokens=4)
