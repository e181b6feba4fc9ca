"""Random use of the cache manager, every read checked against what must stand there (`world.py`).

Two drivers share the operations: a plain one for numbers, whose failures name a seed to run again, and hypothesis,
which shrinks a failure to the few operations that make it.
"""

import random

import pytest
from hypothesis import HealthCheck, settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from intarsia.kvcache.hints import Retain
from intarsia.tests.kvcache.world import World, random_world, run_worlds

OPERATIONS = 300

EXAMPLES, STEPS = 150, 60


@pytest.mark.parametrize("worlds", [150, pytest.param(700, marks=pytest.mark.slow)])
def test_random_use_reads_only_what_was_written_and_leaves_nothing_behind(worlds: int):
    first = random.randrange(1 << 30)
    print(f"seeds {first} to {first + worlds - 1}")
    operations, hit_tokens, refusals = run_worlds(range(first, first + worlds), OPERATIONS)
    print(f"{operations} operations, {hit_tokens} tokens found in the cache, {refusals} refusals")
    assert operations >= 285 * worlds
    assert hit_tokens > 15 * worlds, "too few hits to mean anything"
    assert refusals > 0.7 * worlds, "too few full pools to mean anything"


class CacheMachine(RuleBasedStateMachine):
    """The operations of a world, chosen by hypothesis."""

    world: World

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        self.world = random_world(random.Random(seed))

    def _request(self, pick: int):
        return list(self.world.live)[pick % len(self.world.live)]

    @precondition(lambda self: len(self.world.live) < 5)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        salt=st.sampled_from([b"", b"tenant"]),
        image=st.sampled_from([None, 0, 1]),
    )
    def add(self, prompt: list[int], salt: bytes, image: int | None) -> None:
        self.world.add(prompt, salt, image)

    @precondition(lambda self: self.world.live)
    @rule(pick=st.integers(0, 4), count=st.integers(1, 12), commit=st.booleans())
    def extend(self, pick: int, count: int, commit: bool) -> None:
        self.world.extend(self._request(pick), count, commit=commit)

    @precondition(lambda self: 0 < len(self.world.live) < 5)
    @rule(pick=st.integers(0, 4))
    def fork(self, pick: int) -> None:
        self.world.fork(self._request(pick))

    @precondition(lambda self: self.world.live)
    @rule(pick=st.integers(0, 4), priority=st.integers(-1, 1), ttl=st.sampled_from([None, 5.0]), pin=st.booleans())
    def release(self, pick: int, priority: int, ttl: float | None, pin: bool) -> None:
        self.world.release(self._request(pick), Retain(priority, ttl, pin))

    @precondition(lambda self: self.world.live)
    @rule(pick=st.integers(0, 4))
    def lease(self, pick: int) -> None:
        self.world.lease(self._request(pick))

    @rule()
    def end_lease(self) -> None:
        self.world.end_lease()

    @rule()
    def evict_others(self) -> None:
        self.world.evict_others()

    @precondition(lambda self: self.world.live)
    @rule(pick=st.integers(0, 4), group=st.integers(0, 8))
    def evict(self, pick: int, group: int) -> None:
        self.world.forget(self._request(pick), group % len(self.world.plan.groups))

    @rule()
    def wait(self) -> None:
        self.world.wait(3.0)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 0:
            self.world.reset()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            target(float(self.world.hit_tokens), label="tokens found")
            self.world.end()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
