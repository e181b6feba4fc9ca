"""Cache events as vLLM's subscribers read them: decoded by types, over real sockets, with gaps and a replay."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

msgspec: Any = pytest.importorskip("msgspec")
zmq: Any = pytest.importorskip("zmq")

from intarsia.controller.cache_watchers import CacheWatchers  # noqa: E402
from intarsia.controller.kv_publisher import (  # noqa: E402
    END_OF_REPLAY,
    KvEvents,
    KvEventsSettings,
    KvPublisher,
    kv_events_settings,
)
from intarsia.errors import InvalidSetting  # noqa: E402
from intarsia.kvcache.ids import RequestId  # noqa: E402
from intarsia.kvcache.manager import CacheManager  # noqa: E402
from intarsia.kvcache.reach import Full, Sliding  # noqa: E402
from intarsia.tests.conftest import free_port  # noqa: E402
from intarsia.tests.controller.test_engine import make_engine  # noqa: E402
from intarsia.tests.kvcache.plans import plan_of  # noqa: E402

INFO = make_engine().info


class Told(msgspec.Struct, omit_defaults=True, tag=True):  # type: ignore
    """What is common to events on the wire: a map with its type."""


class BlockStored(Told, tag="BlockStored"):  # type: ignore
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Told, tag="BlockRemoved"):  # type: ignore
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Told, tag="AllBlocksCleared"):  # type: ignore
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):  # type: ignore
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(type=Batch)


class Listener:
    """A subscriber, and one who asks for what it missed."""

    def __init__(self, settings: KvEventsSettings):
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, settings.topic)
        self.sub.connect(settings.endpoint)
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.connect(settings.replay_endpoint)

    def next(self, within_s: float = 10.0) -> tuple[int, Batch]:
        assert self.sub.poll(within_s * 1000), "nothing was sent"
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"kv"
        return int.from_bytes(number, "big"), DECODER.decode(payload)

    def replay(self, first: int) -> list[tuple[int, Batch]]:
        self.asking.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.asking.poll(10_000), "the replay has no end"
            empty, topic, number, payload = self.asking.recv_multipart()
            if number == END_OF_REPLAY:
                assert (empty, topic, payload) == (b"", b"", b"")
                return found
            assert topic == b"kv"
            found.append((int.from_bytes(number, "big"), DECODER.decode(payload)))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def settings() -> KvEventsSettings:
    first, second = free_port(), free_port()
    return kv_events_settings(
        {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{first}",
            "replay_endpoint": f"tcp://127.0.0.1:{second}",
            "topic": "kv",
            "buffer_steps": 5,
        }
    )


@pytest.fixture
def listener(settings: KvEventsSettings) -> Iterator[Listener]:
    made = Listener(settings)
    yield made
    made.close()


def compute(manager: CacheManager, number: int, prompt: list[int], salt: bytes = b"") -> None:
    request = RequestId(number)
    manager.open(request, manager.lookup(prompt, salt))
    manager.extend(request, len(prompt))
    manager.commit(request)
    manager.release(request)


class Cache:
    """A manager whose events are sent."""

    def __init__(self, settings: KvEventsSettings, blocks: int = 32):
        self.manager = CacheManager(plan_of(Full(), Sliding(5), blocks=blocks))
        self.watchers = CacheWatchers(self.manager)
        self.events = KvEvents(settings, INFO, self.watchers)

    def compute(self, number: int, prompt: list[int], salt: bytes = b"") -> None:
        compute(self.manager, number, prompt, salt)
        self.watchers.send()


@pytest.fixture
def cache(settings: KvEventsSettings, listener: Listener) -> Iterator[Cache]:
    made = Cache(settings)
    beat = 0
    while not listener.sub.poll(50):  # a subscriber hears nothing until it is known to the publisher
        made.events._publisher.publish(msgspec.msgpack.encode([time.time(), [], 0]))
        beat += 1
        assert beat < 200
    while listener.sub.poll(100):
        listener.sub.recv_multipart()
    yield made
    if made.watchers.is_watched:
        made.events.close()


def test_stored_blocks_come_with_their_tokens_and_the_block_before_them_for_each_group(
    cache: Cache, listener: Listener
):
    prompt = list(range(1, 11))
    cache.compute(1, prompt)
    first, batch = listener.next()
    stored = [event for event in batch.events if isinstance(event, BlockStored)]
    assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 60
    full = next(event for event in stored if event.group_idx == 0)
    assert (full.kv_cache_spec_kind, full.block_size, full.token_ids) == ("full_attention", 4, prompt[:8])
    assert len(full.block_hashes) == 2 and full.parent_block_hash is None and full.extra_keys is None
    sliding = [event for event in stored if event.group_idx == 1]
    assert {(e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in sliding} == {("sliding_window", 5)}
    # The next request goes on from there.
    cache.compute(2, [*prompt[:8], 20, 21, 22, 23, 24])
    second, batch = listener.next()
    assert second == first + 1
    more = next(e for e in batch.events if isinstance(e, BlockStored) and e.group_idx == 0)
    assert more.parent_block_hash == full.block_hashes[-1] and more.token_ids == [20, 21, 22, 23]


def test_what_subscribers_know_is_what_the_cache_knows_while_blocks_come_and_go(
    settings: KvEventsSettings, cache: Cache, listener: Listener
):
    known: dict[int, dict[Any, list[int]]] = {0: {}, 1: {}}
    last = None
    for number in range(1, 60):  # many more than there are blocks
        cache.compute(number, [number % 50, *range(8)])
        while listener.sub.poll(20):
            at, batch = listener.next()
            assert last is None or at == last + 1
            last = at
            for event in batch.events:
                match event:
                    case BlockStored():
                        for place, name in enumerate(event.block_hashes):
                            tokens = event.token_ids[4 * place : 4 * place + 4]
                            assert name not in known[event.group_idx or 0]
                            known[event.group_idx or 0][name] = tokens
                    case BlockRemoved():
                        for name in event.block_hashes:
                            del known[event.group_idx or 0][name]
    notes = cache.manager.namer.notes
    assert notes is not None and last is not None
    for group in (0, 1):
        there = {name for name in cache.manager.pool.groups[group].index if notes.of(name) is not None}
        assert set(known[group]) == there and there
        assert all(len(tokens) == 4 for tokens in known[group].values())
    cache.manager.reset_prefix_cache()
    cache.watchers.send()
    _, batch = listener.next()
    gone = {n for e in batch.events if isinstance(e, BlockRemoved) and e.group_idx == 0 for n in e.block_hashes}
    assert gone == set(known[0]) or AllBlocksCleared() in batch.events


def test_blocks_of_a_tenant_are_told_apart_by_their_mark(cache: Cache, listener: Listener):
    cache.compute(1, list(range(9)), b"alice")
    event = next(e for e in listener.next()[1].events if isinstance(e, BlockStored) and e.group_idx == 0)
    mark = cache.manager.namer.mark(b"alice").hex()
    assert event.extra_keys == [(mark,), None]


def test_a_subscriber_that_missed_batches_is_sent_the_last_ones_again(
    settings: KvEventsSettings, cache: Cache, listener: Listener
):
    for number in range(1, 9):
        cache.compute(number, [number] * 5)
    heard = dict(listener.next() for _ in range(8))
    last = max(heard)
    again = listener.replay(last - 2)
    assert [number for number, _ in again] == [last - 2, last - 1, last]
    assert all(heard[number] == batch for number, batch in again)
    assert [number for number, _ in listener.replay(0)] == list(range(last - 4, last + 1))  # buffer_steps
    assert listener.replay(last + 1) == []


def test_a_strange_question_for_a_replay_is_passed_over(cache: Cache, listener: Listener):
    listener.asking.send_multipart((b"", b"five"))
    listener.asking.send_multipart((b"", b"x", b"y", b"z"))
    listener.asking.send_multipart((b"", b"x" * 10_000))  # larger than any question: ZeroMQ parts from who sends it
    time.sleep(0.1)
    cache.compute(1, [1] * 5)
    assert listener.next()[1].events


def test_batches_that_find_the_queue_full_are_dropped_and_seen_as_a_gap(settings: KvEventsSettings, listener: Listener):
    publisher = KvPublisher(settings)
    try:
        payload = msgspec.msgpack.encode([time.time(), [], 0])
        while not listener.sub.poll(50):
            publisher.publish(payload)
        while listener.sub.poll(100):
            listener.sub.recv_multipart()
        publisher._settings = KvEventsSettings(enable_kv_cache_events=True, max_queue_size=3)
        taken, publisher._taken = publisher._taken, lambda: None  # type: ignore[method-assign]
        before = publisher._next
        for _ in range(5):
            publisher.publish(payload)
        assert publisher.dropped == 2
        publisher._taken = taken  # type: ignore[method-assign]
        publisher._poke()
        assert [listener.next()[0] for _ in range(3)] == [before, before + 1, before + 2]
        publisher.publish(payload)
        assert listener.next()[0] == before + 5
    finally:
        publisher.close()


def test_nothing_is_collected_or_noted_once_it_is_closed(cache: Cache):
    cache.events.close()
    assert not cache.watchers.is_watched and cache.manager.namer.notes is None
    assert cache.manager.pool.known.log is None


def test_an_address_in_use_is_refused(settings: KvEventsSettings):
    publisher = KvPublisher(settings)
    try:
        with pytest.raises(InvalidSetting, match="nothing can listen at"):
            KvPublisher(settings)
    finally:
        publisher.close()
    KvPublisher(settings).close()  # and nothing of the refused one is left


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endpoint": "tcp://*:5557"}, "beyond loopback"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "beyond loopback"),
        ({"replay_endpoint": "tcp://192.168.1.2:5558"}, "beyond loopback"),
        ({"endpoint": "udp://127.0.0.1:5557"}, "must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1"}, "must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1:99999"}, "a port from 1"),
        ({"endpoint": 5}, "must be tcp://HOST:PORT"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "need an address each"),
        ({"hwm": 0}, "hwm must be a whole number"),
        ({"buffer_steps": True}, "buffer_steps must be a whole number"),
        ({"publisher": "kafka"}, "publisher must be"),
        ({"topic": "t" * 300}, "topic must be"),
        ({"end_point": "x"}, "end_point is no field"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(InvalidSetting, match="kv_events_config: ") as caught:
        kv_events_settings({"enable_kv_cache_events": True} | given)
    assert message in str(caught.value) and caught.value.field == "kv_events_config"


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("intarsia.controller.kv_publisher.find_spec", lambda name: None)
    with pytest.raises(InvalidSetting, match=r"intarsia\[kv-events\]"):
        kv_events_settings({"enable_kv_cache_events": True})
    assert not kv_events_settings({"enable_kv_cache_events": False}).is_on
    assert not kv_events_settings(json.loads('{"enable_kv_cache_events": true, "publisher": "null"}')).is_on
