"""Large buffers of a CPU are zero, and lie in large pages of the operating system where it lends these."""

from pathlib import Path

import pytest
import torch

from intarsia.workers.huge_pages import HUGE_BYTES, zeros

LENDS = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes() -> int:
    """Of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 2 * HUGE_BYTES, 5 * HUGE_BYTES + 12345])
def test_a_buffer_of_any_size_is_all_zero(size_bytes: int):
    buffer = zeros(size_bytes, torch.device("cpu"))
    assert (buffer.shape, buffer.dtype, int(buffer.count_nonzero())) == ((size_bytes,), torch.uint8, 0)


@pytest.mark.skipif(
    not LENDS.is_file() or "[madvise]" not in LENDS.read_text(), reason="the system does not lend huge pages on request"
)
def test_a_large_buffer_lies_in_huge_pages():
    before = huge_bytes()
    buffer = zeros(64 * HUGE_BYTES, torch.device("cpu"))
    assert buffer.nbytes == 64 * HUGE_BYTES
    if huge_bytes() == before:
        pytest.skip("the system has no huge page left")
    assert huge_bytes() - before >= 32 * HUGE_BYTES
