"""What our GPU kernels promise beyond other backends: a row's result has the same bits in any company and in any frame,
and a frame takes any mixture of rows."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import Biases, GroupBatch, LayerParams, TritonBackend
from intarsia.kernels.paged_attention import triton as triton_module
from intarsia.kernels.paged_attention.held_tables import HeldTables
from intarsia.kernels.transfer import Transfer
from intarsia.tests.kernels.scenes import CPU, Scene, World, cut_short

pytestmark = pytest.mark.skipif(TritonBackend.lacks() is not None, reason=str(TritonBackend.lacks()))

ROWS = ((1, 90), (20, 60), (1, 17), (1, 3), (7, 33), (1, 61))
SINGLES = (0, 2, 3, 5)
SCENES = {
    "everything": Scene(ROWS),
    "window": Scene(ROWS, window_tokens=20),
    "chunk": Scene(ROWS, chunk_tokens=16),
    "softcap and sinks": Scene(ROWS, softcap=1.5, sinks=True),
    "slopes": Scene(ROWS, slopes=True, heads=8),
    "biases and sinks of queries": Scene(ROWS, extent=7, sinks=True, heads=8),
    "odd heads": Scene(ROWS, block_tokens=5, heads=6, key_dim=40, value_dim=24),
}


class Sight:
    """Rows of a scene whose tokens all lie in their pages: some of them are attended to, in some way."""

    def __init__(self, scene: Scene):
        self.world = World(scene)
        self.backend = TritonBackend()
        self.together = self._per_row(range(len(ROWS)), self.world.run(self.backend)[0])

    def batch(self, rows: Sequence[int]) -> GroupBatch:
        batch, which = self.world.batch, list(rows)
        return replace(
            batch,
            block_table=batch.block_table[which],
            query_lens=batch.query_lens[which],
            kv_lens=batch.kv_lens[which],
        )

    def held(self, rows: Sequence[int]) -> GroupBatch:
        """The same rows out of tables that lie on a device, each in some slot. Other slots have other blocks."""
        batch, which = self.world.batch, list(rows)
        shape = len(ROWS) + 3, batch.block_table.shape[1]
        others, own = np.full(12, 1 << 20, dtype=np.int32), np.full(shape, 1 << 20, dtype=np.int32)
        slots = np.random.default_rng(len(which)).permutation(shape[0] - 1)[: len(which)]
        own[slots], own[-1] = batch.block_table[which], 0
        tables = HeldTables(np.concatenate([others, own.reshape(-1)]), [(3, 4), shape], CPU)
        tables.note(1, 0, 0, own.size)
        return replace(self.batch(rows), block_table=own, held=tables.of(1, slots))

    def alone(self, rows: Sequence[int]) -> dict[int, Tensor]:
        return self._attend(rows, self.backend.prepare(self.batch(rows), CPU))

    def in_frame(self, rows: Sequence[int], frame: Any, batch: GroupBatch | None = None) -> dict[int, Tensor]:
        transfer = Transfer(CPU)
        assert self.backend.refill(frame, batch or self.batch(rows), transfer)
        transfer.run()
        return self._attend(rows, frame)

    def _attend(self, rows: Sequence[int], meta: Any) -> dict[int, Tensor]:
        tokens = len(meta.token_page)
        queries, q = self._filled(self.world.q, rows, tokens)
        out = torch.full((tokens, q.shape[1], self.world.scene.value_dim), float("nan"))
        self.backend.attend(q, self.world.views[0], self._params(rows, tokens), meta, out)
        assert out[len(queries) :].isnan().all(), "tokens that fill up get no result"
        return self._per_row(rows, out[: len(queries)])

    @staticmethod
    def _filled(of_rows: Sequence[Tensor], rows: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """What the queries of some rows have, and the same filled up to so many tokens."""
        own = torch.cat([of_rows[row][kv_len - count :] for row in rows for count, kv_len in [ROWS[row]]])
        return own, torch.cat((own, torch.full((tokens - len(own), *own.shape[1:]), float("nan"))))

    def _params(self, rows: Sequence[int], tokens: int) -> LayerParams:
        world = self.world
        if not world.scene.extent:
            return world.scene.params
        mixtures, sinks = (self._filled(each, rows, tokens)[1] for each in (world.mixtures, world.sinks))
        return replace(world.params, biases=Biases(mixtures, world.profiles, sinks))

    @staticmethod
    def _per_row(rows: Sequence[int], out: Tensor) -> dict[int, Tensor]:
        return dict(zip(rows, out.split([ROWS[row][0] for row in rows]), strict=True))

    def check(self, outs: dict[int, Tensor]) -> None:
        for row, out in outs.items():
            assert torch.equal(out, self.together[row]), f"row {row}"


TAKE_LONG = "slopes", "odd heads"
"""Scenes whose tests are slow."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] if name in TAKE_LONG else []) for name in SCENES])
def sight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sight:
    cut_short(monkeypatch)
    seen = copy(_seen(request.param))
    seen.backend = TritonBackend()
    return seen


@cache
def _seen(scene: str) -> Sight:
    """Once for all tests of a scene: none changes what lies in its pages."""
    return Sight(SCENES[scene])


def test_a_row_has_the_same_bits_alone_in_a_decode_step_and_in_a_mixed_one(sight: Sight):
    for row in range(len(ROWS)):
        sight.check(sight.alone([row]))
    sight.check(sight.alone(SINGLES))
    sight.check(sight.alone((5, 4, 0)))


def test_a_row_has_the_same_bits_in_a_decode_frame_of_any_width(sight: Sight):
    largest = sight.backend.frame(sight.batch(SINGLES), CPU)
    for rows in (SINGLES, (5, 2), (3,), (0, 3, 5)):
        sight.check(sight.in_frame(rows, sight.backend.narrow(largest, len(rows))))
    sight.check(sight.in_frame((0, 5), largest))


def test_a_mixed_frame_is_filled_with_any_mixture_of_rows_that_fits(sight: Sight):
    largest = sight.backend.frame(sight.batch(range(len(ROWS))), CPU)
    for rows in (range(len(ROWS)), (1, 4), SINGLES, (0,), (4, 0, 3)):
        sight.check(sight.in_frame(rows, largest))
    narrow = sight.backend.narrow(largest, 3, 12)
    for rows in ((4, 0, 3), (5, 3), (4,)):
        sight.check(sight.in_frame(rows, narrow))


def test_a_row_has_the_same_bits_out_of_tables_that_lie_on_the_device(sight: Sight):
    for rows in (range(len(ROWS)), SINGLES, (4, 0, 3)):
        sight.check(sight._attend(rows, sight.backend.prepare(sight.held(rows), CPU)))
    # A frame of held tables has none of its own: it reads those that it was made for.
    for rows, largest in (((4, 0, 3), range(len(ROWS))), ((5, 2), SINGLES)):
        batch = sight.held(rows)
        assert batch.held is not None
        lens = sight.batch(largest).query_lens
        padded = replace(batch, held=batch.held.padded(len(lens)), query_lens=lens, kv_lens=lens)
        frame = sight.backend.frame(padded, CPU)
        assert frame.plan.block_table is batch.held.tables.numbers
        sight.check(sight.in_frame(rows, frame, batch))
        narrow = sight.backend.narrow(frame, len(rows), int(batch.query_lens.sum()))
        sight.check(sight.in_frame(rows, narrow, batch))


def test_bits_do_not_depend_on_how_many_programs_share_the_items(sight: Sight, monkeypatch: pytest.MonkeyPatch):
    for programs in (1, 1000):
        monkeypatch.setattr(triton_module, "PROGRAMS_PER_PROCESSOR", programs)
        sight.check(sight.alone(range(len(ROWS))))


def launches(monkeypatch: pytest.MonkeyPatch, backend: TritonBackend) -> list[tuple[str, int]]:
    """Name and programs of each launch from now on."""
    noted: list[tuple[str, int]] = []
    kernels = backend._kernels

    class Noted:
        def __init__(self, name: str):
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            noted.append((self._name, int(np.prod(grid))))
            return getattr(kernels, self._name)[grid]

    monkeypatch.setattr(backend, "_kernels", type("Kernels", (), {"attend": Noted("attend"), "merge": Noted("merge")}))
    return noted


def test_rows_are_merged_only_where_one_is_cut(monkeypatch: pytest.MonkeyPatch):
    sight = Sight(SCENES["everything"])
    noted = launches(monkeypatch, sight.backend)
    sight.alone(SINGLES)
    sight.alone((1, 0))
    assert [name for name, _ in noted] == ["attend", "attend", "attend"]
    noted.clear()
    cut_short(monkeypatch)
    sight.alone(SINGLES)
    sight.alone((1, 0))
    sight.alone((3,))
    assert [name for name, _ in noted] == ["attend", "merge", "attend", "attend", "merge", "attend"]


def test_a_frame_launches_as_many_programs_whatever_it_holds(monkeypatch: pytest.MonkeyPatch):
    cut_short(monkeypatch)
    monkeypatch.setattr(triton_module, "PROGRAMS_PER_PROCESSOR", 100)
    sight = Sight(SCENES["everything"])
    frame = sight.backend.frame(sight.batch(range(len(ROWS))), CPU)
    noted = launches(monkeypatch, sight.backend)
    found = []
    for rows in (range(len(ROWS)), (3,), (1, 4)):
        sight.in_frame(rows, frame)
        found.append(list(noted))
        noted.clear()
    assert found[0] == found[1] == found[2]
    assert all(programs <= 100 for _, programs in found[0])


def test_a_wide_latent_whose_heads_fill_several_tiles_has_the_same_bits_alone(monkeypatch: pytest.MonkeyPatch):
    """One query of 40 heads is more than a tile of 32."""
    cut_short(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(20, 16, 1, 300, generator=generator)
    q = torch.randn(2, 40, 300, generator=generator)
    params = triton_module.LayerParams(0.1, latent_values=280)
    table = np.arange(1, 13, dtype=np.int32).reshape(2, 6)

    def attended(rows: list[int]) -> Tensor:
        batch = GroupBatch(table[rows], np.ones(len(rows), np.int32), np.array([90, 33], np.int32)[rows], 16)
        backend, out = TritonBackend(), torch.full((len(rows), 40, 280), float("nan"))
        backend.attend(q[rows], pages, params, backend.prepare(batch, CPU), out)
        return out

    together = attended([0, 1])
    for row, length in ((0, 90), (1, 33)):
        assert torch.equal(attended([row])[0], together[row])
        keys = pages[table[row]].reshape(-1, 300)[:length].double()
        expected = (q[row].double() @ keys.T * 0.1).softmax(-1) @ keys[:, :280]
        torch.testing.assert_close(together[row], expected.float(), rtol=1e-5, atol=1e-5)
