"""What the programs of a launch share out among them: the rows of a step, and where each row's state is saved.

A program has one row, and some of its channels or of the values of a head. It goes through the row's pieces in order:
tokens between two places at which the state is saved. So the state stays in registers, and a row's bits are the same
in any company.

    rows     0: page 7, tokens  0, pieces 0 .. 1        pieces   0: token  0                         (saved nowhere)
             1: page 9, tokens  1 .. 12, pieces 1 .. 3           1: tokens 1 ..  8, saved to page 20
                                                                 2: tokens 9 .. 12                   (saved nowhere)

Rows of one token and longer ones are computed by kernels of their own. Tiles are a convolution's: some tokens of a
longer row.
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..paged_attention.protocol import upload
from ..tensors import spread, table_of
from ..transfer import Transfer
from .protocol import NOWHERE, StateBatch

ROW_COLUMNS, PIECE_COLUMNS, TILE_COLUMNS = 8, 4, 4
"""Numbers of an entry, some unused: entries begin at multiples of 16 bytes."""

TILE_TOKENS = 16

MOST_LONGER_ROWS = 64
"""Of a frame. A step with more of them is not put into one."""

Array = TypeVar("Array", np.ndarray, Tensor)


class Work(NamedTuple, Generic[Array]):
    """Lists [n, columns] int32, on the host or on a device. An entry of zeros stands for none.

    singles, longer  rows: first of the packed tokens, tokens, page, 1 if it is new, first piece, end of pieces
    pieces           first of the packed tokens, tokens, page to which the state is saved then or `NOWHERE`
    tiles            row among the longer ones, first token within the row, 1
    """

    singles: Array
    longer: Array
    pieces: Array
    tiles: Array


def work_of(batch: StateBatch) -> Work[np.ndarray]:
    lens = np.asarray(batch.query_lens, dtype=np.int64)
    starts, own = np.cumsum(lens) - lens, np.arange(len(lens))
    # A piece ends where a state is saved, and at the row's end. That one is empty if the state is saved there.
    saves = np.array([(save.row, save.tokens, save.page) for save in batch.saves], dtype=np.int64).reshape(-1, 3)
    ends = np.stack([own, lens, np.full(len(lens), NOWHERE)], axis=1)
    ends = np.concatenate([saves, ends])
    ends = ends[np.lexsort((ends[:, 2] == NOWHERE, ends[:, 1], ends[:, 0]))]
    row, end, saved_to = ends.T
    first_piece = np.searchsorted(row, own)
    begin = np.concatenate([[0], end[:-1]])
    begin[first_piece] = 0
    pieces = table_of(PIECE_COLUMNS, starts[row] + begin, end - begin, saved_to)
    # Rows without a token in this step are left out.
    end_piece = np.searchsorted(row, own, side="right")
    rows = table_of(ROW_COLUMNS, starts, lens, batch.pages, batch.is_new, first_piece, end_piece)
    longer = rows[lens > 1]
    of_tile, number = spread(-(-lens[lens > 1] // TILE_TOKENS))
    tiles = table_of(TILE_COLUMNS, of_tile, number * TILE_TOKENS, np.ones_like(number))
    return Work(rows[lens == 1], longer, pieces, tiles)


def frame_of(rows: int, tokens: int, device: torch.device) -> Work[Tensor]:
    """Room for a step of up to so many rows and tokens. Where there are no more tokens than rows, each has one."""
    longer = min(rows, tokens // 2, MOST_LONGER_ROWS) if tokens > rows else 0
    tiles = tokens // TILE_TOKENS + longer if longer else 0
    sizes = (rows, ROW_COLUMNS), (longer, ROW_COLUMNS), (2 * (rows + longer), PIECE_COLUMNS), (tiles, TILE_COLUMNS)
    return Work(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


def refill(frame: Work[Tensor], work: Work[np.ndarray], transfer: Transfer) -> bool:
    """Have a step put into a frame. False: it does not fit."""
    if any(len(values) > len(room) for room, values in zip(frame, work, strict=True)):
        return False
    for room, values in zip(frame, work, strict=True):
        if len(room):
            transfer.put(room, np.pad(values, ((0, len(room) - len(values)), (0, 0))))
    return True


def sent(work: Work[np.ndarray], device: torch.device) -> Work[Tensor]:
    """All lists in one copy."""
    packed = upload(np.concatenate([values.reshape(-1) for values in work]), device)
    parts = packed.split([values.size for values in work])
    return Work(*(part.view(values.shape) for part, values in zip(parts, work, strict=True)))
