"""What every attention backend promises, checked against dense attention built straight from the mask, over pools whose
bytes are NaN wherever a query may not look (`scenes.py`)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

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
from intarsia.kernels.paged_attention import plain_torch as plain_torch_module
from intarsia.kernels.transfer import Transfer
from intarsia.tests.kernels.scenes import CPU, Scene, World, assert_exact, check, cut_short


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def framed(backend: Backend, batch: GroupBatch, prepare: Callable[..., GroupMeta]) -> GroupMeta:
    """Steps go through a frame that has held another step before, where there is one for such steps."""
    are_single = len(batch.query_lens) > 0 and (batch.query_lens == 1).all()
    if not batch.is_causal or not (are_single or backend.capabilities.mixed_frames):
        return prepare(batch, CPU)
    frame = backend.frame(batch, CPU)
    assert frame is not None
    for lens in (np.maximum(batch.query_lens, batch.kv_lens // 2), batch.kv_lens):
        transfer = Transfer(CPU)
        assert backend.refill(frame, replace(batch, kv_lens=lens), transfer)
        transfer.run()
    return frame


class FramedTorch(TorchBackend):
    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        return framed(self, batch, super().prepare)


class FramedTriton(TritonBackend):
    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        return framed(self, batch, super().prepare)


KINDS: dict[str, type[Backend]] = {
    "reference": ReferenceBackend,
    "torch": TorchBackend,
    "torch in small pieces": TorchBackend,
    "torch in frames": FramedTorch,
    "native": NativeBackend,
    "triton": TritonBackend,
    "triton in cuts": TritonBackend,
    "triton in frames": FramedTriton,
}


SLOW = ("triton in cuts", "triton in frames")  # Python in place of a GPU takes its time


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in KINDS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    kind = KINDS[request.param]
    if lacks := kind.lacks():
        pytest.skip(lacks)
    if request.param == "torch in small pieces":  # several parts and tiles even in a scene of a few tokens
        monkeypatch.setattr(plain_torch_module, "SPREAD_TOKENS", 6)
        monkeypatch.setattr(plain_torch_module, "PART_TOKENS", 48)
        monkeypatch.setattr(plain_torch_module, "TILE_QUERIES", 5)
    backend = kind()
    if request.param == "triton in cuts":
        cut_short(monkeypatch)
    return backend


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
@pytest.mark.parametrize("key_dim, value_dim", [(16, 16), (24, 8), (8, 24), (10, 10), (40, 72)])
def test_any_head_layout_is_right(backend, heads, kv_heads, key_dim, value_dim):
    scene = Scene(((1, 20), (1, 7), (1, 20), (5, 18)), heads=heads, kv_heads=kv_heads)
    check(replace(scene, key_dim=key_dim, value_dim=value_dim), backend)


@pytest.mark.parametrize("softcap, sinks", [(1.5, False), (None, True), (1.5, True)], ids=["softcap", "sinks", "both"])
@pytest.mark.parametrize("window_tokens", [None, 12])
def test_softcap_and_sinks_enter_the_softmax(backend, softcap, sinks, window_tokens):
    rows = ((1, 40), (1, 9), (9, 9), (7, 30))
    check(Scene(rows, softcap=softcap, sinks=sinks, window_tokens=window_tokens), backend)


@pytest.mark.parametrize(
    "slopes, extent, sinks",
    [(True, 0, False), (False, 7, False), (False, 7, True)],
    ids=["slopes", "biases", "biases-sinks"],
)
@pytest.mark.parametrize("window_tokens", [None, 12])
def test_scores_change_with_the_distance_of_keys(backend, slopes, extent, sinks, window_tokens):
    """And with sinks of each query."""
    offers = backend.capabilities
    if (slopes and not offers.slopes) or (extent and not offers.biases):
        pytest.skip("another backend is chosen for such layers")
    rows = ((1, 40), (1, 9), (9, 9), (7, 30), (1, 700))  # the last is cut, and merged
    scene = Scene(rows, slopes=slopes, extent=extent, sinks=sinks, window_tokens=window_tokens, heads=8)
    check(scene, backend)


def test_a_sink_far_above_every_logit_takes_all_the_weight(backend):
    world = World(Scene(((1, 20), (4, 9))))
    meta = backend.prepare(world.batch, CPU)
    q, out = world.packed(world.q), torch.full((5, 4, 16), float("nan"))
    backend.write(world.views[0], world.packed(world.k[0]), world.packed(world.v[0]), meta)
    backend.attend(q, world.views[0], LayerParams(0.25, sinks=torch.full((4,), 1e4)), meta, out)
    assert out.abs().max() < 1e-6


# Memory: bytes of other owners lie around


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


def test_a_token_that_a_query_does_not_see_weighs_nothing_however_large_its_value(backend):
    world = World(Scene(((20, 40), (1, 40)), window_tokens=12))
    for values in world.v[0]:
        values[23].fill_(3e38)  # twelve queries of the first row see it, from its own on
    world.write_past()
    out, dense = world.run(backend)[0], world.dense(torch.float64).float()
    sees = dense.abs().amax(dim=(1, 2)) > 1e3
    assert sees.tolist() == [3 <= query < 15 for query in range(21)]
    torch.testing.assert_close(out[~sees], dense[~sees])


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


@pytest.mark.parametrize("window_tokens", [None, 12])
def test_triton_merges_cuts_of_rows_with_one_query_and_with_several(monkeypatch, window_tokens):
    if lacks := TritonBackend.lacks():
        pytest.skip(lacks)
    cut_short(monkeypatch)
    check(Scene(((1, 90), (20, 90), (1, 3)), window_tokens=window_tokens, softcap=1.5, sinks=True), TritonBackend())


def test_triton_goes_on_in_a_frame_from_the_step_that_is_put_into_it():
    if lacks := TritonBackend.lacks():
        pytest.skip(lacks)
    check(Scene(((1, 90), (1, 16), (1, 3)), window_tokens=20), FramedTriton())


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
def test_a_batch_that_cannot_be_is_refused(query_len, kv_len, why):
    with pytest.raises(AssertionError, match=why):
        GroupBatch(np.ones((1, 2), np.int32), np.array([query_len]), np.array([kv_len]), block_tokens=4)
