"""Block tables that stay on a device: changes alone are sent, and yet each row reads its own blocks."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from intarsia.kernels.paged_attention.held_tables import HeldTables
from intarsia.kernels.transfer import Transfer
from intarsia.kvcache.reach import Cross, Full, Sliding, State
from intarsia.proto.step import Admit, Advance
from intarsia.proto.worker import RunnerLimits
from intarsia.tests.kvcache.plans import plan_of
from intarsia.workers.slots import GREEDY, SlotTables

CPU = torch.device("cpu")
SLOTS, LONGEST = 5, 60  # tokens; blocks have 4
GROUPS = Full(), Sliding(9), State(), Cross()


class History:
    """Requests that come, grow, give way and go. What every slot has is known apart from the tables."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        limits = RunnerLimits(max_num_seqs=SLOTS, max_num_batched_tokens=64, max_model_len=LONGEST)
        self.tables = SlotTables(plan_of(*GROUPS), limits, grammars=None)
        self.tables.hold(CPU)
        self.blocks: dict[int, list[list[int]]] = {}  # of each slot that is taken, by group

    @property
    def held(self) -> HeldTables:
        assert self.tables.held is not None
        return self.tables.held

    def act(self) -> None:
        slot = self.random.randrange(SLOTS)
        if slot not in self.blocks:
            # A newcomer has whole tables, with null blocks in front where a window has left them behind.
            blocks = [self.some(self.room(g, 0)) for g in range(len(GROUPS))]
            self.tables.admit(Admit(slot, (1, 2), 0, tuple(map(tuple, blocks)), GREEDY))
            self.blocks[slot] = blocks
        elif self.random.random() < 0.3:
            self.tables.retire(slot)
            del self.blocks[slot]
        else:
            more = [self.some(min(2, self.room(g, len(known)))) for g, known in enumerate(self.blocks[slot])]
            self.tables.append_blocks(Advance(slot, 1, tuple(map(tuple, more))))
            for known, new in zip(self.blocks[slot], more, strict=True):
                known += new

    def room(self, g: int, taken: int) -> int:
        return self.tables.block_tables[g].shape[1] - taken

    def some(self, most: int) -> list[int]:
        return [self.random.choice((0, self.random.randrange(1, 1000))) for _ in range(self.random.randint(0, most))]

    def check(self) -> None:
        """What attention reads on the device: from where its row begins, as many as it has."""
        slots = np.array(sorted(self.blocks), dtype=np.int64)
        for g in range(len(GROUPS)):
            held = self.held.of(g, slots).padded(len(slots) + 2)
            for start, slot in zip(held.starts.tolist(), held.slots.tolist(), strict=True):
                known = self.blocks[slot][g] if slot in self.blocks else [0] * self.room(g, 0)
                assert self.held.numbers[start : start + len(known)].tolist() == known, (g, slot)


def numbers_of(held: HeldTables) -> int:
    """How many are sent with the next upload."""
    transfer = Transfer(CPU)
    held.put(transfer)
    return sum(len(values) for values in transfer._values) // 2  # a place and a number each


@pytest.mark.parametrize("attempt", range(20))
def test_after_any_history_every_row_finds_its_blocks(attempt: int):
    """Some uploads never leave, as those of a step that does not fit into its frame."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    history = History(seed)
    for _ in range(80):
        for _ in range(history.random.randint(0, 4)):
            history.act()
        transfer = Transfer(CPU)
        for _ in GROUPS:
            history.held.put(transfer)
        way = history.random.random()
        if way < 0.5:
            transfer.run()
        elif way < 0.8:
            history.held.send()
        else:
            continue
        history.check()
        assert numbers_of(history.held) == 0
        if history.random.random() < 0.03:
            history.tables.clear()
            history.blocks.clear()
            assert not history.held.numbers.any()


def test_only_changes_are_sent_and_each_once(held: HeldTables, grow: Callable[[int], None]):
    assert numbers_of(held) == 0
    grow(7)
    assert numbers_of(held) == 7
    transfer = Transfer(CPU)
    held.put(transfer)
    held.put(transfer)  # for another group
    assert len(transfer._values) == 2
    transfer.run()
    assert numbers_of(held) == 0
    grow(1)
    assert numbers_of(held) == 1


def test_what_did_not_leave_is_sent_with_the_next_upload(held: HeldTables, grow: Callable[[int], None]):
    grow(2)
    held.put(Transfer(CPU))
    grow(1)
    transfer = Transfer(CPU)
    held.put(transfer)
    transfer.run()
    assert held.numbers[:4].tolist() == [1, 2, 1, 0]


@pytest.fixture
def tables() -> SlotTables:
    made = SlotTables(plan_of(Full()), RunnerLimits(2, 64, LONGEST), grammars=None)
    made.hold(CPU)
    made.admit(Admit(0, (1,), 0, ((),), GREEDY))
    return made


@pytest.fixture
def held(tables: SlotTables) -> HeldTables:
    assert tables.held is not None
    return tables.held


@pytest.fixture
def grow(tables: SlotTables) -> Callable[[int], None]:
    """By blocks 1, 2, .."""
    return lambda count: tables.append_blocks(Advance(0, 1, (tuple(range(1, count + 1)),)))


def test_tables_are_held_once(tables: SlotTables, held: HeldTables):
    tables.hold(CPU)
    assert tables.held is held
    numbers = held.numbers.data_ptr()
    tables.clear()
    assert tables.held is held and held.numbers.data_ptr() == numbers, "recorded steps read them there"
