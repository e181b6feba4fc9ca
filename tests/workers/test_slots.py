"""What a worker keeps of each running request."""

from typing import Any

import numpy as np
import pytest

from intarsia.kvcache.reach import Full, State
from intarsia.proto.step import Admit, Advance
from intarsia.proto.worker import RunnerLimits
from intarsia.tests.kvcache.plans import plan_of
from intarsia.workers.slots import GREEDY, Slot, SlotTables

LIMITS = RunnerLimits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=20)


@pytest.fixture
def tables() -> SlotTables:
    """Of a group that keeps tokens, in blocks of 4, and one that keeps a state."""
    return SlotTables(plan_of(Full(), State()), LIMITS, grammars=None)


def admission(slot: int, tokens: int, blocks: tuple[tuple[int, ...], tuple[int, ...]], computed: int = 0) -> Admit:
    return Admit(slot, tuple(range(tokens)), computed, blocks, sampling=GREEDY)


def test_a_table_has_a_column_for_each_block_of_the_longest_request_and_a_row_of_null_blocks(tables: SlotTables):
    assert [table.shape for table in tables.block_tables] == [(4, 5), (4, 1)]


def test_blocks_are_appended_to_those_of_the_admission(tables: SlotTables):
    tables.admit(admission(1, 6, ((7, 8), (3,))))
    tables.append_blocks(Advance(1, 4, ((9,), ())))
    of_tokens, of_state = tables.block_tables
    assert of_tokens[1, :3].tolist() == [7, 8, 9]
    assert of_state[1, 0] == 3
    assert tables.num_blocks[:, 1].tolist() == [3, 1]


def test_a_slot_that_was_free_knows_nothing_of_who_had_it_before(tables: SlotTables):
    tables.admit(admission(0, 8, ((4, 5), (2,))))
    tables.retire(0)
    assert tables.slots[0] is None
    tables.admit(admission(0, 3, ((6,), (1,)), computed=2))
    assert (tables.known[0], tables.computed[0], tables.num_blocks[0, 0]) == (3, 2, 1)
    assert tables.block_tables[0][0, 0] == 6


def test_a_slot_is_given_to_one_request_at_a_time(tables: SlotTables):
    tables.admit(admission(2, 2, ((1,), (1,))))
    with pytest.raises(AssertionError, match="slot 2 is taken"):
        tables.admit(admission(2, 2, ((2,), (2,))))
    tables.retire(2)
    with pytest.raises(AssertionError, match="slot 2 is empty"):
        tables[2]


def test_tokens_to_compute_are_of_the_prompt_and_then_the_last_that_was_drawn(tables: SlotTables):
    tables.admit(admission(0, 5, ((1, 2), (1,))))
    assert tables.tokens(0, 2, 5).tolist() == [2, 3, 4]
    tables.last_token[0] = 17
    np.testing.assert_array_equal(tables.tokens(0, 5, 6), [17])


@pytest.mark.parametrize(("asked", "before"), [(-1, 0), (0, 3)])
def test_only_prompts_that_are_asked_about_tell_of_their_tokens(tables: SlotTables, asked: int, before: int):
    sampling = GREEDY._replace(prompt_tokens=4, prompt_logprobs=asked)
    tables.admit(admission(0, 5, ((1, 2), (1,)))._replace(sampling=sampling))
    assert tables.asked_before[0] == before


def slot_of(tokens: tuple[int, ...] = (1, 2, 3, 4), **settings: Any) -> Slot:
    return Slot.of(Admit(0, tokens, 0, ((1,), (1,)), sampling=GREEDY._replace(prompt_tokens=4, **settings)), None)


def test_a_slot_that_asks_for_nothing_is_drawn_from_the_logits_as_they_are():
    assert slot_of(ends=(1,)).draws_as_is
    assert slot_of(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, seed=7, logprobs=2).draw == (1.0, 3, 0.5, 0.1, 7, 2)
    for asks in (slot_of(min_tokens=1), slot_of(logit_bias=((3, 1.0),)), slot_of(presence_penalty=1.0)):
        assert not asks.draws_as_is


def test_ends_are_excluded_before_min_tokens_are_there():
    slot = slot_of(ends=(1, 5), min_tokens=2)
    assert [slot.changes(position).excluded for position in (4, 5, 6)] == [(1, 5), (1, 5), ()]


def test_changes_are_those_that_were_asked_for():
    slot = slot_of((1, 2, 3, 4, 7), logit_bias=((3, 1.0),), bad_token_ids=((7, 8),), repetition_penalty=2.0)
    changes = slot.changes(5)
    assert (changes.forbidden, changes.biases, changes.allowed) == ([8], ((3, 1.0),), None)
    assert changes.penalties is not None
    assert changes.penalties.tokens.tolist() == [1, 2, 3, 4, 7]
