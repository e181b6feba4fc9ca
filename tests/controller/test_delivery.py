"""What subscribers are sent of a step, and when."""

import math

import pytest

from intarsia.controller.delivery import PRESSED_INTERVAL_S, Sink, Subscribers
from intarsia.controller.request import Request
from intarsia.controller.scheduling.outcome import Outcome, Progress
from intarsia.errors import EngineUnavailable
from intarsia.kvcache.ids import RequestId
from intarsia.proto.messages import FROM_ENGINE, Delivery
from intarsia.proto.request import FinishReason, SamplingParams

PROMPT = [1, 2, 3]


def subscribed(
    subscribers: Subscribers, sink: Sink, handle: int, interval_s: float = 0.0, tokens: tuple[int, ...] = ()
) -> Request:
    """A request with so many tokens of its answer, all of them sent."""
    request = Request(
        id=RequestId(handle), tokens=[*PROMPT, *tokens], prompt_tokens=len(PROMPT), sampling=SamplingParams(), seed=0,
        stop_token_ids=frozenset(), max_total_tokens=100,
    )  # fmt: skip
    subscribers.add(request, sink, handle, interval_s)
    return request


def plain(*drawn: tuple[Request, int]) -> Outcome:
    """A step that brought a token to each, and nothing else."""
    for request, token in drawn:
        request.tokens.append(token)
    return Outcome([request for request, _ in drawn], [token for _, token in drawn], [])


def notable(request: Request, token: int, reason: FinishReason | None = None) -> Outcome:
    request.tokens.append(token)
    return Outcome([], [], [Progress(request, token, reason)])


def texts(deliveries: list[Delivery]) -> list[tuple[int, ...]]:
    """The tokens of each delivery that says more than a token per handle."""
    return [item.token_ids for each in deliveries for _, item in each.deltas]


def test_each_front_end_gets_one_delivery_with_a_column_of_tokens():
    subscribers = Subscribers()
    here: list[Delivery] = []
    there: list[Delivery] = []
    to_here, to_there = here.append, there.append
    requests = [subscribed(subscribers, sink, n, tokens=(9,)) for n, sink in enumerate((to_here, to_there, to_here))]
    subscribers.send(plain(*((request, 10 + n) for n, request in enumerate(requests))), 0.0)
    assert here == [Delivery([0, 2], [10, 12], [])]
    assert there == [Delivery([1], [11], [])]


def test_tokens_come_together_once_the_interval_is_over():
    subscribers, sent = Subscribers(), list[Delivery]()
    request = subscribed(subscribers, sent.append, 5, interval_s=1.0)
    for now_s, token in ((0.0, 10), (0.4, 11), (0.8, 12), (1.2, 13), (1.6, 14)):
        subscribers.send(plain((request, token)), now_s)
    assert texts(sent) == [(10,), (11, 12, 13)]
    subscribers.send(notable(request, 15, FinishReason.STOP), 1.7)
    assert texts(sent)[2:] == [(14, 15)]  # the end does not wait


def test_an_infinite_interval_sends_all_tokens_at_the_end():
    subscribers, sent = Subscribers(), list[Delivery]()
    request = subscribed(subscribers, sent.append, 5, interval_s=math.inf)
    subscribers.send(notable(request, 10), 0.0)
    subscribers.send(plain((request, 11)), 1000.0)
    assert sent == []
    subscribers.send(notable(request, 12, FinishReason.LENGTH), 2000.0)
    assert texts(sent) == [(10, 11, 12)]


@pytest.mark.parametrize("interval_s", [0.0, 10.0])
def test_under_pressure_requests_old_and_new_are_sent_less_often_and_no_token_twice(interval_s: float):
    subscribers, sent = Subscribers(), list[Delivery]()
    old = subscribed(subscribers, sent.append, 0, interval_s, tokens=(9,))
    subscribers.press(is_pressed=True, live=[old])
    subscribers.press(is_pressed=True, live=[old])
    new = subscribed(subscribers, sent.append, 1, tokens=(9,))
    assert old.subscriber.interval_s == max(interval_s, PRESSED_INTERVAL_S)
    assert new.subscriber.interval_s == PRESSED_INTERVAL_S
    subscribers.send(plain((old, 10), (new, 20)), 0.0)
    subscribers.send(plain((old, 11), (new, 21)), 0.01)
    assert texts(sent) == [(10,), (20,)]


def test_an_error_goes_to_the_handle_of_its_request():
    subscribers, sent = Subscribers(), list[Delivery]()
    error = EngineUnavailable("gone")
    subscribers.send_error(subscribed(subscribers, sent.append, 7), error)
    assert sent == [Delivery((), (), errors=[(7, error)])]


def test_a_step_that_brings_a_token_each_travels_as_two_columns():
    subscribers, sent = Subscribers(), list[Delivery]()
    request = subscribed(subscribers, sent.append, 7)
    subscribers.send(plain((request, 5)), 0.0)
    assert FROM_ENGINE.plain(sent[0]) == [0, [7], [5]]
