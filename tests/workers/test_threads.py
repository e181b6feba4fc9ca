from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from intarsia.workers.threads import CHEAP_TOKEN_S, MORE_ROWS, SHORT_STEP_S, TIMED_ROWS, Threads


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def learned(row_s: float, most_rows: int = MORE_ROWS, step_s: float = 0.0) -> tuple[Threads, list[tuple[int, int]]]:
    """Threads that have seen steps which take so long and per row; with how many, of how many rows."""
    threads, seen = Threads(most=3, few=2), []
    now_s = 0.0

    def run(rows: int) -> None:
        nonlocal now_s
        threads.use_for(rows)
        seen.append((rows, torch.get_num_threads()))
        now_s += step_s + rows * row_s

    with patch("intarsia.workers.threads.time.perf_counter", lambda: now_s):
        threads.learn(run, most_rows)
    return threads, seen


def used(threads: Threads, rows: int) -> int:
    threads.use_for(rows)
    return torch.get_num_threads()


def test_short_steps_take_few_threads_and_long_ones_all():
    threads, seen = learned(row_s=SHORT_STEP_S / 64)
    assert set(seen) == {(TIMED_ROWS, 2), (MORE_ROWS, 2)}, "what is timed is run as short steps will be"
    assert [used(threads, rows) for rows in (1, 16, 40, 80, 2048, 16)] == [2, 2, 2, 3, 3, 2]


def test_all_steps_of_a_large_model_take_all_threads():
    threads, _ = learned(row_s=SHORT_STEP_S / 8)
    assert [used(threads, rows) for rows in (1, 16, 2048)] == [3, 3, 3]


def test_steps_of_many_streams_take_few_threads_where_their_tokens_keep_the_neighbours_busy():
    threads, _ = learned(row_s=CHEAP_TOKEN_S / 2, most_rows=500)
    assert [used(threads, rows) for rows in (64, 120, 500, 512, 513, 2048)] == [2, 2, 2, 2, 3, 3]
    threads, _ = learned(row_s=2 * CHEAP_TOKEN_S, most_rows=500)
    assert [used(threads, rows) for rows in (16, 500)] == [2, 3]


def test_steps_of_a_large_model_take_all_threads_until_they_have_many_rows():
    threads, _ = learned(step_s=0.05, row_s=CHEAP_TOKEN_S / 2, most_rows=1000)
    assert [used(threads, rows) for rows in (1, 64, 448, 512, 1000, 2048)] == [3, 3, 3, 2, 2, 3]


def test_no_more_rows_are_timed_than_a_step_may_have():
    _, seen = learned(row_s=0.001, most_rows=4)
    assert {rows for rows, _ in seen} == {4}


def test_steps_that_are_filled_up_to_one_shape_take_the_same_number_of_threads():
    threads, _ = learned(row_s=SHORT_STEP_S / 70)
    assert len({used(threads, rows) for rows in range(65, 81)}) == 1


def test_threads_that_a_user_asks_for_compute_every_step():
    threads = Threads.of_worker(1, torch.device("cpu"), asked=3)
    threads.learn(lambda rows: pytest.fail("a step was run"), 16)
    assert used(threads, 1) == used(threads, 2048) == 3


def test_nothing_is_timed_where_there_is_nothing_to_choose():
    threads = Threads(most=2, few=2)
    threads.learn(lambda rows: pytest.fail("a step was run"), 16)
    assert used(threads, 1) == used(threads, 2048) == 2
