"""The middle and the slow end of what lately took how long."""

from intarsia.controller.latencies import Latencies, Spread
from intarsia.controller.metrics import KEPT_S, KEPT_VALUES, Window
from intarsia.proto.codec import decode, pack


def test_nothing_of_late_has_no_spread():
    window = Window()
    assert window.spread(0.0) == Spread(None, None)
    window.add(1.0, 0.0)
    assert window.spread(KEPT_S + 1) == Spread(None, None)


def test_middle_and_slow_end_count_each_value_as_often_as_it_came():
    window = Window()
    for value in range(1, 21):
        window.add(float(value), 0.0)
    assert window.spread(1.0) == Spread(10.0, 19.0)
    window.add(0.5, 1.0, times=20)
    assert window.spread(1.0) == Spread(0.5, 18.0)


def test_no_more_values_are_kept_than_are_sorted_at_a_look():
    window = Window()
    for value in range(3 * KEPT_VALUES):
        window.add(float(value), 0.0)
    assert window.spread(0.0).p50_s == 2.5 * KEPT_VALUES - 1


def test_travelling_changes_nothing():
    latencies = Latencies(Spread(1.0, 2.0), Spread(), Spread(0.0, 0.5))
    assert decode(pack(latencies), Latencies) == latencies
