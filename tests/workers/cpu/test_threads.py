import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from intarsia.workers.cpu.threads import SHORT_STEP_S, TIMED_ROWS, Threads
from intarsia.workers.runner import ModelRunner


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def learned(
    row_s: float, most_rows: int = 256, step_s: float = 0.0, share: Callable[[torch.Tensor], object] = lambda _: None
) -> tuple[Threads, list[tuple[int, int]]]:
    """Threads that have seen steps which take so long, and so long per row; with how many, of how many rows."""
    threads, seen = Threads(most=3, few=2), []

    def run(rows: int) -> None:
        seen.append((rows, used(threads, rows)))
        time.sleep(step_s + rows * row_s)

    threads.learn(run, most_rows, share)
    return threads, seen


def used(threads: Threads, rows: int) -> int:
    runner: Any = SimpleNamespace(threads=threads)
    ModelRunner.use_threads_for(runner, rows)
    return torch.get_num_threads()


def test_short_steps_take_few_threads_and_long_ones_all():
    threads, seen = learned(row_s=SHORT_STEP_S / 64)
    assert set(seen) == {(rows, 2) for rows in TIMED_ROWS}, "what is timed is run as short steps will be"
    assert [used(threads, rows) for rows in (1, 16, 40, 80, 2048, 16)] == [2, 2, 2, 3, 3, 2]


def test_what_a_step_takes_whatever_its_rows_is_not_counted_for_each_of_them():
    threads, _ = learned(step_s=SHORT_STEP_S / 2, row_s=SHORT_STEP_S / 400)
    assert [used(threads, rows) for rows in (16, 128, 320)] == [2, 2, 3]


def test_all_steps_of_a_large_model_take_all_threads():
    threads, _ = learned(row_s=SHORT_STEP_S / 8)
    assert [used(threads, rows) for rows in (1, 16, 2048)] == [3, 3, 3]


def test_no_more_rows_are_timed_than_a_step_may_have():
    _, seen = learned(row_s=0, most_rows=4)
    assert {rows for rows, _ in seen} == {4}


def test_threads_that_a_user_asks_for_compute_every_step():
    threads = Threads.of_worker(1, torch.device("cpu"), asked=3)
    threads.learn(lambda rows: pytest.fail("a step was run"), 16)
    assert used(threads, 1) == used(threads, 2048) == 3


def test_nothing_is_timed_where_no_rank_has_a_choice():
    threads = Threads.of_worker(1, torch.device("cuda"))
    threads.learn(lambda rows: pytest.fail("a step was run"), 16)
    assert used(threads, 1) == used(threads, 2048)


@pytest.mark.parametrize("first_row_s", [0.0, SHORT_STEP_S / 8])
def test_every_rank_runs_the_steps_that_the_first_one_does(first_row_s: float):
    """They would wait for each other for ever otherwise."""
    told: list[torch.Tensor] = []
    _, first = learned(first_row_s, share=lambda took_s: told.append(took_s.clone()))
    for other_row_s in (0.0, SHORT_STEP_S / 8):
        to_tell = iter(told)
        threads, other = learned(other_row_s, share=lambda took_s, to_tell=to_tell: took_s.copy_(next(to_tell)))
        assert other == first and not list(to_tell)
        assert used(threads, 16) == (3 if first_row_s else 2)
