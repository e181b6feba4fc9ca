"""What waits for a slow reader: how it is held, and how it is taken."""

import random

import pytest

from intarsia.proto.codec import decode, pack
from intarsia.proto.reply import PIECE_ROW_BYTES, PIECE_TOKENS, Backlog, Delta, Rows, TokenLogprobs


def row(token: int, alternatives: int = 20) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5 * token, tuple((n, -float(n)) for n in range(alternatives)))


def test_rows_are_a_sequence_of_what_they_were_made_of():
    rows = tuple(map(row, range(5)))
    packed = Rows.of(rows)
    assert (len(packed), tuple(packed), packed[3], packed[1:3]) == (5, rows, rows[3], rows[1:3])
    assert packed == rows and rows == packed and packed != rows[1:]
    assert packed + rows == rows + packed == rows * 2
    assert [*packed] == list(rows) and not Rows() and packed


def test_delta_is_the_same_on_the_other_side_of_the_wire():
    for delta in (
        Delta((5,)),
        Delta((5, 6), Rows.of([row(5), row(6)]), "stop", 7, Rows.of([row(1)]), 3),
        Delta((5,), Rows.of([row(5, 0)]), None, 7, None, 0),
    ):
        assert decode(pack(delta), Delta) == delta


def test_deltas_of_an_answer_joined_are_all_tokens_with_the_beginning_and_the_end_told():
    deltas = [
        Delta((5,), Rows.of([row(5)]), None, 7, Rows.of([row(1)]), 3, 0.5),
        Delta((), Rows(), None, 7, answer=3),
        Delta((6, 7), Rows.of([row(6), row(7)]), "stop", 8, answer=3),
    ]
    rows = Rows.of([row(5), row(6), row(7)])
    assert Delta.join(deltas) == Delta((5, 6, 7), rows, "stop", 8, Rows.of([row(1)]), 3, 0.5)
    assert Delta.join(deltas[:1]) == deltas[0]
    assert Delta.join([Delta((1,)), Delta((2,))]) == Delta((1, 2))


def test_deltas_of_several_answers_are_not_joined():
    with pytest.raises(AssertionError, match="several answers"):
        Delta.join([Delta((1,)), Delta((2,), answer=1)])


def test_what_waited_is_taken_in_pieces_of_bounded_size_answer_by_answer():
    backlog = Backlog()
    for n in range(150):
        backlog.put(Delta((n,), None, "length" if n == 149 else None, 3, answer=0))
    backlog.put(Delta((1000,), answer=1))
    taken = []
    while backlog:
        taken.append(backlog.take())
    assert [(delta.answer, len(delta.token_ids)) for delta in taken] == [
        (0, PIECE_TOKENS),
        (1, 1),
        (0, PIECE_TOKENS),
        (0, 150 - 2 * PIECE_TOKENS),
    ]
    assert [token for delta in taken if not delta.answer for token in delta.token_ids] == list(range(150))
    assert [delta.finish_reason for delta in taken] == [None, None, None, "length"]
    assert {delta.num_cached_tokens for delta in taken if not delta.answer} == {3}


@pytest.mark.parametrize("alternatives", [0, 5, 20])
def test_pieces_with_log_probabilities_hold_few_of_them(alternatives: int):
    backlog = Backlog()
    rows = [row(n, alternatives) for n in range(100)]
    for n in range(0, 100, 2):
        about_prompt = Rows.of([row(1), row(2)]) if n == 0 else None
        backlog.put(Delta((n, n + 1), Rows.of(rows[n : n + 2]), None, 0, about_prompt))
    taken = []
    while backlog:
        taken.append(backlog.take())
    assert [row for delta in taken for row in delta.logprobs or ()] == rows
    assert taken[0].prompt_logprobs == (row(1), row(2))
    assert all(delta.prompt_logprobs is None for delta in taken[1:])
    for delta in taken:
        assert delta.logprobs is not None and len(delta.token_ids) == len(delta.logprobs)
        assert sum(map(len, Rows.of(delta.logprobs).packed)) <= PIECE_ROW_BYTES
        assert alternatives < 20 or len(delta.token_ids) <= 8


def test_answer_that_is_wanted_whole_is_taken_whole():
    backlog = Backlog()
    for n in range(3 * PIECE_TOKENS):
        backlog.put(Delta((n,), Rows.of([row(n)])))
    delta = backlog.take(in_pieces=False)
    assert delta.token_ids == tuple(range(3 * PIECE_TOKENS)) and len(delta.logprobs or ()) == 3 * PIECE_TOKENS
    assert not backlog


def test_backlog_loses_nothing_in_random_use_and_counts_what_it_holds():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    backlog = Backlog()
    put: dict[int, list[int]] = {answer: [] for answer in range(4)}
    got: dict[int, list[int]] = {answer: [] for answer in range(4)}
    for _ in range(3000):
        if rng.random() < 0.7:
            answer = rng.randrange(4)
            tokens = tuple(rng.randrange(1000) for _ in range(rng.choice((1, 1, 1, 3, 200))))
            put[answer] += tokens
            backlog.put(Delta(tokens, Rows.of(row(token, 2) for token in tokens), answer=answer))
        elif backlog:
            delta = backlog.take(in_pieces=rng.random() < 0.9)
            got[delta.answer] += delta.token_ids
            assert [each.token_id for each in delta.logprobs or ()] == list(delta.token_ids)
    waiting = sum(map(len, put.values())) - sum(map(len, got.values()))
    assert (backlog.num_bytes > 0) == (waiting > 0)
    while backlog:
        delta = backlog.take()
        got[delta.answer] += delta.token_ids
    assert got == put and backlog.num_bytes == 0
