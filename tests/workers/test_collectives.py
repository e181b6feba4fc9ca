"""Ranks in threads of this process, over real sockets."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from intarsia.workers.collectives import SMALL_BYTES, SocketCollectives


def together(size: int, work: Callable[[int, SocketCollectives], Any]) -> list[Any]:
    """Run `work` on every rank at once; results in rank order."""
    ranks = [SocketCollectives(rank, size) for rank in range(size)]
    addresses = [rank.meeting_point("127.0.0.1") for rank in ranks]
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        ranks[rank].join(addresses)
        results[rank] = work(rank, ranks[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "the ranks wait for each other"
    for rank in ranks:
        rank.close()
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 3_000_000])
def test_all_reduce_adds_up_and_gives_all_ranks_the_same_bits(size: int, count: int):
    tensors = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]

    def work(rank: int, collectives: SocketCollectives) -> torch.Tensor:
        mine = tensors[rank].clone()
        collectives.all_reduce(mine)
        collectives.all_reduce(mine)  # inboxes are used again
        return mine

    results = together(size, work)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], size * torch.stack(tensors).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_all_reduce_takes_every_dtype_and_strided_tensors(dtype: torch.dtype):
    def work(rank: int, collectives: SocketCollectives) -> torch.Tensor:
        mine = torch.arange(12).view(3, 4).t().to(dtype)
        collectives.all_reduce(mine)
        return mine

    for result in together(2, work):
        assert torch.equal(result, 2 * torch.arange(12).view(3, 4).t().to(dtype))


def test_gather_gives_rank_0_all_parts_in_order_and_share_sends_them_back():
    def work(rank: int, collectives: SocketCollectives) -> tuple[Any, torch.Tensor]:
        parts = collectives.gather_to_first(torch.full((2, 3), float(rank)))
        shared = torch.full((5,), rank)
        collectives.share_from_first(shared)
        return parts, shared

    results = together(3, work)
    assert [float(part[0, 0]) for part in results[0][0]] == [0.0, 1.0, 2.0]
    assert results[1][0] is None
    assert all(shared.tolist() == [0] * 5 for _, shared in results)


def test_stranger_at_the_meeting_point_does_not_keep_the_ranks_apart():
    ranks = [SocketCollectives(rank, 2) for rank in range(2)]
    addresses = [rank.meeting_point("127.0.0.1") for rank in ranks]
    with socket.create_connection(addresses[0][:2]) as stranger:
        stranger.sendall(b"\xff" * 40)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: rank.join(addresses), ranks, timeout=30))
        tensors = [torch.full((3,), 1.0 + n) for n in range(2)]
        list(pool.map(lambda rank, tensor: rank.all_reduce(tensor), ranks, tensors, timeout=30))
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * 2
    for rank in ranks:
        rank.close()


def test_rank_that_leaves_is_an_error_for_who_waits():
    def work(rank: int, collectives: SocketCollectives) -> str:
        if rank == 1:
            collectives.close()
            return "left"
        try:
            collectives.all_reduce(torch.ones(4))
        except ConnectionError as error:
            return str(error)
        return "no error"

    assert together(2, work)[0] != "no error"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_computes_for_longer_than_the_others_is_waited_for(late: int):
    def work(rank: int, collectives: SocketCollectives) -> torch.Tensor:
        if rank == late:
            time.sleep(4)  # a kernel that waits no longer than three seconds for its answers would have hung up
        ones = torch.ones(5_000_000)  # more than it takes in for one that does not read
        collectives.all_reduce(ones)
        return ones

    assert all(torch.equal(result, torch.full((5_000_000,), 2.0)) for result in together(2, work))
