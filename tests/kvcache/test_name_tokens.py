"""Which tokens a name stands for, and for how long that is remembered."""

from array import array

from intarsia.kvcache.name_tokens import NameTokens
from intarsia.kvcache.prefix import Encoder, Namer


def test_a_chain_notes_each_name_with_the_one_before_it_and_its_tokens():
    namer = Namer(None, 4)
    namer.notes = notes = NameTokens()
    tokens = list(range(10))
    chain = namer.chain(tokens, b"salt", None)
    first, second = chain.grow()
    assert notes.of(first) == (None, array("I", [0, 1, 2, 3]).tobytes())
    tokens += [10, 11]
    third = chain.grow()[2]
    told = notes.of(third)
    assert told is not None and told.before == second and told.tokens == [8, 9, 10, 11]
    assert notes.of(b"another") is None and len(notes) == 3


def test_names_beyond_the_bound_are_forgotten_those_noted_first_before_others():
    notes = NameTokens(most=3)
    namer = Namer(None, 2)
    namer.notes = notes
    old, new = namer.chain([1, 2, 3, 4], b"", None).grow(), namer.chain([5, 6], b"", None).grow()
    again = namer.chain([1, 2], b"", None).grow()  # noted anew
    assert again == old[:1]
    namer.chain([7, 8, 9, 9], b"", None).grow()
    assert notes.of(old[1]) is None and notes.of(old[0]) is not None and notes.of(new[0]) is None
    assert len(notes) == 3


def test_what_stands_beside_a_picture_is_not_noted_and_nothing_is_where_it_is_not_asked_for():
    namer = Namer(None, 4)
    assert namer.chain([1] * 8, b"", None).grow()
    namer.notes = notes = NameTokens()
    assert namer.chain([1] * 8, b"", Encoder(b"picture", 4)).grow()
    assert len(notes) == 0
