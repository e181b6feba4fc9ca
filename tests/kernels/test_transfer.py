"""Several tensors are written from one buffer."""

import numpy as np
import pytest
import torch

from intarsia.kernels.transfer import Transfer

CPU = torch.device("cpu")


def test_each_target_gets_its_values_in_its_own_kind_and_shape_and_what_reads_them_comes_after():
    table = torch.zeros(3, 8, dtype=torch.int32)
    lengths, place = torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    mask, dirty = torch.zeros(2, 1, 2), torch.zeros(4, dtype=torch.bool)
    seen: list[int] = []
    transfer = Transfer(CPU)
    transfer.put(table[:, :2], np.arange(6).reshape(3, 2))
    transfer.put(lengths, np.array([7, 8, 9]))
    transfer.put(place, np.arange(5, dtype=np.int32))
    transfer.put(mask, np.array([[0.5, -np.inf], [0, 1]]))
    transfer.put(dirty, np.array([True, False, True, True]))
    transfer.then(lambda: seen.append(int(lengths.sum())))
    transfer.run()
    assert table[:, :2].tolist() == [[0, 1], [2, 3], [4, 5]] and not table[:, 2:].any()
    assert lengths.tolist() == [7, 8, 9] and place.tolist() == [0, 1, 2, 3, 4] and seen == [24]
    assert mask.tolist() == [[[0.5, -np.inf]], [[0.0, 1.0]]] and dirty.tolist() == [True, False, True, True]


def test_numbers_are_written_at_their_places_before_what_reads_them():
    numbers, other = torch.zeros(6, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    seen: list[list[int]] = []
    transfer = Transfer(CPU)
    transfer.put_at(numbers, np.array([4, 1, 4]), np.array([9, 8, 9]))
    transfer.put(other, np.array([3, 2]))
    transfer.then(lambda: seen.append(numbers.tolist()))
    transfer.run()
    assert seen == [[0, 8, 0, 0, 9, 0]] and other.tolist() == [3, 2]
    with pytest.raises(AssertionError, match="2 values are not for 1 places"):
        Transfer(CPU).put_at(numbers, np.array([1]), np.array([1, 2]))


def test_values_that_do_not_fill_their_target_are_refused():
    with pytest.raises(AssertionError, match="3 values do not fill 4 places"):
        Transfer(CPU).put(torch.zeros(4, dtype=torch.int64), np.arange(3))
