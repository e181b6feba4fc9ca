"""Leases: a client asks with a request that the cache of its conversation be kept for some seconds after the answer.

    answer ends ──► granted in whole, or refused with numbers ──► held ──► the next turn has its answer: taken over
                                                                    ├────► its time is over: expired
                                                                    ├────► by hand: released
                                                                    └────► the cache is reset: lost

What is held are the blocks with which the next turn can go on at the end of the answer, and at the end of the prompt,
since many templates write an answer's thoughts and calls otherwise when they are history. What is prepared for the next
turn is held, too, if there is room. Leases together, and those of each tenant, stay within their shares of the pool,
counted in large pages. No request counts on the share of all leases (`MemoryPlan.fits`), so running requests can always
go on, and waiting ones come in while leases last.

The next turn needs no name for the lease: it is a request of the same tenant whose prompt begins with the whole prompt
of the leased turn and is longer, or as was prepared. It may name the lease, too, where its template rewrites even that.
From its arrival on the lease lasts until that request has ended: with an answer it is taken over, without one it goes
back to its own time.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import or_
from secrets import token_hex

from ...errors import InvalidRequest, OverQuota
from ...kvcache.ids import RequestId
from ...kvcache.leased_blocks import Holding, PageCount, Prefix
from ...kvcache.manager import CacheManager
from ...kvcache.prefix import Encoder, TokenChain, name_at
from ...proto.leases import (
    NO_ROOM,
    NOTHING,
    OVER_SHARE,
    TOO_LONG,
    TOO_MANY,
    Lease,
    LeaseCounts,
    LeasedLayers,
    LeaseReceipt,
)
from ...proto.request import RequestOptions
from ..request import Request
from .settings import LeaseSettings

MOST_LEASES = 10_000
"""At once, of all tenants: several may lie in one large page."""


@dataclass(slots=True, eq=False)
class _Lease:
    receipt: LeaseReceipt
    tenant: str
    salt: str
    holdings: list[Holding]  # of the leased turn, and of what was prepared for the next one
    beginnings: list[tuple[int, bytes | None]]  # of the next turn, one of these: tokens and their name
    until_s: float  # of the clock
    awaited_by: set[RequestId] = field(default_factory=set)

    @property
    def prefix(self) -> Prefix:
        """All that is held."""
        return functools.reduce(or_, (holding.prefix for holding in self.holdings))


class Leases:
    """The leases of one engine. Single-threaded.

    Invariant: the large pages in which leases hold blocks are within the share of all leases, and those of a tenant's
    within the tenant's. Each is counted once, however many leases lie in it.
    """

    def __init__(
        self,
        manager: CacheManager,
        settings: LeaseSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        """From now on these are the leases of the manager's blocks, as `leases_of` finds them.

        clock: seconds, by which leases end. wall_clock: in which that is told
        """
        self._manager = manager
        self._settings = settings or LeaseSettings()
        self._clock, self._wall_clock = clock, wall_clock
        arenas = manager.plan.arenas
        self._limits = [arena.leasable for arena in arenas]
        share = self._settings.share_per_tenant
        self._limits_each = [
            limit if share is None else min(limit, int(arena.usable * share))
            for arena, limit in zip(arenas, self._limits, strict=True)
        ]
        self._leases: dict[str, _Lease] = {}  # by id
        self._awaited: dict[RequestId, list[_Lease]] = {}  # by the requests that go on with them
        self._next_end_at_s = math.inf  # of the clock; none ends before
        self._pages = PageCount(len(arenas))
        self._pages_of: dict[str, PageCount] = {}  # by tenant
        self._resets = manager.leased.resets
        self._counts = LeaseCounts()
        manager.leased.keeper = self

    # -- asking ------------------------------------------------------------------------------------------------------

    def check(self, options: RequestOptions, total_tokens: int) -> None:
        """Raises `OverQuota` for a request that is worth nothing without its lease, if there is no room for that now.

        total_tokens: that its conversation has at most
        """
        if options.keep_s is None or not options.keep_required:
            return
        self.expire()
        wanted, left = self._manager.plan.blocks_alone(total_tokens), self._left(options.tenant)
        if options.keep_s > self._settings.longest_s:
            raise InvalidRequest(
                f"keep_s is {options.keep_s:g}, and a lease lasts {self._settings.longest_s:g} s at most (max_lease_s)",
                field="keep_s",
                limit=self._settings.longest_s,
            )
        if wanted > sum(left) or len(self._leases) >= MOST_LEASES:
            raise OverQuota(
                f"keep_required: a lease of {total_tokens} tokens takes about {wanted} large pages, and the tenant's "
                f"share has {sum(left)} of {sum(self._limits_each)} left; release a lease, wait until one ends, or ask "
                "for fewer tokens",
                field="keep_required",
                asked=wanted,
                limit=sum(left),
                retry_after_s=self._next_end_s(options.tenant),
            )

    def held(self, viewer: str | None = None) -> tuple[Lease, ...]:
        """Those of the salt of the tenant who asks; None: all."""
        self.expire()
        return tuple(
            Lease(lease.receipt, lease.tenant, bool(lease.awaited_by))
            for lease in self._leases.values()
            if viewer is None or lease.salt == viewer
        )

    @property
    def counts(self) -> LeaseCounts:
        self.expire()
        return self._counts._replace(
            held=len(self._leases), held_pages=sum(self._pages.used), limit_pages=sum(self._limits)
        )

    # -- a request comes and goes ------------------------------------------------------------------------------------

    def arrived(self, request: Request, chain: TokenChain) -> None:
        """A request waits. If it goes on with a leased conversation, the lease lasts until it has left."""
        self.expire()
        size = self._manager.plan.block_tokens
        awaited = [lease for lease in self._leases.values() if _goes_on(lease, request, chain, size)]
        if awaited:
            self._awaited[request.id] = awaited
        for lease in awaited:
            lease.awaited_by.add(request.id)

    def left(self, request: Request, chain: TokenChain, encoder: Encoder | None, *, has_ended: bool) -> float | None:
        """A request has given its blocks back, and nothing was taken since: they are all there. Its receipt is noted.

        has_ended: with an answer. Returns when to call `expire`, if a lease was granted; of the clock.
        """
        self._catch_up()
        options = request.options
        earlier = [lease for lease in self._awaited.pop(request.id, ()) if lease.receipt.id in self._leases]
        for lease in earlier:
            lease.awaited_by.discard(request.id)
            self._next_end_at_s = min(self._next_end_at_s, lease.until_s)
        until_s = None
        if has_ended:
            # What is taken over makes room for what is granted. If that is refused, the earlier lease still has worth.
            self._uncount(earlier)
            if options.keep_s is not None:
                until_s = self._grant(request, chain, encoder, options.keep_s)
            self._count(earlier)
            if options.keep_s is None or until_s is not None:
                for lease in earlier:
                    self._end(lease)
                self._tally(taken_over=len(earlier))
        self.expire()
        return until_s

    def prepared(self, request: Request, chain: TokenChain, length: int) -> None:
        """What the next turn of a leased conversation begins with is cached, before it was asked for: it is held, too,
        where the shares have room for it.

        request: with that as its prompt, and one token more. length: of it, in tokens
        """
        self.expire()
        manager, size = self._manager, self._manager.plan.block_tokens
        waiting = [lease for lease in self._leases.values() if not lease.awaited_by and len(lease.holdings) == 1]
        going_on = [lease for lease in waiting if _goes_on(lease, request, chain, size)]
        if not going_on:
            return
        prefix, name = manager.leased.find(chain, (length,)), name_at(chain, length, size)
        for lease in going_on:
            lease.beginnings.append((length, name))
            if not prefix.lengths or self._no_room(prefix, lease.tenant) is not None:
                continue
            self._uncount([lease])
            lease.holdings.append(manager.leased.hold(chain, prefix))
            self._count([lease])
            told, now = lease.receipt, self._receipt(lease.prefix, lease.tenant)
            lease.receipt = now._replace(id=told.id, until_s=told.until_s)

    def _grant(self, request: Request, chain: TokenChain, encoder: Encoder | None, keep_s: float) -> float | None:
        """Hold what the next turn needs, or note why not. Returns until when, of the clock."""
        size = self._manager.plan.block_tokens
        written = request.computed_tokens or len(request.tokens) - 1  # it was preempted with its last token under way
        lengths = (min(written, len(request.tokens)), (request.prompt_tokens - 1) // size * size)
        prefix = self._manager.leased.find(chain, lengths, encoder)
        tenant = request.options.tenant
        refused = self._why_not(prefix, tenant, keep_s)
        receipt = self._receipt(prefix, tenant)
        if refused is not None:
            left = sum(self._left(tenant)) if refused == NO_ROOM else receipt.left_pages
            request.lease = receipt._replace(refused=refused, left_pages=left)
            self._tally(refused=1)
            return None
        # Its prompt tells the next turn; a prompt of less than a block has no name.
        length = request.prompt_tokens
        if (name := name_at(chain, length, size)) is None:
            length = prefix.lengths[-1]
            name = name_at(chain, length, size)
        until_s = self._clock() + keep_s
        receipt = receipt._replace(id=f"lease-{token_hex(12)}", until_s=self._wall_clock() + keep_s)
        holding = self._manager.leased.hold(chain, prefix)
        lease = _Lease(receipt, tenant, request.options.salt, [holding], [(length, name)], until_s)
        self._leases[receipt.id] = lease
        self._next_end_at_s = min(self._next_end_at_s, until_s)
        self._count([lease])
        lease.receipt = request.lease = self._with_share(receipt, tenant)
        self._tally(granted=1)
        return until_s

    def _why_not(self, prefix: Prefix, tenant: str, keep_s: float) -> str | None:
        if not prefix.lengths:
            return NOTHING
        if keep_s > self._settings.longest_s:
            return TOO_LONG
        if len(self._leases) >= MOST_LEASES:
            return TOO_MANY
        return self._no_room(prefix, tenant)

    def _no_room(self, prefix: Prefix, tenant: str) -> str | None:
        """Which share has too little left for it; None: both have room."""
        if not _fits(self._pages, prefix, self._limits):
            return NO_ROOM
        return None if _fits(self._of(tenant), prefix, self._limits_each) else OVER_SHARE

    # -- leases end --------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """End those whose time is over, unless their next turn is here."""
        self._catch_up()
        now_s = self._clock()
        if now_s < self._next_end_at_s:
            return
        over = [lease for lease in self._leases.values() if lease.until_s <= now_s and not lease.awaited_by]
        for lease in over:
            self._end(lease)
        self._tally(expired=len(over))
        ends = (lease.until_s for lease in self._leases.values() if not lease.awaited_by)
        self._next_end_at_s = min(ends, default=math.inf)

    def release(self, lease_id: str, viewer: str | None = None) -> bool:
        """End one by hand. False if there is none of that id, or it is another tenant's than the viewer's."""
        self.expire()
        lease = self._leases.get(lease_id)
        if lease is None or (viewer is not None and lease.salt != viewer):
            return False
        self._end(lease)
        self._tally(released=1)
        return True

    def _end(self, lease: _Lease) -> None:
        self._uncount([lease])
        del self._leases[lease.receipt.id]
        for holding in lease.holdings:
            self._manager.leased.let_go(holding)

    def _catch_up(self) -> None:
        """With a reset of the cache, by which all are lost."""
        if self._resets != self._manager.leased.resets:
            self._resets = self._manager.leased.resets
            self._tally(lost=len(self._leases))
            self._leases.clear()
            self._awaited.clear()
            self._pages = PageCount(len(self._limits))
            self._pages_of.clear()

    # -- counting ----------------------------------------------------------------------------------------------------

    def _of(self, tenant: str) -> PageCount:
        return self._pages_of.get(tenant) or PageCount(len(self._limits))

    def _count(self, leases: Sequence[_Lease]) -> None:
        for lease in leases:
            pages = lease.prefix.pages
            self._pages.add(pages)
            self._pages_of.setdefault(lease.tenant, PageCount(len(self._limits))).add(pages)

    def _uncount(self, leases: Sequence[_Lease]) -> None:
        for lease in leases:
            pages = lease.prefix.pages
            self._pages.remove(pages)
            if pages:  # a layer may need nothing to go on: a window of one token, a chunk's border
                self._pages_of[lease.tenant].remove(pages)
                if self._pages_of[lease.tenant].is_empty:
                    del self._pages_of[lease.tenant]

    def _tally(self, **more: int) -> None:
        now = {name: getattr(self._counts, name) + count for name, count in more.items()}
        self._counts = self._counts._replace(**now)

    def _left(self, tenant: str) -> list[int]:
        """Large pages of each arena that a tenant could still lease."""
        return [
            max(0, min(limit - used, limit_each - used_each))
            for limit, used, limit_each, used_each in zip(
                self._limits, self._pages.used, self._limits_each, self._of(tenant).used, strict=True
            )
        ]

    def _next_end_s(self, tenant: str) -> float:
        """Seconds until a lease ends that would make room; a second if that is not known."""
        ends = [lease.until_s for lease in self._leases.values() if lease.tenant == tenant] or [
            lease.until_s for lease in self._leases.values()
        ]
        return max(1.0, min(ends) - self._clock()) if ends else 1.0

    # -- what is told ------------------------------------------------------------------------------------------------

    def _receipt(self, prefix: Prefix, tenant: str) -> LeaseReceipt:
        plan = self._manager.plan
        layers = tuple(
            LeasedLayers(group.reach.name, len(blocks), len(blocks) * group.block_bytes)
            for group, blocks in zip(plan.groups, prefix.blocks, strict=True)
            if blocks
        )
        receipt = LeaseReceipt(
            tokens=prefix.lengths[-1] if prefix.lengths else 0,
            pages=len(prefix.pages),
            bytes=sum(plan.arenas[arena].page_bytes for arena, _ in prefix.pages),
            layers=layers,
            limit_pages=sum(self._limits_each),
            pool_pages=plan.usable_blocks,
            longest_s=self._settings.longest_s,
        )
        return self._with_share(receipt, tenant)

    def _with_share(self, receipt: LeaseReceipt, tenant: str) -> LeaseReceipt:
        """Of the tenant's own share: what others lease is not told to it while there is room."""
        used = self._of(tenant).used
        left = [limit - count for limit, count in zip(self._limits_each, used, strict=True)]
        return receipt._replace(used_pages=sum(used), left_pages=sum(left))

    # -- the recount -------------------------------------------------------------------------------------------------

    def faults(self) -> Iterator[str]:
        """What contradicts the invariant, counted anew."""
        self._catch_up()
        tenants = {lease.tenant for lease in self._leases.values()}
        for tenant in (None, *tenants):
            pages = {
                page
                for lease in self._leases.values()
                if tenant is None or lease.tenant == tenant
                for page in lease.prefix.pages
            }
            counted = self._pages if tenant is None else self._of(tenant)
            limits = self._limits if tenant is None else self._limits_each
            there = [sum(page[0] == arena for page in pages) for arena in range(len(limits))]
            if there != counted.used:
                yield f"leases of {tenant or 'all'} count {counted.used} large pages, there are {there}"
            if any(used > limit for used, limit in zip(there, limits, strict=True)):
                yield f"leases of {tenant or 'all'} hold {there} large pages of {limits}"


def leases_of(manager: CacheManager) -> Leases | None:
    """The leases of a manager's blocks. None: they are off."""
    return manager.leased.keeper


def _fits(count: PageCount, prefix: Prefix, limits: Sequence[int]) -> bool:
    lacking = count.lacking(prefix.pages)
    return all(used + more <= limit for used, more, limit in zip(count.used, lacking, limits, strict=True))


def _goes_on(lease: _Lease, request: Request, chain: TokenChain, block_tokens: int) -> bool:
    """Is it the next turn of the leased one? Its prompt begins with the whole of that one's, or as was prepared; or it
    names the lease."""
    options = request.options
    if (lease.tenant, lease.salt) != (options.tenant, options.salt):
        return False
    chain.grow()
    return lease.receipt.id == options.lease or any(
        name is not None and request.prompt_tokens > tokens and name_at(chain, tokens, block_tokens) == name
        for tokens, name in lease.beginnings
    )
