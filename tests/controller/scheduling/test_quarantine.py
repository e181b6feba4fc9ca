import pytest

from intarsia.controller.request import Request
from intarsia.controller.scheduling.quarantine import SUSPICIOUS_LOSSES, Quarantine
from intarsia.tests.controller.scheduling.by_hand import request_of


def request(number: int = 1) -> Request:
    return request_of(number=number)


def suspected(*requests: Request) -> Quarantine:
    quarantine = Quarantine()
    for _ in range(SUSPICIOUS_LOSSES):
        quarantine.note_loss(requests)
    return quarantine


def test_a_request_is_suspected_after_losses_in_a_row():
    quarantine, first = Quarantine(), request()
    quarantine.note_loss([first])
    assert not quarantine.suspects
    quarantine.note_loss([first])
    assert list(quarantine.suspects) == [first]


def test_a_token_in_between_ends_the_row():
    quarantine, first = Quarantine(), request()
    quarantine.note_loss([first])
    first.tokens.append(7)
    quarantine.note_loss([first])
    assert not quarantine.suspects
    assert (first.losses, first.tokens_at_loss) == (1, 2)


def test_a_suspect_that_has_a_token_is_cleared_and_makes_room_for_the_next():
    first, second = request(1), request(2)
    quarantine = suspected(first, second)
    assert quarantine.clear() == []
    first.slot = 0
    first.tokens.append(7)
    assert quarantine.clear() == [first]
    assert list(quarantine.suspects) == [second]


@pytest.mark.parametrize("further_losses", [0, 2])
def test_the_last_suspect_that_is_cleared_goes_on(further_losses: int):
    first = request()
    quarantine = suspected(first)
    for _ in range(further_losses):
        quarantine.note_loss([first])
    first.slot = 0
    first.tokens.append(7)
    assert quarantine.clear() == []
    assert not quarantine.suspects


@pytest.mark.parametrize("slot", [0, None])
def test_a_suspect_that_has_ended_is_let_go(slot: int | None):
    first = request()
    quarantine = suspected(first)
    first.is_live = False
    assert quarantine.clear() == []
    assert not quarantine.suspects
