import random

import pytest

from intarsia.kvcache.reuse_times import ReuseTimes
from intarsia.kvcache.sorts import Kind, Sort, gap_bucket, new_bucket, turns_bucket, uses_bucket

CHAT, CYCLE = Sort(Kind.END, 1, 0, 3), Sort(Kind.END, 9, 1, 0)


def learnt(events: list[tuple[Sort, int, bool]]) -> ReuseTimes:
    times = ReuseTimes()
    for sort, age, used in events:
        times.seen(sort, age, used=used)
    times.learn([])
    return times


def test_before_anything_is_known_the_older_is_the_less_likely():
    times = ReuseTimes()
    chances = [times.chance(CHAT, age) for age in (0, 1, 5, 50, 500, 5000, 10**9)]
    assert chances == sorted(chances, reverse=True)


def test_uses_that_come_early_make_the_chance_fall_with_age():
    rng = random.Random(1)
    times = learnt([(CHAT, int(rng.expovariate(1 / 10)), True) for _ in range(2000)])
    assert times.chance(CHAT, 0) > 4 * times.chance(CHAT, 200)


def test_uses_that_come_late_make_it_rise_until_then():
    times = learnt([(CYCLE, 300, True) for _ in range(2000)])
    assert times.chance(CYCLE, 0) < times.chance(CYCLE, 100) < times.chance(CYCLE, 280)


def test_what_was_never_used_tells_as_much_as_what_was():
    used = [(CHAT, 20, True)] * 500
    assert learnt(used).chance(CHAT, 5) > 3 * learnt(used + [(CHAT, 4000, False)] * 2000).chance(CHAT, 5)


def test_points_that_wait_still_are_counted_as_long_as_they_waited():
    times = learnt([(CHAT, 20, True)] * 300)
    before = times.chance(CHAT, 5)
    times.learn([(CHAT, 1000)] * 100, each_stands_for=20)
    assert times.chance(CHAT, 5) < before / 2


def test_marks_of_a_sort_multiply_the_rate_and_rare_ones_lean_on_the_others():
    common, rare, good = CHAT, CHAT._replace(new=7), CHAT._replace(new=1)
    events = [(common, 200, n % 2 == 0) for n in range(2000)] + [(good, 200, True)] * 600 + [(rare, 200, False)] * 2
    times = learnt(events)
    assert times.chance(good, 50) > 1.1 * times.chance(common, 50)
    assert times.chance(rare, 50) == pytest.approx(times.chance(common, 50), rel=0.1)


def test_a_gap_of_which_little_is_known_leans_on_those_near_it():
    early, near, far, late = (CHAT._replace(gap=gap) for gap in (2, 4, 8, 10))
    times = learnt([(early, 3, True)] * 300 + [(late, 300, True)] * 300)
    assert times.chance(near, 3) > 10 * times.chance(far, 3) > 50 * times.chance(late, 3)


def test_a_few_points_outweigh_what_is_known_of_others():
    times = learnt([(CHAT, 3, True)] * 300 + [(CYCLE, 300, True)] * 40)
    assert times.chance(CHAT, 3) > 100 * times.chance(CYCLE, 3)
    assert times.chance(CYCLE, 280) > 3 * times.chance(CYCLE, 0)


def test_a_change_of_load_is_followed():
    times = learnt([(CHAT, 10, True)] * 6000)
    high = times.chance(CHAT, 0)
    for _ in range(30_000):
        times.seen(CHAT, 3000, used=False)
    times.learn([])
    assert times.chance(CHAT, 0) < high / 20


@pytest.mark.parametrize(
    ("bucket", "values", "expected"),
    [
        (gap_bucket, (0, 1, 2, 3, 4, 10**9), [0, 1, 2, 2, 3, 14]),
        (turns_bucket, (0, 3, 4, 7, 8, 10**6), [0, 3, 4, 4, 5, 5]),
        (uses_bucket, (1, 2, 3, 4, 10**6), [0, 1, 1, 2, 7]),
        (new_bucket, (-5, 0, 15, 16, 48, 10**9), [0, 0, 0, 1, 2, 14]),
    ],
)
def test_marks_are_told_in_doublings(bucket, values, expected):
    assert [bucket(value) for value in values] == expected
