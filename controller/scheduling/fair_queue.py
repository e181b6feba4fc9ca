"""Which waiting request is next.

Tenants share the machine. It is the turn of the tenant that was served least, in tokens (a virtual token counter as in
"Fairness in Serving Large Language Models", arXiv 2401.00588). A tenant that comes back after a pause gets no
credit for it: it starts level with the least served tenant that is there, or with its own old count if that is more.

Within a tenant the order is by priority, and waiting counts: one level of priority is worth `ageing_s` seconds of
waiting. All requests age alike, so their order never changes, and one number gives it for good:

    due_s = arrival_s + priority * ageing_s             smaller comes first, as with priorities

So no request starves, and a preempted one finds its old place again.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence

from ...kvcache.ids import RequestId
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
        self.heap: list[tuple[float, RequestId]] = []  # (due_s, request), and some left of requests that wait no more


class FairQueue:
    """Requests that wait, by tenant. Others read `waiting` and `tenants`; they are changed here only.

    Invariant: a tenant is in `tenants` for as long as it has a request that waits or runs. Each waiting request has an
    entry in its tenant's heap.
    """

    def __init__(self, ageing_s: float):
        self._ageing_s = ageing_s
        self.waiting: dict[RequestId, Request] = {}
        self.tenants: dict[str, Tenant] = {}
        self._absent: OrderedDict[str, float] = OrderedDict()  # what tenants without requests were served

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.waiting.values())

    # -- requests come and go ----------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """A new request has come; it does not wait yet."""
        tenant = self.tenants.get(request.options.tenant)
        if tenant is None:
            least = min((other.served for other in self.tenants.values()), default=0.0)
            tenant = self.tenants[request.options.tenant] = Tenant(
                max(least, self._absent.pop(request.options.tenant, 0.0))
            )
        tenant.present += 1

    def leave(self, request: Request) -> None:
        """A request has ended, for whatever reason."""
        assert request.id not in self.waiting, f"request {request.id} has ended and still waits"
        tenant = self.tenants[request.options.tenant]
        tenant.present -= 1
        if not tenant.present:
            del self.tenants[request.options.tenant]
            self._absent[request.options.tenant] = tenant.served
            if len(self._absent) > REMEMBERED_TENANTS:
                self._absent.popitem(last=False)

    def add(self, request: Request) -> None:
        """A request waits, for the first time or again."""
        assert request.id not in self.waiting, f"request {request.id} waits already"
        self.waiting[request.id] = request
        heapq.heappush(self.tenants[request.options.tenant].heap, (self.due_s(request), request.id))

    def remove(self, request: Request) -> None:
        """A request waits no more."""
        del self.waiting[request.id]

    def due_s(self, request: Request) -> float:
        """The smaller, the earlier it is the request's turn among those of its tenant."""
        return request.arrival_s + request.options.priority * self._ageing_s

    def is_behind(self, one: Request, other: Request) -> bool:
        """Does `one` come after `other`, if both wait? Of two tenants the turn decides, not the requests: then yes."""
        return one.options.tenant != other.options.tenant or self.due_s(one) > self.due_s(other)

    # -- whose turn it is --------------------------------------------------------------------------------------------

    def head(self) -> Request | None:
        """The next request; None if none waits."""
        tenant = self._next_tenant()
        return self.waiting[tenant.heap[0][1]] if tenant is not None else None

    def after(self, passed: Collection[Request]) -> Request | None:
        """The next request when these are passed over; of the same tenant as the first of them."""
        tenant = self.tenants[next(iter(passed)).options.tenant]
        return next((each for each in self._first(tenant, LOOK_AHEAD + len(passed)) if each not in passed), None)

    def next_few(self, count: int) -> list[Request]:
        """The next requests of the tenant whose turn it is."""
        tenant = self._next_tenant()
        return self._first(tenant, count) if tenant is not None else []

    def best_head(self, cached_tokens: Callable[[Request], int], now_s: float) -> Request | None:
        """Of the first few of the tenant whose turn it is, the one with the longest cached prefix. The first of them if
        it has waited for `ageing_s`, so that none is passed over for ever."""
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
            self.served(request.options.tenant, DECODE_WEIGHT)
        for request, advance in work:
            if request.is_prepared:
                continue  # it is not to its tenant's cost
            self.served(request.options.tenant, DECODE_WEIGHT if request.is_decoding else advance.tokens)

    def served(self, tenant: str, tokens: int) -> None:
        """Count so many tokens for a tenant."""
        self.tenants[tenant].served += tokens

    def _first(self, tenant: Tenant, count: int) -> list[Request]:
        """Up to `count` of a tenant's waiting requests, in their order."""
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
