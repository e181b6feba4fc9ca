"""What is kept, through the manager's verbs. Blocks of 4 tokens."""

import random
from collections.abc import Sequence

import pytest

from intarsia.kvcache.hints import Retain
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.prefix import Encoder
from intarsia.kvcache.reach import Chunked, Cross, Full, Reach, Sliding, State
from intarsia.kvcache.retention import NAME_BYTES, POINT_BYTES, REMEMBERED_SHARE, Retention
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.kvcache.points_check import check_points


class Cache:
    """Requests one after another."""

    def __init__(self, *reaches: Reach, blocks: int, **plan):
        self.manager = CacheManager(plan_of(*reaches, blocks=blocks, **plan))
        self._requests = self.asked = self.found = 0

    @property
    def retention(self) -> Retention:
        assert self.manager.retention is not None
        return self.manager.retention

    def serve(self, prompt: Sequence[int], retain: Retain | None = None, encoder: Encoder | None = None) -> int:
        """Tokens that were found."""
        self._requests += 1
        request = RequestId(self._requests)
        hit = self.manager.lookup(prompt, encoder=encoder)
        self.manager.open(request, hit)
        self.manager.extend(request, len(prompt), hit.tokens)
        self.manager.commit(request)
        self.manager.release(request, retain=retain or Retain())
        check_points(self.manager)
        self.asked, self.found = self.asked + len(prompt), self.found + hit.tokens
        return hit.tokens

    def knows(self, prompt: Sequence[int]) -> int:
        return self.manager.lookup(prompt).tokens


def unique(n: int, length: int = 41) -> list[int]:
    return [1000 * n + k for k in range(length)]


FAMILIES = [
    pytest.param((Full(),), 8, id="full"),
    pytest.param((Full(), Sliding(9)), 11, id="windows"),
    pytest.param((Full(), Chunked(8)), 11, id="chunks"),
    pytest.param((Full(), State()), 10, id="states"),
    pytest.param((Full(), Sliding(9), State()), 14, id="windows and states"),
]


@pytest.mark.parametrize(("reaches", "per_session"), FAMILIES)
@pytest.mark.parametrize("sessions", [12, 16, 24])
def test_of_a_cycle_longer_than_the_cache_most_of_what_fits_is_found(
    reaches: tuple[Reach, ...], per_session: int, sessions: int
):
    cache = Cache(*reaches, blocks=1 + 10 * (per_session + 4))  # ten sessions and more
    for _ in range(12):
        for n in range(sessions):
            cache.serve(unique(n))
    found = [cache.serve(unique(n)) > 0 for n in range(sessions)]
    assert sum(found) >= 7, found


def test_a_shared_beginning_outlives_the_conversations_that_share_it():
    cache = Cache(Full(), State(), blocks=80)
    system = list(range(20))
    for n in range(60):
        cache.serve(system + unique(n + 1, 21))
    assert cache.knows(system + [7] * 9) == 20


def test_prompts_that_never_come_again_do_not_push_out_those_that_do():
    rng = random.Random(5)
    cache = Cache(Full(), blocks=101)
    often = [unique(n, 33) for n in range(6)]
    fresh = 100
    for _ in range(300):
        cache.serve(rng.choice(often))
        for _ in range(4):
            fresh += 1
            cache.serve(unique(fresh, 90))
    assert sum(cache.knows(prompt) > 0 for prompt in often) >= 5


def test_a_point_is_given_up_in_all_groups_at_once():
    """A window without its full blocks, or the other way round, serves no request."""
    cache = Cache(Full(), Sliding(9), State(), blocks=90)
    for n in range(40):
        cache.serve(unique(n))
    found = [cache.knows(unique(n)) for n in range(40)]
    places = sum(length > 0 for length in found)
    assert set(found) <= {0, 40} and places >= 4
    # Two each: at the last border of the prompt, and at its end.
    assert len(cache.manager.pool.groups[2].index) <= 2 * places


def test_windows_that_another_point_needs_stay():
    cache = Cache(Full(), Sliding(17), blocks=200)
    prompt = unique(1, 81)
    for length in (41, 45, 81):
        cache.serve(prompt[:length])
    retention = cache.retention
    path = retention.tree.walk(cache.manager.chain(prompt).grow()).path
    place = next(point for point in path if point.end == 10)
    retention._give_up(place)
    assert cache.knows(prompt[:44]) in (40, 43), "the place at 44 needs the window that the one at 40 has"
    assert cache.knows(prompt) == 80


def test_priority_below_zero_goes_first_and_above_zero_last():
    cache = Cache(Full(), blocks=61)
    cache.serve(unique(1), Retain(priority=10**9))
    cache.serve(unique(2), Retain(priority=-(10**9)))
    for n in range(3, 5):
        cache.serve(unique(n))
    cache.serve(unique(5, 101))
    assert cache.knows(unique(1)) == 40 and cache.knows(unique(2)) < 8


def test_what_a_request_waits_for_goes_last():
    cache = Cache(Full(), blocks=61)
    for n in range(1, 6):
        cache.serve(unique(n))
    for n in range(1, 6):
        cache.manager.touch(cache.manager.lookup(unique(1)))
        cache.serve(unique(10 + n, 101))
    assert cache.knows(unique(1)) == 40


def test_an_image_is_kept_for_whatever_text_comes_with_it():
    cache = Cache(Full(), Cross(), blocks=60)
    image = Encoder(b"an image", 10)
    for n in range(30):
        cache.serve(unique(n, 21), encoder=image)
    assert cache.manager.lookup(unique(99, 21), encoder=image).encoder_tokens == 10
    assert any(point.encoder for point in cache.retention._candidates)


def test_what_is_remembered_is_bounded_in_bytes():
    cache = Cache(Full(), blocks=2001)
    cache.retention._most_bytes = 100 * POINT_BYTES
    for n in range(900):
        cache.serve(unique(n))
    tree = cache.retention.tree
    assert 0 < cache.retention.num_bytes <= 100 * POINT_BYTES
    assert len(tree.remembered) * POINT_BYTES + tree.remembered_names * NAME_BYTES == cache.retention.num_bytes
    assert 0 < REMEMBERED_SHARE <= 0.02


def test_a_reset_forgets_what_was_learnt():
    cache = Cache(Full(), State(), blocks=41)
    for n in range(20):
        cache.serve(unique(n))
    cache.manager.reset_prefix_cache()
    assert (len(cache.retention.tree), cache.retention.num_bytes, cache.retention.give_up()) == (0, 0, False)
    assert cache.serve(unique(3)) == 0
    assert cache.serve(unique(3)) == 40


def test_a_pool_of_a_single_request_finds_its_shared_beginning():
    """A snapshot at the end of each prompt is not worth that at the end of the beginning they share."""
    cache = Cache(Full(), State(), blocks=20)
    system = list(range(20))
    for n in range(1, 40):
        cache.serve(system + unique(n, 13))
    assert cache.knows(system + [7] * 9) == 20
