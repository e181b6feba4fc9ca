import pickle

import pytest

from intarsia.errors import ERRORS, IntarsiaError


@pytest.mark.parametrize("name", ERRORS)
def test_error_survives_the_wire_and_pickling(name: str):
    error = ERRORS[name]("7 blocks are wanted, 3 are free", field="max_tokens", asked=7, free=3)
    for copy in (IntarsiaError.from_wire(error.to_wire()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is type(error)
        assert (str(copy), copy.field, copy.details) == (str(error), "max_tokens", {"asked": 7, "free": 3})


def test_error_of_a_newer_peer_is_still_one_of_ours():
    assert type(IntarsiaError.from_wire(["Unheard", "of", None, {}])) is IntarsiaError
