"""Large buffers of a CPU are zero, and lie in large pages of the operating system where it lends these. Small weights
share them."""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch

from intarsia.environment import give_back_freed_memory
from intarsia.kernels.toolchain.huge_pages import CHUNK_BYTES, HUGE_BYTES, LEAST_BYTES, SideBySide, zeros

LENDS = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def process_bytes(name: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


huge_bytes = partial(process_bytes, "AnonHugePages")
resident_bytes = partial(process_bytes, "Rss")


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 2 * HUGE_BYTES, 5 * HUGE_BYTES + 12345])
def test_a_buffer_of_any_size_is_all_zero(size_bytes: int):
    buffer = zeros(size_bytes, torch.device("cpu"))
    assert (buffer.shape, buffer.dtype, int(buffer.count_nonzero())) == ((size_bytes,), torch.uint8, 0)


needs_huge_pages = pytest.mark.skipif(
    not LENDS.is_file() or "[madvise]" not in LENDS.read_text(), reason="the system does not lend huge pages on request"
)


@needs_huge_pages
def test_a_large_buffer_lies_in_huge_pages():
    before = huge_bytes()
    buffer = zeros(64 * HUGE_BYTES, torch.device("cpu"))
    assert buffer.nbytes == 64 * HUGE_BYTES
    if huge_bytes() == before:
        pytest.skip("the system has no huge page left")
    assert huge_bytes() - before >= 32 * HUGE_BYTES


@needs_huge_pages
def test_small_weights_lie_in_huge_pages_that_they_share():
    before = huge_bytes()
    plain = zeros(12 * HUGE_BYTES, torch.device("cpu"))
    if huge_bytes() - before < 10 * HUGE_BYTES:
        pytest.skip("the system has hardly any huge page left")
    del plain
    memory, before = SideBySide(), huge_bytes()
    weights = [memory.empty((96, 1024), torch.float32).fill_(n) for n in range(64)]
    assert huge_bytes() - before >= 10 * HUGE_BYTES  # of 12
    assert [int(weight.unique()) for weight in weights] == list(range(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size_bytes", [0, 4, LEAST_BYTES - 4, LEAST_BYTES, 3 * LEAST_BYTES + 4, CHUNK_BYTES])
def test_weights_of_any_size_and_kind_are_apart_from_each_other(size_bytes: int, dtype: torch.dtype):
    memory = SideBySide()
    shape = (2, size_bytes // 2 // dtype.itemsize)
    ones, twos = (memory.empty(shape, dtype).fill_(number) for number in (1, 2))
    assert (ones.shape, ones.dtype, ones.data_ptr() % 64) == (shape, dtype, 0)
    assert bool((ones == 1).all())
    assert bool((twos == 2).all())


def test_weights_that_are_moved_are_equal():
    weight = torch.randn(3, 50_000)
    assert torch.equal(SideBySide().moved(weight), weight)


def test_memory_is_given_back_with_the_last_weight_in_it():
    gc.collect()  # what earlier tests have left would go meanwhile
    give_back_freed_memory()
    memory, before = SideBySide(), resident_bytes()
    weights = [memory.empty((CHUNK_BYTES // 4,), torch.uint8).fill_(1) for _ in range(16)]
    assert resident_bytes() - before >= 3.5 * CHUNK_BYTES
    del weights
    gc.collect()
    assert resident_bytes() - before <= 1.5 * CHUNK_BYTES  # the chunk that is open, at most
