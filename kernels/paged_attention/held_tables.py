"""Block tables that stay on a device from step to step, and take what changes.

The host has the block tables of all slots, one table for each group of layers. They lie in one array. A device has a
copy of it. Code that writes to the array notes the range. The next upload carries the numbers of these ranges alone. So
a step in which no request gets a block carries none.

    numbers    [group 0: slot 0 | slot 1 | .. | spare] [group 1: slot 0 | slot 1 | .. | spare]
    a step     its rows are of slots 3 and 0, so their tables begin at numbers 3 * width and 0
    a change   slot 0 grows by block 17: place 2, number 17

Numbers are read from the array when they are sent. So it does not matter how often ranges were noted, nor in which
order. Behind the blocks of a request lie those of an earlier one in its slot. No row is longer than its own blocks, so
nothing reads them. All is in the order of the device's stream: the step before has read its tables by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..transfer import Transfer


class HeldTables:
    """All tables of a worker."""

    def __init__(self, host: np.ndarray, shapes: Sequence[tuple[int, int]], device: torch.device):
        """host: int32, the numbers of all tables
        shapes: slots and most blocks of each, in their order. The last slot is spare: it has null blocks alone"""
        self.numbers: Tensor = torch.zeros(len(host), dtype=torch.int32, device=device)
        self._host = host
        self._shapes = shapes
        self._starts = np.cumsum([0] + [slots * width for slots, width in shapes])
        self._noted: list[tuple[int, int]] = []
        self._on_its_way: Transfer | None = None

    def note(self, group: int, slot: int, start: int, stop: int) -> None:
        """Blocks [start, stop) of a table are others now."""
        first = int(self._starts[group]) + slot * self._shapes[group][1]
        self._noted.append((first + int(start), first + int(stop)))

    def put(self, transfer: Transfer) -> None:
        """Have all that was noted sent, once, however often it is asked for."""
        if self._noted and transfer is not self._on_its_way:
            places = np.concatenate([np.arange(start, stop) for start, stop in self._noted])
            transfer.put_at(self.numbers, places, self._host[places])
            transfer.then(self._arrived)
            self._on_its_way = transfer  # until it has run, all of it may have to be put into another one

    def send(self) -> None:
        """The same by an upload of its own, for steps that have several."""
        if self._noted:
            transfer = Transfer(self.numbers.device)
            self.put(transfer)
            transfer.run()

    def _arrived(self) -> None:
        self._noted.clear()
        self._on_its_way = None

    @torch.inference_mode()
    def clear(self) -> None:
        """All tables of the host are zeros again."""
        self._arrived()
        self.numbers.zero_()

    def of(self, group: int, slots: np.ndarray) -> "Held":
        count, width = self._shapes[group]
        return Held(self, int(self._starts[group]), width, count - 1, slots)


@dataclass(frozen=True, eq=False)
class Held:
    """Which rows of a table a step uses."""

    tables: HeldTables
    first: int  # number of the group's table
    width: int  # most blocks of a row
    spare_slot: int
    slots: np.ndarray  # [R]

    @cached_property
    def starts(self) -> np.ndarray:
        """[R] int64: the number at which the table of each row begins."""
        return self.first + self.slots.astype(np.int64) * self.width

    def padded(self, rows: int) -> "Held":
        """With more rows, of null blocks."""
        more = np.full(rows - len(self.slots), self.spare_slot)
        return replace(self, slots=np.concatenate([self.slots, more]))
