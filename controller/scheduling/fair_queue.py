"""Whose turn it is among those who wait.

Tenants share the machine: the turn is the tenant's that was served least, counted in tokens (a virtual token counter as
in "Fairness in Serving Large Language Models", arXiv 2401.00588). A tenant that comes back after a pause does not bring
the time it slept: it starts level with the least served of those who are there, or where it was if that is more.

Within a tenant the order is by priority, and waiting counts: one level of priority is worth `ageing_s` seconds of
waiting. Since everybody ages alike, who is ahead of whom never changes, and one number orders them for good:

    due_s = arrival_s + priority * ageing_s             smaller comes first, as with priorities

So nobody starves, and a preempted request finds its old place again.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence

from ...kvcache.manager import RequestId
from ...proto.step import Advance
from ..request import Request

LOOK_AHEAD = 16
"""Requests among which the longest cached prefix is looked for."""

DECODE_WEIGHT = 2
"""What a generated token counts, against one of a prompt: it keeps a slot for a whole step."""

REMEMBERED_TENANTS = 4096
"""Tenants without requests whose count is kept."""


class Tenant:
    """What a tenant was served, and which of its requests wait."""

    def __init__(self, served: float):
        self.served = served  # tokens, as they count
        self.present = 0  # requests that wait or run
        self.heap: list[tuple[float, RequestId]] = []  # of those that wait, and of some that do not any more


class FairQueue:
    """Requests that wait, by tenant. Single-threaded."""

    def __init__(self, ageing_s: float):
        self._ageing_s = ageing_s
        self.waiting: dict[RequestId, Request] = {}  # to be read only, from outside
        self.tenants: dict[str, Tenant] = {}  # those with requests that wait or run; likewise
        self._absent: OrderedDict[str, float] = OrderedDict()  # what tenants without requests were served

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.waiting.values())

    # -- requests come and go ----------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """A new request is there; it does not wait yet."""
        tenant = self.tenants.get(request.terms.tenant)
        if tenant is None:
            least = min((other.served for other in self.tenants.values()), default=0.0)
            tenant = self.tenants[request.terms.tenant] = Tenant(
                max(least, self._absent.pop(request.terms.tenant, 0.0))
            )
        tenant.present += 1

    def leave(self, request: Request) -> None:
        """It has ended, however that was."""
        tenant = self.tenants[request.terms.tenant]
        tenant.present -= 1
        if not tenant.present:
            del self.tenants[request.terms.tenant]
            self._absent[request.terms.tenant] = tenant.served
            if len(self._absent) > REMEMBERED_TENANTS:
                self._absent.popitem(last=False)

    def add(self, request: Request) -> None:
        """It waits, for the first time or again."""
        self.waiting[request.id] = request
        heapq.heappush(self.tenants[request.terms.tenant].heap, (self.due_s(request), request.id))

    def remove(self, request: Request) -> None:
        """It waits no more."""
        del self.waiting[request.id]

    def due_s(self, request: Request) -> float:
        """The smaller, the earlier it is its turn, among those of its tenant."""
        return request.arrival_s + request.terms.priority * self._ageing_s

    def is_behind(self, one: Request, other: Request) -> bool:
        """Would `one` not be chosen before `other`, if both waited?"""
        return one.terms.tenant != other.terms.tenant or self.due_s(one) > self.due_s(other)

    # -- whose turn it is --------------------------------------------------------------------------------------------

    def head(self) -> Request | None:
        """Who is next; None if nobody waits."""
        tenant = self._next_tenant()
        return self.waiting[tenant.heap[0][1]] if tenant is not None else None

    def after(self, passed: Collection[Request]) -> Request | None:
        """Who is next when these can not be taken now; of the same tenant as the first of them."""
        tenant = self.tenants[next(iter(passed)).terms.tenant]
        return next((each for each in self._first(tenant, LOOK_AHEAD + len(passed)) if each not in passed), None)

    def next_few(self, count: int) -> list[Request]:
        """Some of those who wait, of the tenant whose turn it is."""
        tenant = self._next_tenant()
        return self._first(tenant, count) if tenant is not None else []

    def best_head(self, cached_tokens: Callable[[Request], int], now_s: float) -> Request | None:
        """Of the first few of the tenant whose turn it is, the one with the most in the cache; the first of them if it
        has waited for `ageing_s`, so that nobody is passed by for ever."""
        tenant = self._next_tenant()
        if tenant is None:
            return None
        first = self.waiting[tenant.heap[0][1]]
        if now_s - first.arrival_s >= self._ageing_s:
            return first
        return max(self._first(tenant, LOOK_AHEAD), key=cached_tokens)  # the earlier one among equals

    def count(self, decode: Sequence[Request], work: Sequence[tuple[Request, Advance]]) -> None:
        """Count what a step does for each tenant: decoded tokens, and those of prompts."""
        for request in decode:
            self.served(request.terms.tenant, DECODE_WEIGHT)
        for request, advance in work:
            self.served(request.terms.tenant, DECODE_WEIGHT if request.is_decoding else advance.tokens)

    def served(self, tenant: str, tokens: int) -> None:
        """Count so many tokens for a tenant."""
        self.tenants[tenant].served += tokens

    def _first(self, tenant: Tenant, count: int) -> list[Request]:
        """Up to so many of a tenant's requests that wait, in their order."""
        nearest = heapq.nsmallest(count, tenant.heap)
        return [self.waiting[number] for _, number in nearest if number in self.waiting]

    def _next_tenant(self) -> Tenant | None:
        if not self.waiting:
            return None
        chosen: Tenant | None = None
        for tenant in self.tenants.values():
            heap = tenant.heap
            while heap and heap[0][1] not in self.waiting:
                heapq.heappop(heap)
            if heap and (chosen is None or tenant.served < chosen.served):
                chosen = tenant
        return chosen
