"""The bound and the plan around the best that an exhaustive search finds."""

import os
import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from intarsia.deploy.replay.names import block_names
from intarsia.deploy.replay.optimum import World, optimum
from intarsia.deploy.replay.traces import TraceRequest
from intarsia.kvcache.plan import Arena, Group, MemoryPlan
from intarsia.kvcache.reach import Chunked, Full, Keeps, Reach, Sliding, State

BLOCK = 2  # tokens

KINDS: dict[str, tuple[Reach, ...]] = {
    "full": (Full(),),
    "window": (Sliding(4),),
    "full and window": (Full(), Sliding(3)),
    "full and state": (Full(), State()),
    "full and chunks": (Full(), Chunked(4)),
    "window and state": (Sliding(5), State()),
}

Item = tuple[int, bytes]
"""A block of a group by its name; or the state after that block."""


def plan_of(reaches: Sequence[Reach], sizes: Sequence[int], memory_bytes: int) -> MemoryPlan:
    groups = tuple(
        Group(reach, (n,), BLOCK, content_bytes=size, block_bytes=size)
        for n, (reach, size) in enumerate(zip(reaches, sizes, strict=True))
    )
    return MemoryPlan("packed", groups, (Arena(memory_bytes, 1),), (memory_bytes,))


def random_requests(rng: random.Random, count: int) -> list[TraceRequest]:
    """Paths through a small tree, each as ids that also fix what lies before."""
    paths: list[tuple[int, ...]] = [()]
    fresh = iter(range(1, 1000))
    requests = []
    for _ in range(count):
        path = rng.choice(paths)[: rng.randint(0, 3)]
        path = (*path, *(next(fresh) for _ in range(rng.randint(0 if path else 1, 3 - len(path)))))
        paths += [path[:n] for n in range(1, len(path) + 1)]
        requests.append(TraceRequest(len(path) * BLOCK + rng.randint(0, 1), list(path), BLOCK))
    return requests


class Search:
    """All that any policy could do, moment by moment: which hit to take, and which items to keep then."""

    def __init__(self, requests: Sequence[TraceRequest], plan: MemoryPlan):
        self.requests, self.plan = requests, plan
        self.world = World(plan)
        self.names = [block_names(request, BLOCK) for request in requests]
        self.items = [set(self.items_of(names, 0, len(names))) for names in self.names]

    def items_of(self, names: Sequence[bytes], found: int, end: int) -> Iterator[Item]:
        """What a request that went on after `found` blocks has seen up to `end`."""
        for g, group in enumerate(self.plan.groups):
            first = self.world.needed(group, found).start if found else 0
            yield from ((g, name) for name in names[first:end])

    def needed(self, names: Sequence[bytes], blocks: int) -> set[Item]:
        return {(g, names[n]) for g, group in enumerate(self.plan.groups) for n in self.world.needed(group, blocks)}

    def own(self, number: int) -> set[Item]:
        """The items that the request holds at its end anyway."""
        tokens, names = self.requests[number].length, self.names[number]
        held = set()
        for g, group in enumerate(self.plan.groups):
            if group.reach.keeps is Keeps.STATE:
                if tokens == len(names) * BLOCK:
                    held.add((g, names[-1]))
            else:
                held |= {(g, name) for name in names[group.reach.oldest_needed(tokens) // BLOCK :]}
        return held

    def best(self) -> int:
        """Tokens found."""
        after: dict[frozenset[Item], int] = {frozenset(): 0}
        for number, request in enumerate(self.requests):
            names, mine = self.names[number], self.items[number]
            wanted_later = set[Item]().union(*self.items[number + 1 :])
            room = self.plan.memory_bytes - self.world.own_bytes(request.length)
            following: dict[frozenset[Item], int] = {}
            for kept, value in after.items():
                for found in range((request.length - 1) // BLOCK + 1):
                    if found and not self.needed(names, found) <= kept:
                        continue
                    there = kept | set(self.items_of(names, found, len(names)))
                    total = value + found * BLOCK
                    for state in self.choices(there & wanted_later, mine, self.own(number), room):
                        following[state] = max(following.get(state, 0), total)
            after = following
        return max(after.values())

    def choices(self, there: frozenset[Item], mine: set[Item], own: set[Item], room: int) -> Iterator[frozenset[Item]]:
        """What could be kept: beside what the request holds itself it must fit."""
        free = there & own
        rest = sorted(there - own)
        for count in range(len(rest) + 1):
            for some in combinations(rest, count):
                if sum(self.plan.groups[g].content_bytes for g, _ in some) <= max(0, room):
                    yield frozenset(some) | free


def random_case(rng: random.Random) -> tuple[list[TraceRequest], MemoryPlan]:
    reaches = KINDS[rng.choice(list(KINDS))]
    requests = random_requests(rng, rng.randint(2, 6))
    sizes = [rng.randint(1, 3) for _ in reaches]
    most = max(World(plan_of(reaches, sizes, 1)).own_bytes(request.length) for request in requests)
    return requests, plan_of(reaches, sizes, most + rng.randint(0, 8))


def test_the_best_that_can_be_done_lies_between_the_plan_and_the_bound():
    """INTARSIA_CASES: how many; 5,000 take some minutes."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    cases = int(os.environ.get("INTARSIA_CASES", "200"))
    exact = best_sum = planned_sum = bound_sum = 0
    for number in range(cases):
        requests, plan = random_case(rng)
        best = Search(requests, plan).best()
        told = optimum(requests, plan)
        assert told.planned_tokens <= best <= told.bound_tokens, (seed, number, requests, plan, best, told)
        exact += told.planned_tokens == best
        best_sum, planned_sum, bound_sum = (
            best_sum + best,
            planned_sum + told.planned_tokens,
            bound_sum + told.bound_tokens,
        )
    print(f"seed {seed}: the plan is the best in {exact} of {cases}; {planned_sum} <= {best_sum} <= {bound_sum}")
    assert exact >= 0.9 * cases


@pytest.mark.parametrize("memory_bytes", [4, 6, 8, 100])
def test_a_cycle_through_one_more_than_fits_loses_one_or_two_and_not_all(memory_bytes: int):
    """Prompts of one block, used in turn: what the optimum keeps is as large as the memory beside the running one."""
    prompts = [TraceRequest(BLOCK + 1, [n], BLOCK) for n in range(5)]
    plan = plan_of((Full(),), (1,), memory_bytes)
    told = optimum(prompts * 10, plan)
    kept = min(5, memory_bytes - 2)  # a running prompt holds two blocks, of which one stays
    most = 45 if kept >= 4 else 9 * kept + 9
    assert 9 * (kept - 1) * BLOCK <= told.planned_tokens <= told.bound_tokens <= most * BLOCK


def test_requests_before_the_first_that_counts_find_nothing_and_cost_nothing():
    prompts = [TraceRequest(5, [1, 2], BLOCK), TraceRequest(5, [3, 4], BLOCK)] * 2
    plan = plan_of((Full(),), (1,), 5)
    assert optimum(prompts, plan, first_counted=3).planned_tokens == 4
    assert optimum(prompts, plan, first_counted=3).tokens == 5


def test_a_trace_without_anything_in_common_has_an_optimum_of_nothing():
    prompts = [TraceRequest(4, [2 * n, 2 * n + 1], BLOCK) for n in range(1, 5)]
    assert optimum(prompts, plan_of((Full(),), (1,), 100))[:2] == (0, 0)
