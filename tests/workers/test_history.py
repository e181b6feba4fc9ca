from intarsia.proto.step import Sampling
from intarsia.workers.history import History

PLAIN = Sampling(0.0, 0, 1.0, 0, -1)


def test_penalties_know_all_tokens_and_how_often_the_answer_has_each():
    penalties = History([5, 0, 5, 3, 3, 0], prompt_tokens=3).penalties(PLAIN._replace(presence_penalty=0.5))
    assert penalties is not None
    assert penalties.tokens.tolist() == [0, 3, 5]
    assert penalties.counts.tolist() == [1, 2, 0]
    assert penalties[2:] == (1.0, 0.5, 0.0)


def test_without_penalties_there_are_none():
    assert History([1, 2], prompt_tokens=1).penalties(PLAIN._replace(bad_token_ids=((1,),))) is None


def test_a_penalty_beyond_what_a_float_holds_is_the_greatest_there_is():
    for asked, given in ((1e300, 1e30), (1e-300, 1e-30)):
        penalties = History([1], prompt_tokens=1).penalties(PLAIN._replace(repetition_penalty=asked))
        assert penalties is not None and penalties.repetition == given


def test_a_history_of_parts_is_that_of_the_whole():
    """A preempted request comes back with all its tokens in one."""
    whole = History([5, 6, 7, 7, 8, 2], prompt_tokens=2)
    grown = History([5, 6], prompt_tokens=2)
    for token in (7, 7, 8, 2):
        grown.add(token)
    sampling = PLAIN._replace(presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.5)
    found = [history.penalties(sampling) for history in (whole, grown)]
    for penalties in found:
        assert penalties is not None
        assert penalties.tokens.tolist() == [2, 5, 6, 7, 8]
        assert penalties.counts.tolist() == [1, 0, 0, 2, 1]


def test_the_last_of_a_forbidden_row_is_forbidden_once_the_answer_ends_with_the_rest():
    wanted = PLAIN._replace(bad_token_ids=((3,), (1, 2), (4, 1), (9, 99)))
    assert History([1, 1], prompt_tokens=1).forbidden(wanted) == [3, 2]  # a 1 was said
    assert History([1], prompt_tokens=1).forbidden(wanted) == [3]  # a 1 was asked
