"""Each cause for which tokens of a prompt are not found. Together with what is found they are the whole prompt
(`world.py` checks that at every lookup of its random use)."""

from intarsia.kvcache.ids import BlockId
from intarsia.kvcache.misses import Miss, lost_tokens, merged
from intarsia.kvcache.reach import Full, Sliding, State
from intarsia.tests.kvcache.test_manager import manager, serve

PROMPT = list(range(33))


def test_a_prompt_that_was_never_computed_is_new():
    assert manager(Full()).lookup(PROMPT).misses == (Miss("new", 33),)


def test_what_follows_a_known_prefix_is_new():
    m = manager(Full())
    serve(m, PROMPT)
    assert m.lookup([*PROMPT[:16], *range(900, 910)]).misses == (Miss("new", 10),)


def test_the_last_token_of_a_known_prompt_is_computed():
    m = manager(Full())
    serve(m, PROMPT)
    assert m.lookup(PROMPT).misses == (Miss("last_token", 1),)


def test_an_evicted_block_is_told_with_its_kind_of_layers():
    m = manager(Full(), Sliding(8), blocks=64)
    serve(m, PROMPT)
    m.forget(0, BlockId(m.pool.groups[0].index[m.chain(PROMPT).grow()[4]]))
    misses = m.lookup(PROMPT).misses
    assert misses[0] == Miss("last_token", 1)
    assert Miss("evicted", 16, "full") in misses
    assert {miss.layers for miss in misses} <= {"", "full", "sliding-8"}


def test_a_length_without_a_saved_state_is_told():
    m = manager(Full(), State(), blocks=64)
    serve(m, PROMPT)
    assert m.lookup([*PROMPT[:20], 99]).misses == (Miss("last_token", 1), Miss("no_snapshot", 20, "state"))


def test_a_drafters_end_inside_a_block_is_a_matter_of_alignment():
    m = manager(Full(), Full(), blocks=64, draft=[1])
    serve(m, PROMPT[:16])
    assert Miss("alignment", 4, "full") in m.lookup([*PROMPT[:16], 7]).misses


def test_what_another_salt_has_is_told_apart_from_new():
    m = manager(Full())
    serve(m, PROMPT)
    assert m.lookup(PROMPT, b"salted").misses == (Miss("new", 1), Miss("salt", 32))


def test_what_was_known_before_a_reset_is_told_until_it_is_computed_again():
    m = manager(Full(), State(), blocks=64)
    serve(m, PROMPT)
    m.reset_prefix_cache()
    misses = m.lookup(PROMPT).misses
    assert lost_tokens(misses) == {"reset": 32} and sum(miss.tokens for miss in misses) == 33
    serve(m, PROMPT)
    assert m.lookup(PROMPT).misses == (Miss("last_token", 1),)


def test_without_caching_that_is_the_only_cause():
    assert manager(Full(), caching=False).lookup(PROMPT).misses == (Miss("caching_off", 33),)


def test_misses_of_one_cause_and_kind_are_one():
    parts = Miss("evicted", 3, "full"), Miss("new", 0), Miss("evicted", 2), Miss("evicted", 4, "full")
    assert merged(parts) == (Miss("evicted", 7, "full"), Miss("evicted", 2))
