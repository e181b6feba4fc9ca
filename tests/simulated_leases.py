"""Leases in the simulation: conversations that pause and go on, and what their clients were promised.

What must hold: leases stay within the shares of all and of each tenant, counted anew; each wish is answered, with
numbers; a turn that comes while its conversation is leased finds all that the receipt names, however long it waits for
its turn; a lease ends at its time at the latest, or when that turn has ended.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from intarsia.controller.leases.leases import Leases
from intarsia.controller.leases.settings import LeaseSettings
from intarsia.controller.request import Request
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import MemoryPlan
from intarsia.proto.leases import REFUSALS, LeaseReceipt
from intarsia.proto.request import RequestOptions


def with_leasable(plan: MemoryPlan, pages: int) -> MemoryPlan:
    """A plan of one arena with so many large pages more, which leases may hold."""
    (arena,) = plan.arenas
    return replace(plan, arenas=(arena._replace(num_pages=arena.num_pages + pages, leasable=pages),))


class LeasedConversations:
    """Asks for leases, lets conversations go on, and checks what becomes of them. `check` raises when told False."""

    def __init__(
        self, seed: int, manager: CacheManager, clock: Callable[[], float], check: Callable[[bool, str], None]
    ):
        self._rng = rng = random.Random(f"leases {seed}")
        self._clock, self._check = clock, check
        self._longest_s = rng.choice([5.0, 1e6, 1e6])
        settings = LeaseSettings(rng.choice([None, None, None, 0.3]), self._longest_s)
        self.leases = Leases(manager, settings, clock, clock)
        self._said: dict[int, list[int]] = {}  # tokens of ended requests, by id
        self._options: dict[int, RequestOptions] = {}
        self._receipts: dict[int, LeaseReceipt] = {}  # by the request that got it
        self._promises: list[tuple[Request, LeaseReceipt, int]] = []  # tokens, to requests that have not begun
        self._prepared: dict[str, list[int]] = {}  # by lease: what it holds for the next turn, too
        self.granted = self.refused = self.kept = self.prepared_held = 0

    # -- what clients do ---------------------------------------------------------------------------------------------

    def options(self, options: RequestOptions) -> RequestOptions:
        """Of a request, which may ask for a lease."""
        rng = self._rng
        if rng.random() < 0.3:
            return options
        return replace(options, timeout_s=None, keep_s=rng.choice([0.05, 5.0, 60.0, 60.0, 1e5]))

    def next_turn(self, longest: int) -> tuple[list[int], RequestOptions] | None:
        """A prompt that goes on with a conversation that has ended, of the same tenant. None: there is none."""
        rng = self._rng
        prepared = [lease for lease in self.leases.held() if lease.receipt.id in self._prepared]
        if prepared and rng.random() < 0.5:
            lease = rng.choice(prepared)
            begins = self._prepared[lease.receipt.id]
            return [*begins, *(rng.randint(0, 1) for _ in range(3))][:longest], RequestOptions(tenant=lease.tenant)
        turns = [request for request, tokens in self._said.items() if len(tokens) + 1 < longest]
        if not turns or rng.random() < 0.25:
            return None
        leased = [request for request in turns if request in self._receipts]
        request = rng.choice(leased if leased and rng.random() < 0.7 else turns)
        more = [rng.randint(0, 1) for _ in range(rng.randint(1, 4))]
        before = self._options[request]
        receipt = self._receipts.get(request)
        named = receipt.id if receipt is not None and rng.random() < 0.2 else ""
        options = RequestOptions(priority=rng.choice([0, 0, 2, -3]), tenant=before.tenant, lease=named)
        return [*self._said[request], *more][:longest], options

    def submitted(self, request: Request, forks: Sequence[Request]) -> None:
        """They wait now. What was promised to the first of them is what is leased of its beginning."""
        self._options |= dict.fromkeys([request.id, *(fork.id for fork in forks)], request.options)
        held = {lease.receipt.id for lease in self.leases.held()}
        for other, receipt in self._receipts.items():
            said = self._said.get(other, [])[: receipt.tokens]
            begins_so = request.tokens[: len(said)] == said and len(request.tokens) > len(said) > 0
            if receipt.id in held and begins_so and self._options[other].tenant == request.options.tenant:
                self._promises.append((request, receipt, receipt.tokens))
        for lease in self.leases.held():
            begins = self._prepared.get(lease.receipt.id)
            begins_so = begins is not None and request.tokens[: len(begins)] == begins != request.tokens
            if begins is not None and begins_so and lease.tenant == request.options.tenant:
                self._promises.append((request, lease.receipt, len(begins)))

    def held_of(self, rng: random.Random) -> tuple[RequestId, str] | None:
        """A request that has ended, whose conversation is leased, and the lease."""
        held = {lease.receipt.id for lease in self.leases.held()}
        found = [(RequestId(number), receipt.id) for number, receipt in self._receipts.items() if receipt.id in held]
        return rng.choice(found) if found and rng.random() < 0.8 else None

    def told(self, tokens: Sequence[int]) -> None:
        """A prompt is prepared, or never will be: a lease that holds its beginning does so from now on."""
        for lease in self.leases._leases.values():
            if lease.receipt.id not in self._prepared:
                for holding in lease.holdings[1:]:
                    self._prepared[lease.receipt.id] = list(tokens[: holding.prefix.lengths[-1]])
                    self.prepared_held += 1

    def release_one(self) -> None:
        held = self.leases.held()
        if held and self._rng.random() < 0.05:
            lease = self._rng.choice(held)
            self._check(self.leases.release(lease.receipt.id), "a lease that is held cannot be released")
            self._check(not self.leases.release(lease.receipt.id), "a lease was released twice")

    # -- what must hold ----------------------------------------------------------------------------------------------

    def before_plan(self) -> list[tuple[Request, LeaseReceipt, int]]:
        """Promises that still stand, to requests that wait."""
        held = {lease.receipt.id for lease in self.leases.held()}
        self._promises = [
            (request, receipt, tokens)
            for request, receipt, tokens in self._promises
            if receipt.id in held and request.is_live and not request.admitted_s and request.seniority is None
        ]
        return self._promises

    def after_plan(self, promises: list[tuple[Request, LeaseReceipt, int]]) -> None:
        for request, _, tokens in promises:
            if request.seniority is not None and request.parent is None:
                self.kept += 1
                self._check(
                    request.cached_tokens >= tokens,
                    f"request {request.id} finds {request.cached_tokens} tokens; {tokens} are leased",
                )
        self.check_counts()

    def check_counts(self) -> None:
        faults = list(self.leases.faults())
        self._check(not faults, "; ".join(faults))
        for lease in self.leases.held():
            over = lease.receipt.until_s <= self._clock() and not lease.is_awaited
            self._check(not over, f"{lease.receipt.id} is over and still held")

    def ended(self, request: Request) -> None:
        """It has its last token."""
        self._said[request.id] = list(request.tokens)
        receipt = request.lease
        self._check((receipt is None) == (request.options.keep_s is None), "a wish without an answer, or the reverse")
        if receipt is None or request.options.keep_s is None:
            return
        self._check(bool(receipt.id) != bool(receipt.refused), "a lease is granted and refused, or neither")
        self._check(receipt.used_pages <= receipt.limit_pages, "a tenant's leases pass its share")
        if receipt.id:
            self.granted += 1
            self._receipts[request.id] = receipt
            self._check(request.options.keep_s <= self._longest_s, "a lease lasts too long")
            self._check(receipt.tokens > 0, "a lease of no tokens")
        else:
            self.refused += 1
            self._check(receipt.refused in REFUSALS and receipt.until_s == 0, f"refused for {receipt.refused!r}")

    def lost(self) -> None:
        self._check(not self.leases.held(), "a lease has outlived what it held")
        self._receipts.clear()
        self._prepared.clear()

    def end(self) -> None:
        """All requests have left, and all times are over."""
        self.leases.expire()
        self._check(not self.leases.held(), "a lease is held at the end")
        counts = self.leases.counts
        ends = counts.taken_over + counts.expired + counts.released + counts.lost
        self._check(counts.granted == ends, f"leases came and did not go: {counts}")
        self._check((counts.granted, counts.refused) == (self.granted, self.refused), f"not all were told: {counts}")
