from typing import Any

import pytest

from intarsia.kvcache.prefix import Ends, GivenChain, TokenChain

KEY = b"k" * 32


def chain(tokens: Any, *, key: bytes = KEY, **others: Any) -> TokenChain:
    return TokenChain(tokens, 4, key=key, **others)


def test_a_name_depends_on_every_earlier_token():
    a, b = chain([1, 2, 3, 4, 5, 6, 7, 8]).grow(), chain([9, 2, 3, 4, 5, 6, 7, 8]).grow()
    assert len(a) == 2
    assert not set(a) & set(b)


@pytest.mark.parametrize("changed", [{"key": b"x" * 32}, {"salt": b"another tenant"}])
def test_a_name_depends_on_key_and_salt(changed: dict[str, Any]):
    assert chain([1, 2, 3, 4], **changed).grow() != chain([1, 2, 3, 4]).grow()
    assert chain(range(6), **changed).end(6) is None  # names come first
    one, other = chain(range(6), **changed), chain(range(6))
    one.grow()
    other.grow()
    assert one.end(6) != other.end(6)


def test_no_salt_and_first_tokens_pose_as_another_salt():
    assert chain([1, 2, 3, 4], salt=b"\1\0\0\0").grow() != chain([1, 1, 2, 3, 4]).grow()


def test_names_computed_as_tokens_come_are_those_computed_at_once():
    tokens: list[int] = []
    growing = chain(tokens)
    for token in range(23):
        tokens.append(token)
        growing.grow()
    assert growing.names == chain(range(23)).grow()
    assert growing.known == 23


def test_an_end_inside_a_block_has_a_name_of_its_own():
    one, other = chain([1, 2, 3, 4, 5, 6]), chain([1, 2, 3, 4, 5, 7])
    one.grow()
    other.grow()
    assert one.end(5) == other.end(5)
    assert one.end(6) != other.end(6)
    assert one.end(3) is None  # no full block before it


def test_given_names_have_no_ends():
    given = GivenChain([b"a", b"b"], 9)
    assert (given.grow(), given.known, given.end(9)) == ([b"a", b"b"], 9, None)


def test_ends_are_known_until_the_last_block_of_them_is_gone():
    ends = Ends()
    ends.add(b"end", b"full", 3)
    ends.add(b"end", b"full", 3)  # of a second group
    assert ends.after(b"full") == {3: 2}
    ends.remove(b"end")
    assert ends.after(b"full") == {3: 1}
    ends.remove(b"end")
    ends.remove(b"never was one")
    assert ends.after(b"full") is None


def test_two_ends_of_one_length_are_forgotten_each_by_itself():
    ends = Ends()
    ends.add(b"end", b"full", 3)
    ends.add(b"other end", b"full", 3)  # after the same blocks, with other tokens
    ends.remove(b"end")
    assert (ends.after(b"full"), len(ends)) == ({3: 1}, 1)
    ends.remove(b"other end")
    assert (ends.after(b"full"), len(ends)) == (None, 0)


def test_an_end_is_held_by_blocks_that_go_on_beyond_it_until_the_last_of_them_is_gone():
    ends = Ends()
    for holder in (b"one", b"other"):
        assert ends.add_within(b"end", b"full", 3, holder)
    assert not ends.add_within(b"end", b"full", 3, b"one")
    assert (b"end" in ends, ends.after(b"full"), len(ends)) == (True, {3: 1}, 1)
    assert ends.holder(b"end", {b"other"}) == b"other"  # a group that lacks the first of them
    assert ends.holder(b"end", {b"end", b"one"}) == b"end"
    assert ends.holder(b"end", set()) is ends.holder(None, {b"one"}) is None
    ends.remove_holder(b"one")
    assert ends.holder(b"end", {b"one", b"other"}) == b"other"
    assert (ends.concerns(b"one"), ends.concerns(b"other")) == (False, True)
    ends.remove_holder(b"other")
    assert (b"end" in ends, ends.after(b"full"), len(ends)) == (False, None, 0)
