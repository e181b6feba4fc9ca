"""The overload guard: a request that could not be served in time is refused at once, before anything is done for it.

A new request waits for two things: that the prompts before its own are computed and, when more requests are here than
can run, that others end. How long either takes follows from how fast requests have begun and ended lately while others
waited. Before enough of them have ended it follows from how long the running ones stay. Tenants take turns, so a
request waits behind those of its own tenant only: a tenant that floods the engine is refused, and the others are
served.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...errors import InvalidSetting, Overloaded, OverQuota
from ...kvcache.ids import RequestId
from ..request import Request

LATEST = 64
"""Requests that began (or ended) by which their rate is measured."""

FEWEST = 8
"""With fewer the rate is not known."""

LONGEST_RETRY_S = 60.0

LONGEST_FULL_S = 0.25
"""For so long at most a front end refuses by itself what would be refused here: a request that waits may leave."""

LOOK_AGAIN_S = 1.0
"""From one look at the machine's free memory to the next."""

PRESSED_S = 1.0
"""For so long after a refusal we take it that more requests come than can be served."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """What may wait. None: no request is refused for it."""

    max_wait_s: float | None = None  # until a request's turn, as it is expected
    max_waiting_tokens: int = 2**25  # of all requests that wait
    max_waiting_bytes: int = 2**30  # of their images
    max_requests_per_tenant: int | None = None  # waiting and running ones
    min_free_bytes: int = 256 * MIB  # of the host's memory, at the least

    def __post_init__(self):
        if self.max_wait_s is not None and not self.max_wait_s > 0:
            raise InvalidSetting(f"max_wait_s must be more than 0 seconds, got {self.max_wait_s}", field="max_wait_s")
        for field in ("max_waiting_tokens", "max_waiting_bytes", "max_requests_per_tenant"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidSetting(f"{field} must be at least 1, got {value}", field=field)
        if self.min_free_bytes < 0:
            raise InvalidSetting(
                f"min_free_memory must be at least 0 bytes, got {self.min_free_bytes}", field="min_free_memory"
            )


def free_host_bytes() -> int:
    """Memory that this process could still have: of the machine, or of its control group if that has less."""
    words = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(words["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except OSError:
        pass  # no control groups, or of the first kind
    return free


class Seats(Protocol):
    """Where requests run: the scheduler."""

    @property
    def is_full(self) -> bool:
        """Whether the latest step had no room for a request that waits."""
        ...

    @property
    def num_seats(self) -> int:
        """How many requests can run at once."""
        ...


class _Cadence:
    """How fast events follow one another, measured by the latest ones."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=LATEST)

    def beat(self, now_s: float) -> None:
        self._times_s.append(now_s)

    def clear(self) -> None:
        self._times_s.clear()

    def every_s(self, now_s: float) -> float | None:
        """From one event to the next, the present pause among them; None if there were too few."""
        if len(self._times_s) < FEWEST:
            return None
        return (now_s - self._times_s[0]) / (len(self._times_s) - 1)


class OverloadGuard:
    """Knows which requests wait for their first token. Single-threaded."""

    def __init__(
        self,
        settings: OverloadSettings,
        seats: Seats,
        clock: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[], int] = free_host_bytes,
    ):
        self._settings = settings
        self._seats = seats
        self._clock = clock
        self._free_bytes = free_bytes
        self._looked_s = self._refused_s = float("-inf")
        self._free = 0
        self._waiting: dict[RequestId, Request] = {}
        self._by_tenant: dict[str, int] = {}  # requests that wait
        self._present: dict[str, int] = {}  # requests that wait or run, by tenant
        self._tokens = self._bytes = 0  # of the requests that wait
        self._began_s: dict[RequestId, float] = {}  # of the requests that run
        self._sum_began_s = 0.0
        self._begins, self._ends = _Cadence(), _Cadence()  # while others waited for room
        self._stays_s: deque[float] = deque(maxlen=LATEST)  # how long those that ended latest had run

    def check(self, tenant: str, tokens: int, image_bytes: int, answers: int, timeout_s: float | None) -> None:
        """Raises `Overloaded`, saying when to try again, if such a request should not be taken now. Its detail
        `full_for_s`: for how long every other request of the tenant would be refused, too."""
        try:
            self._check(tenant, tokens, image_bytes, answers, timeout_s)
        except Overloaded:
            self._refused_s = self._clock()
            raise

    @property
    def is_pressed(self) -> bool:
        """Whether more requests come than can be served: one was refused lately, or more wait than can run."""
        if self._clock() - self._refused_s < PRESSED_S:
            return True
        return self._seats.is_full and len(self._waiting) > self._seats.num_seats

    def _check(self, tenant: str, tokens: int, image_bytes: int, answers: int, timeout_s: float | None) -> None:
        settings = self._settings
        # A tenant may have so many requests here at once.
        most = settings.max_requests_per_tenant
        if most is not None and (here := self._present.get(tenant, 0)) + answers > most:
            raise OverQuota(
                f"{here} requests of {tenant or 'this tenant'} are here, and max_requests_per_tenant is {most}; wait "
                "until one has its answer",
                field="tenant",
                asked=here + answers,
                limit=most,
            )
        # What waits takes memory. A request that is alone is let in, however large it is.
        for what, there, more, limit in (
            ("tokens", self._tokens, tokens * answers, settings.max_waiting_tokens),
            ("bytes of images", self._bytes, image_bytes, settings.max_waiting_bytes),
        ):
            if more and there + more > limit and self._waiting:
                raise Overloaded(
                    f"{there} {what} wait for their turn, {more} more would exceed the {limit} that may",
                    asked=there + more,
                    limit=limit,
                    retry_after_s=self._retry_after_s(),
                )
        # Its turn must come before the answer is worth nothing.
        wait_s = self.wait_s(tenant)
        for name, limit_s in (("max_wait_s", settings.max_wait_s), ("timeout_s", timeout_s)):
            if limit_s is not None and wait_s > limit_s and settings.max_wait_s is not None:
                too_long_s = wait_s - limit_s
                raise Overloaded(
                    f"its turn would come in about {wait_s:.1f} s, and {name} is {limit_s:g}; try again later",
                    limit=limit_s,
                    retry_after_s=self._retry_after_s(too_long_s),
                    full_for_s=round(min(too_long_s, LONGEST_FULL_S), 4) if name == "max_wait_s" else 0.0,
                )
        # The host's memory must last for those who are here.
        if settings.min_free_bytes and self._free_now() < settings.min_free_bytes:
            raise Overloaded(
                f"the host has {self._free // MIB} MiB of memory left, and {settings.min_free_bytes // MIB} are kept "
                "free (min_free_memory); try again later",
                asked=self._free,
                limit=settings.min_free_bytes,
                retry_after_s=self._retry_after_s(),
            )

    def wait_s(self, tenant: str) -> float:
        """Until the turn of a request that comes now, as far as that is known."""
        if not self._waiting or not self._seats.is_full:
            return 0.0
        now_s, seats = self._clock(), self._seats.num_seats
        tenants = len(self._by_tenant) + (tenant not in self._by_tenant)
        begin = min(len(self._waiting) + 1, (self._by_tenant.get(tenant, 0) + 1) * tenants)
        end = min(begin, max(0, len(self._waiting) + len(self._began_s) + 1 - seats))
        return max(begin * (self._begins.every_s(now_s) or 0.0), end * self._end_every_s(now_s, seats))

    def _end_every_s(self, now_s: float, seats: int) -> float:
        """From one end to the next, while all seats are taken; 0 if nothing is known of it."""
        every_s = self._ends.every_s(now_s)
        if every_s is not None:
            return every_s
        # A request stays as long as those before it did, and not less than these have stayed already. By Little's law
        # one of the seats becomes free after that time divided by their number.
        stay_s = sum(self._stays_s) / len(self._stays_s) if self._stays_s else 0.0
        if self._began_s:
            stay_s = max(stay_s, now_s - self._sum_began_s / len(self._began_s))
        return stay_s / seats

    def entered(self, requests: Iterable[Request], *, is_known: bool = False) -> None:
        """They wait from now on. is_known: another engine had taken them before it was lost; they count as running."""
        for request in requests:
            tenant = request.options.tenant
            self._present[tenant] = self._present.get(tenant, 0) + 1
            if is_known:
                self._begin(request)
                continue
            self._waiting[request.id] = request
            self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + 1
            self._tokens += request.prompt_tokens
            self._bytes += _image_bytes(request)

    def began(self, request: Request) -> None:
        """Its first token has come."""
        if self._stop_waiting(request):
            self._begin(request)
            self._note(self._begins)

    def left(self, request: Request) -> None:
        """It has ended, in whatever way."""
        self._stop_waiting(request)
        began_s = self._began_s.pop(request.id, None)
        if began_s is not None:
            self._sum_began_s -= began_s
            self._stays_s.append(self._clock() - began_s)
            self._note(self._ends)
        _count_down(self._present, request.options.tenant)

    def _note(self, cadence: _Cadence) -> None:
        if self._waiting and self._seats.is_full:
            cadence.beat(self._clock())
        else:
            cadence.clear()  # there was room, so the rate is that of arrivals

    def _begin(self, request: Request) -> None:
        self._began_s[request.id] = now_s = self._clock()
        self._sum_began_s += now_s

    def _stop_waiting(self, request: Request) -> bool:
        if self._waiting.pop(request.id, None) is None:
            return False
        _count_down(self._by_tenant, request.options.tenant)
        self._tokens -= request.prompt_tokens
        self._bytes -= _image_bytes(request)
        if not self._waiting:
            self._begins.clear()
            self._ends.clear()
        return True

    def _free_now(self) -> int:
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_AGAIN_S:
            self._looked_s, self._free = now_s, self._free_bytes()
        return self._free

    def _retry_after_s(self, wait_s: float = 0.0) -> float:
        return min(max(wait_s, Overloaded.retry_after_s or 1.0), LONGEST_RETRY_S)


def _image_bytes(request: Request) -> int:
    return sum(len(each.data) for each in request.gallery.inputs) if request.gallery is not None else 0


def _count_down(counts: dict[str, int], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
