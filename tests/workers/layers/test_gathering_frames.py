"""Queries of recorded steps that gather: which tables they read, and up to where."""

import numpy as np
import torch

from intarsia.kernels.paged_attention import GroupBatch
from intarsia.kernels.paged_attention.held_tables import HeldTables
from intarsia.kernels.transfer import Transfer
from intarsia.workers.layers.gathering_frames import FramedQueries

CPU = torch.device("cpu")
SLOTS, WIDTH, BLOCK_TOKENS = 6, 4, 4
SPARE = (SLOTS - 1) * WIDTH


def step(slots: list[int], query_lens: list[int], kv_lens: list[int]) -> GroupBatch:
    table = np.zeros((SLOTS, WIDTH), dtype=np.int32)
    held = HeldTables(table.reshape(-1), [(SLOTS, WIDTH)], CPU).of(0, np.array(slots))
    lengths = np.array(query_lens, dtype=np.int32), np.array(kv_lens, dtype=np.int32)
    return GroupBatch(table, *lengths, BLOCK_TOKENS, held=held)


def filled(queries: FramedQueries, batch: GroupBatch) -> tuple[list[int], list[int]]:
    transfer = Transfer(CPU)
    queries.refill(batch, transfer)
    transfer.run()
    assert queries.whole.starts_R is not None
    assert queries.whole.positions_N.tolist() == queries.positions_N.tolist()
    return queries.whole.starts_R.tolist(), queries.whole.positions_N.tolist()


def test_each_token_of_a_prompt_is_a_query_in_the_table_of_its_row():
    batch = step([4, 1, 2], [1, 3, 2], [7, 3, 9])
    starts, positions = filled(FramedQueries(8, batch, CPU), batch)
    assert starts == [16, 4, 4, 4, 8, 8, SPARE, SPARE]
    assert positions == [6, 0, 1, 2, 7, 8, 0, 0]


def test_queries_of_a_step_before_are_written_over():
    batch = step([4, 1], [1, 6], [7, 9])
    queries = FramedQueries(8, batch, CPU)
    filled(queries, batch)
    assert filled(queries, step([3], [1], [5])) == ([12, *[SPARE] * 7], [4, *[0] * 7])


def test_of_queries_with_which_tokens_are_complete_there_are_no_others_and_null_blocks_behind_them():
    batch = step([4, 1, 2], [1, 6, 2], [8, 6, 9])
    starts, positions = filled(FramedQueries(5, batch, CPU, every=4), batch)
    assert starts == [16, 4, 8, SPARE, SPARE], "the first row's eighth token, the second's fourth, the third's eighth"
    assert positions == [7, 3, 7, 0, 0]
