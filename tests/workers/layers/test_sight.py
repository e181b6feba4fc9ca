"""What the tokens of a step see of images, and the frames in which recorded steps read it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from intarsia.kernels.paged_attention import TritonBackend
from intarsia.kernels.transfer import Transfer
from intarsia.proto.step import View
from intarsia.workers.launched import Rows
from intarsia.workers.layers.sight import Sight, SightFrames, seen_once, sight_of

CPU = torch.device("cpu")
NEEDS_TRITON = pytest.mark.skipif(TritonBackend.lacks() is not None, reason=str(TritonBackend.lacks()))
SIZE, GROUP = 4, 1
VIEWS: list[Sequence[View]] = [(), (View(3, 0, 5), View(8, 2, 7)), (View(0, 0, 9),)]
"""By slot: no image; two images behind three tokens of text; one in front."""


class Tables:
    """Blocks of three slots, of which a row sees some."""

    def __init__(self) -> None:
        self.block_tables = [np.zeros((3, 0), np.int32), 1 + np.arange(12, dtype=np.int32).reshape(3, 4)]

    def __getitem__(self, slot: int) -> Any:
        return SimpleNamespace(views=VIEWS[slot])


def sight(*asked: tuple[int, int, int]) -> Sight | None:
    """asked: (slot, computed, tokens) of each row"""
    slots, computed, tokens = np.array(asked, dtype=np.int32).reshape(-1, 3).T
    tables: Any = Tables()
    rows = Rows(slots.astype(np.int64), np.arange(len(slots)), tokens, computed, np.ones(len(slots), dtype=bool))
    return sight_of(rows, tables, [GROUP], SIZE)


@pytest.mark.parametrize("asked", [[(0, 40, 1)], [(1, 0, 3)], [(0, 0, 9), (1, 2, 1)], []])
def test_rows_that_see_no_image_have_no_sight(asked: list[tuple[int, int, int]]):
    assert sight(*asked) is None


def test_rows_of_a_decode_step_are_a_stretch_each_without_keys_where_they_see_nothing():
    seen = sight((0, 40, 1), (1, 5, 1), (1, 30, 1), (2, 1, 1), (1, 2, 1))
    assert seen is not None
    batch = seen.batches[GROUP]
    assert batch.query_lens.tolist() == [1] * 5
    assert batch.kv_lens.tolist() == [0, 5, 7, 9, 0]
    assert seen.sees_T.tolist() == [False, True, True, True, False]
    assert batch.block_table[1, :2].tolist() == [5, 6]
    assert batch.block_table[2, :2].tolist() == [7, 8]
    assert batch.block_table[3].tolist() == [9, 10, 11]
    assert not batch.is_causal


def test_tokens_of_a_prompt_fall_into_stretches_at_its_images():
    seen = sight((2, 4, 2), (1, 1, 9), (0, 0, 3))
    assert seen is not None
    batch = seen.batches[GROUP]
    assert batch.query_lens.tolist() == [2, 2, 5, 2, 3]
    assert batch.kv_lens.tolist() == [9, 0, 5, 7, 0]
    assert seen.sees_T.tolist() == [True] * 2 + [False] * 2 + [True] * 7 + [False] * 3


@NEEDS_TRITON
def test_a_step_that_is_not_recorded_takes_only_the_tokens_that_see_something():
    found = sight((2, 4, 2), (1, 1, 9), (0, 0, 3))
    assert found is not None
    seen = seen_once(found, TritonBackend(), CPU)
    assert seen.tokens.tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10]
    assert seen.metas[GROUP].plan.kv_len.tolist() == [9, 5, 7]
    hidden = torch.arange(14.0).view(1, 14, 1)
    assert seen.taken(hidden).flatten().tolist() == seen.tokens.tolist()
    put = seen.put(hidden, -seen.taken(hidden)).flatten()
    assert put.tolist() == [-n if n in seen.tokens else n for n in range(14)]


@NEEDS_TRITON
def test_a_frame_takes_all_tokens_and_those_that_see_nothing_keep_what_they_had():
    frames = SightFrames(TritonBackend(), {GROUP: 3}, SIZE, CPU, most_rows=4, most_tokens=16)
    hidden = torch.arange(16.0).view(1, 16, 1)
    for asked in ([(2, 4, 2), (1, 1, 9), (0, 0, 3)], [(2, 0, 1), (0, 0, 1)], [(2, 0, 16)]):
        found, frame, transfer = sight(*asked), frames.frame(4, 16, is_decode=False), Transfer(CPU)
        assert found is not None and frames.refill(frame, found, transfer)
        transfer.run()
        put = frame.put(hidden, -frame.taken(hidden)).flatten()
        assert put.tolist() == [-n if n in np.flatnonzero(found.sees_T) else n for n in range(16)]


@NEEDS_TRITON
def test_a_mixed_frame_has_room_for_as_many_stretches_as_tokens():
    frames = SightFrames(TritonBackend(), {GROUP: 3}, SIZE, CPU, most_rows=2, most_tokens=16)
    for tokens in (16, 8):
        frame, transfer = frames.frame(2, tokens, is_decode=False), Transfer(CPU)
        asked = sight(*[(slot, 8, 1) for slot in (1, 2) * (tokens // 2)])
        assert asked is not None and frames.refill(frame, asked, transfer)
        transfer.run()
        assert frame.metas[GROUP].plan.kv_len.tolist() == [7, 9] * (tokens // 2)


@NEEDS_TRITON
def test_frames_of_a_kind_lie_in_the_memory_of_the_largest():
    frames = SightFrames(TritonBackend(), {GROUP: 3}, SIZE, CPU, most_rows=4, most_tokens=16)
    decode = [frames.frame(rows, rows, is_decode=True) for rows in (4, 2, 1)]
    mixed = [frames.frame(4, tokens, is_decode=False) for tokens in (16, 8)]
    for kind in (decode, mixed):
        assert len({frame.sees_T1.data_ptr() for frame in kind}) == 1
        assert len({frame.metas[GROUP].plan.block_table.data_ptr() for frame in kind}) == 1
    assert [len(frame.sees_T1) for frame in (*decode, *mixed)] == [4, 2, 1, 16, 8]
