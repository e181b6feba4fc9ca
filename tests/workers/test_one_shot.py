"""Sums that ranks make by reading each other's memory: which tensors, and that it is on all ranks or on none. That the
sums are right is shown by whole engines of two ranks (`test_on_pretended_cuda.py`)."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from intarsia.workers import one_shot
from intarsia.workers.one_shot import MOST_BYTES, OneShot

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("numbers", "dtype", "is_taken"),
    [
        (MOST_BYTES // 2, torch.bfloat16, True),
        (MOST_BYTES // 2 + 8, torch.bfloat16, False),
        (8, torch.float32, True),
        (7, torch.float32, False),
        (8, torch.float16, False),
        (8, torch.int64, False),
    ],
)
def test_small_tensors_of_kinds_that_the_kernel_adds_are_taken(numbers: int, dtype: torch.dtype, is_taken: bool):
    assert OneShot.takes(OneShot.__new__(OneShot), torch.zeros(numbers, dtype=dtype)) is is_taken


class OtherRank:
    """Says whether it works on another rank, when all say so."""

    def __init__(self, works: bool):
        self._works = works

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor += int(self._works)


class Working(OneShot):
    """Adds 2 * once, as rank 1 of two would give."""

    def __init__(self, device: torch.device):
        pass

    def add_up(self, tensor: torch.Tensor) -> None:
        tensor *= 3


class Wrong(Working):
    def add_up(self, tensor: torch.Tensor) -> None:
        tensor *= 2


class Refused(Working):
    def __init__(self, device: torch.device):
        raise RuntimeError("peer access is not supported between these devices")


@pytest.mark.parametrize(
    ("kind", "works_elsewhere", "is_used"),
    [(Working, True, True), (Working, False, False), (Wrong, True, False), (Refused, True, False)],
)
def test_it_is_used_where_it_was_right_on_all_ranks(
    kind: Any, works_elsewhere: bool, is_used: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(one_shot, "dist", OtherRank(works_elsewhere))
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    found = kind.where_it_works(rank=0, size=2, device=CPU)
    assert (found is not None) is is_used


def test_torch_has_the_operator_that_is_called():
    schema = str(torch.ops.symm_mem.one_shot_all_reduce_copy_out.default._schema)
    assert "Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name, Tensor(a!) out" in schema
    assert dist.is_available()
