"""A world around the cache manager that knows what every byte holds.

It does to the manager what an engine does, keeps for every slot of every block which tokens its content was computed
from, and checks each read that attention would make. Large pages change owner: what another group left there is gone,
and null blocks are scribbled over all the time. So a block given back too early, a wrong hit, a copy made too late or
two owners of the same bytes show up as a read of the wrong thing.
"""

import random
from collections.abc import Sequence
from typing import Any

from intarsia.errors import InvalidSetting, PoolExhausted
from intarsia.kvcache.check import recount
from intarsia.kvcache.eviction import policy_named
from intarsia.kvcache.group_table import Growth
from intarsia.kvcache.hints import Retain
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.leased_blocks import Holding
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import STRATEGIES, MemoryPlan, PlanSettings
from intarsia.kvcache.prefix import Encoder, TokenChain
from intarsia.kvcache.reach import Chunked, Cross, Full, Keeps, Reach, Sliding, State
from intarsia.kvcache.settings import CacheSettings
from intarsia.kvcache.spec import LayerSpec, StateTensor
from intarsia.kvcache.strategies import plan_memory
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.kvcache.points_check import check_ends, check_points

REACHES: tuple[Reach, ...] = (
    Full(), Sliding(1), Sliding(2), Sliding(5), Sliding(9), Chunked(4), Chunked(7), State(), Cross(),
)  # fmt: skip

Content = tuple[Any, ...]


def visible(reach: Reach, query: int, key: int) -> bool:
    """The attention mask, said without the reach's own answers."""
    window, chunk = reach.window_tokens, reach.chunk_tokens
    return (window is None or key > query - window) and (chunk is None or key // chunk == query // chunk)


class _Live:
    """A request, as the world sees it. One token more is known than computed, as after sampling."""

    def __init__(self, tokens: list[int], computed: int, image: int | None):
        self.tokens = tokens
        self.computed = computed
        self.image = image
        self.began = False
        self.redraft = False  # forked: a drafter makes its entry of the last token anew


class World:
    """A manager over a plan, the contents of its memory, and the requests in it."""

    def __init__(self, plan: MemoryPlan, policy: str, rng: random.Random):
        self.plan = plan
        self.now = 0.0
        self.manager = CacheManager(
            plan, CacheSettings(pinned_share=0.2), policy=policy_named(policy), clock=lambda: self.now
        )
        self.rng = rng
        self.live: dict[RequestId, _Live] = {}
        self.past: list[list[int]] = []  # sequences of requests that ended
        self.leases: list[tuple[Holding, TokenChain]] = []  # with the sequence that each is of
        self.operations = self.hit_tokens = self.refusals = 0
        self._ids = 0
        self._written: dict[tuple[int, int], dict[tuple[int, int], dict[int, Content]]] = {}  # [arena, large page]

    # -- operations ----------------------------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int], salt: bytes = b"", image: int | None = None) -> RequestId:
        """Open a request with the longest hit there is."""
        known = list(tokens)
        encoder = Encoder(b"image %d" % image, 3 + image) if image is not None else None
        hit = self.manager.lookup(known, salt, encoder)
        assert 0 <= hit.tokens < len(known), "at least one token is left to compute"
        assert sum(miss.tokens for miss in hit.misses) + hit.tokens == len(known), "misses and hit are not the prompt"
        assert all(miss.tokens > 0 for miss in hit.misses), "a cause of no tokens"
        self.hit_tokens += hit.tokens
        request = self._new_id()
        self.manager.open(request, hit, [self.rng.randint(1, len(known) + 1) for _ in range(self.rng.randint(0, 2))])
        self.live[request] = _Live(known, hit.tokens, image if encoder else None)
        return self._done(request)

    def extend(self, request: RequestId, count: int, *, commit: bool) -> bool:
        """Compute up to `count` more tokens. False when there was no room, and nothing was taken."""
        live = self.live[request]
        if live.computed == len(live.tokens):
            live.tokens.append(self.rng.randint(0, 1))
        length = min(len(live.tokens), live.computed + count)
        before = self.manager.table(request)
        try:
            growth = self.manager.extend(request, length, live.computed)
        except PoolExhausted:
            self._check_refusal(request, length, before)
            return self._done(False)
        self._copy(growth)
        self._scribble_null_blocks()
        if length == len(live.tokens):
            live.tokens.append(self.rng.randint(0, 1))  # sampled
        self._compute(request, live, length, growth)
        live.computed, live.began, live.redraft = length, True, False
        if commit:
            self.manager.commit(request)
        return self._done(True)

    def fork(self, request: RequestId) -> RequestId | None:
        live = self.live[request]
        tokens = [*live.tokens[: live.computed], *([self.rng.randint(0, 1)] if live.computed else live.tokens)]
        child = self._new_id()
        try:
            growth = self.manager.fork(request, child, tokens)
        except PoolExhausted:
            assert self.manager.num_open == len(self.live)
            return self._done(None)
        self._copy(growth)
        self.live[child] = _Live(tokens, live.computed, live.image)
        self.live[child].began, self.live[child].redraft = live.began, True
        return self._done(child)

    def release(self, request: RequestId, retain: Retain | None = None) -> None:
        live = self.live.pop(request)
        self.past = [*self.past[-7:], live.tokens]
        self.manager.release(request, live.computed, retain or Retain())
        self._done(None)

    def lease(self, request: RequestId) -> None:
        """Release a request, and hold what its next turn needs, if that is less than a third of the memory."""
        live, row = self.live[request], self.manager._rows[request]
        chain, encoder, mark = row.chain, row.encoder, len(live.tokens) // 2
        self.release(request)
        if not live.computed or not isinstance(chain, TokenChain):
            return
        prefix = self.manager.leased.find(chain, (live.computed, mark), encoder)
        held = {page for holding, _ in self.leases for page in holding.prefix.pages} | prefix.pages
        if prefix.lengths and len(held) <= self.plan.usable_blocks // 3:
            assert prefix.lengths[-1] <= live.computed, "more is leased than was computed"
            self.leases.append((self.manager.leased.hold(chain, prefix), chain.of(list(live.tokens))))
        self._done(None)

    def end_lease(self) -> None:
        if self.leases:
            self.manager.leased.let_go(self.leases.pop(self.rng.randrange(len(self.leases)))[0])
        self._done(None)

    def evict_others(self) -> None:
        """As a scheduler does for a request that is alone."""
        if not self.live:
            self.manager.leased.evict_others()
        self._done(None)

    def forget(self, request: RequestId, group: int) -> None:
        """Evict the name of some block a request holds, and no lease."""
        leased = {block for holding, _ in self.leases for block in holding.prefix.blocks[group]}
        held = [block for block in self.manager.table(request)[group] if block and block not in leased]
        if held:
            self.manager.forget(group, self.rng.choice(held))
        self._done(None)

    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.leases.clear()
        assert not any(group.index for group in self.manager.pool.groups)
        self._done(None)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._done(None)

    def end(self) -> None:
        """All requests leave; nothing may be left over."""
        for request in list(self.live):
            self.release(request)
        self.reset()
        assert recount(self.manager).all_free, "blocks are left over"

    # -- contents ------------------------------------------------------------------------------------------------------

    def _compute(self, request: RequestId, live: _Live, length: int, growth: Growth) -> None:
        """Write and read as the layers of every group would."""
        table = self.manager.table(request)
        for g, group in enumerate(self.plan.groups):
            row = table[g]
            match group.reach.keeps:
                case Keeps.STATE:
                    self._compute_state(g, row, live, length, growth)
                case Keeps.ENCODER:
                    self._compute_encoder(g, row, live)
                case Keeps.TOKENS:
                    self._compute_tokens(g, row, live, length)

    def _compute_tokens(self, g: int, row: Sequence[int], live: _Live, length: int) -> None:
        group = self.plan.groups[g]
        size, more = group.block_tokens, 1 + group.is_draft  # a drafter's entry is made with the next token, too
        anew = group.is_draft and live.redraft and live.computed > 0 and row[(live.computed - 1) // size] > 0
        for position in range(live.computed - anew, length):
            assert row[position // size], f"group {g}: token {position} would go to the null block"
            self._write(g, row[position // size], position % size, (live.image, *live.tokens[: position + more]))
        for position in range(live.computed, length):
            for key in range(position + 1):
                if not visible(group.reach, position, key):
                    continue
                found = self._read(g, row[key // size], key % size)
                wanted = (live.image, *live.tokens[: key + more])
                assert found == wanted, f"group {g}: position {position} reads a wrong token {key}: {found}"
        first = next((n for n, block in enumerate(row) if block), len(row))
        assert all(row[first:]), f"group {g}: a hole in the table {row}"

    def _compute_state(self, g: int, row: Sequence[int], live: _Live, length: int, growth: Growth) -> None:
        (block,) = row
        if live.computed:
            found = self._read(g, block, 0)
            assert found == (live.image, *live.tokens[: live.computed]), f"group {g}: a wrong state: {found}"
        self._write(g, block, 0, (live.image, *live.tokens[:length]))
        for save in growth.saves:
            if save.group == g:
                assert live.computed < save.length <= length
                self._write(g, save.block, 0, (live.image, *live.tokens[: save.length]))

    def _compute_encoder(self, g: int, row: Sequence[int], live: _Live) -> None:
        for n, block in enumerate(row):
            if not live.began and self._read(g, block, 0) != (live.image, n):
                assert self.manager.pool.groups[g].holders[block] == 1, "an encoder's block of others was overwritten"
                self._write(g, block, 0, (live.image, n))
            assert self._read(g, block, 0) == (live.image, n), f"group {g}: the wrong image"

    def _copy(self, growth: Growth) -> None:
        for copy in growth.copies:
            source = dict(self._large(copy.group, copy.source).get((copy.group, copy.source), {}))
            for slot, content in source.items():
                self._write(copy.group, copy.target, slot, content)

    def _write(self, g: int, block: int, slot: int, content: Content) -> None:
        large = self._large(g, block)
        if (g, block) not in large:
            low, high = self._span(g, block)
            for other in [key for key in large if key[0] != g]:
                if self._span(*other)[0] < high and low < self._span(*other)[1]:
                    del large[other]
        large.setdefault((g, block), {})[slot] = content

    def _read(self, g: int, block: int, slot: int) -> Content | None:
        return self._large(g, block).get((g, block), {}).get(slot)

    def _large(self, g: int, block: int) -> dict[tuple[int, int], dict[int, Content]]:
        group = self.plan.groups[g]
        return self._written.setdefault((group.arena, block // group.pages_per_large), {})

    def _span(self, g: int, block: int) -> tuple[int, int]:
        size = self.plan.groups[g].block_bytes
        return block * size, (block + 1) * size

    def _scribble_null_blocks(self) -> None:
        for g, group in enumerate(self.plan.groups):
            if group.reach.keeps is not Keeps.STATE:
                large = self._large(g, 0)
                for other in [key for key in large if self._span(*key)[0] < group.block_bytes]:
                    del large[other]

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_refusal(self, request: RequestId, length: int, before: list[list[Any]]) -> None:
        self.refusals += 1
        for old, new in zip(before, self.manager.table(request), strict=True):
            assert len(old) == len(new), "a refused step left blocks behind"
            assert all(b in (a, 0) for a, b in zip(old, new, strict=True)), "a refused step changed the table"
        room = self.manager.room_to_grow(request, length)
        assert room < length, "there was room after all"

    def _done(self, result: Any) -> Any:
        self.operations += 1
        recount(self.manager)
        check_points(self.manager)
        check_ends(self.manager)
        # A drafter's blocks are named by the token after them, too, which need not be the same.
        for holding, chain in () if any(group.is_draft for group in self.plan.groups) else self.leases[:3]:
            length = holding.prefix.lengths[-1]
            found = self.manager.lookup(chain.of([*chain.tokens[:length], 7])).tokens
            assert found >= length, f"{length} tokens are leased, and {found} are found"
        return result

    def _new_id(self) -> RequestId:
        self._ids += 1
        return RequestId(self._ids)


def random_world(rng: random.Random) -> World:
    """Any kinds, windows, block sizes, strategies and policies."""
    policy = rng.choice(["lru", "worth", "worth"])
    while True:
        reaches = rng.sample(REACHES, rng.randint(1, 4))
        if all(reach.keeps is Keeps.ENCODER for reach in reaches):
            continue
        size = rng.choice([1, 2, 3, 4])
        if rng.random() < 0.6:
            draft = [n for n, reach in enumerate(reaches) if reach.keeps is Keeps.TOKENS and rng.random() < 0.1]
            counts = [rng.choice([1, 1, 2, 3, 5]) for _ in reaches]
            plan = plan_of(*reaches, blocks=rng.randint(20, 60), block_tokens=size, per_large=counts, draft=draft)
            return World(plan, policy, rng)
        specs = [_random_layer(n, rng.choice(reaches), rng) for n in range(rng.randint(1, 6))]
        settings = PlanSettings(
            rng.randint(4_000, 30_000), size, rng.choice(STRATEGIES), rng.choice([None, 10, 40]), encoder_tokens=4
        )
        try:
            plan = plan_memory(specs, settings, 100)
        except InvalidSetting:
            continue
        if all(group.reach.keeps is not Keeps.TOKENS for group in plan.groups) or plan.num_blocks > 200:
            continue
        return World(plan, policy, rng)


def _random_layer(index: int, reach: Reach, rng: random.Random) -> LayerSpec:
    if reach.keeps is Keeps.STATE:
        return LayerSpec(index, reach, state=(StateTensor((rng.randint(1, 60),), 4),))
    return LayerSpec(index, reach, rng.choice([1, 2]), 8, rng.choice([4, 8]), 2)


def random_prompt(world: World) -> list[int]:
    """Over two letters, so that prompts begin alike; every other one goes on from somewhere in an earlier sequence."""
    rng = world.rng
    start = rng.choice(world.past)[: rng.randint(0, 30)] if world.past and rng.random() < 0.6 else []
    prompt = start + [rng.randint(0, 1) for _ in range(rng.randint(0 if start else 1, 12))]
    return prompt[:40]


def random_retain(rng: random.Random) -> Retain:
    return Retain(rng.choice([-1, 0, 0, 1]), rng.choice([None, None, 5.0]), rng.random() < 0.1)


def random_operation(world: World) -> None:
    """One of all operations, with the odds of a busy engine."""
    rng, live = world.rng, list(world.live)
    groups = len(world.plan.groups)
    odds = rng.random()
    if not live or (odds < 0.25 and len(live) < 5):
        world.add(random_prompt(world), rng.choice([b"", b"", b"tenant"]), rng.choice([None, None, 0, 1]))
    elif odds < 0.32:
        world.release(rng.choice(live), random_retain(rng))
    elif odds < 0.35:
        world.lease(rng.choice(live))
    elif odds < 0.41 and len(live) < 5:
        world.fork(rng.choice(live))
    elif odds < 0.45:
        world.forget(rng.choice(live), rng.randrange(groups))
    elif odds < 0.455:
        world.reset()
    elif odds < 0.465:
        world.wait(3.0)
    elif odds < 0.475:
        world.end_lease()
    elif odds < 0.48:
        world.evict_others()
    elif odds < 0.75:
        world.extend(rng.choice(live), rng.randint(1, 12), commit=rng.random() < 0.8)
    else:
        world.extend(rng.choice(live), 1, commit=rng.random() < 0.2)


def run_worlds(seeds: Sequence[int], operations: int) -> tuple[int, int, int]:
    """So many random operations per seed. Returns operations done, tokens found in the cache, refusals."""
    done = hits = refusals = 0
    for seed in seeds:
        world = random_world(random.Random(seed))
        try:
            for _ in range(operations):
                random_operation(world)
            world.end()
        except AssertionError as failure:
            raise AssertionError(f"seed {seed}: {failure}") from failure
        done, hits, refusals = done + world.operations, hits + world.hit_tokens, refusals + world.refusals
    return done, hits, refusals
