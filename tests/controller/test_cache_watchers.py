"""What watchers of the prefix cache are sent, and that nothing is collected without them."""

from intarsia.controller.cache_watchers import CacheWatchers
from intarsia.kvcache.events import Cleared, Event, Stored
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.reach import Full
from intarsia.tests.kvcache.plans import plan_of


def compute(manager: CacheManager, number: int, salt: bytes = b"") -> None:
    """A prompt of two blocks, which the cache knows from then on."""
    request = RequestId(number)
    manager.open(request, manager.lookup([number] * 8, salt))
    manager.extend(request, 8)
    manager.commit(request)
    manager.release(request)


def names(events: list[Event]) -> int:
    return sum(len(event.hashes) for event in events if isinstance(event, Stored))


def test_a_watcher_is_given_what_is_known_and_sent_what_changes_until_it_goes():
    manager = CacheManager(plan_of(Full(), blocks=32))
    watchers = CacheWatchers(manager)
    compute(manager, 1)
    sent: list[Event] = []
    watcher = sent.extend
    known = watchers.add(watcher)
    assert known[0] == Cleared() and names(known) == 2 and watchers.is_watched
    watchers.send()
    assert sent == []  # nothing has changed
    compute(manager, 2)
    watchers.send()
    assert names(sent) == 2
    watchers.remove(watcher)
    compute(manager, 3)
    watchers.send()
    assert names(sent) == 2


def test_what_was_not_sent_yet_is_known_to_a_new_watcher_and_sent_to_the_others():
    manager = CacheManager(plan_of(Full(), blocks=32))
    watchers = CacheWatchers(manager)
    first: list[Event] = []
    second: list[Event] = []
    watchers.add(first.extend)
    compute(manager, 1)
    assert names(watchers.add(second.extend)) == 2
    watchers.send()
    assert names(first) == 2 and second == []


def test_a_tenant_is_sent_its_own_blocks_only():
    manager = CacheManager(plan_of(Full(), blocks=32))
    watchers = CacheWatchers(manager)
    own: list[Event] = []
    compute(manager, 1, b"bob")
    assert names(watchers.add(own.extend, "alice")) == 0
    compute(manager, 2, b"bob")
    watchers.send()
    assert own == []
    compute(manager, 3, b"alice")
    watchers.send()
    assert names(own) == 2


def test_nothing_is_collected_once_the_last_watcher_has_gone():
    manager = CacheManager(plan_of(Full(), blocks=32))
    watchers = CacheWatchers(manager)
    sent: list[list[Event]] = []
    one, other = sent.append, sent.append
    watchers.add(one)
    watchers.add(other)
    watchers.remove(one)
    assert watchers.is_watched and manager.pool.known.log is not None
    watchers.remove(other)
    assert not watchers.is_watched and manager.pool.known.log is None
