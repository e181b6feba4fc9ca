"""Work beside the event loop: a few threads, shared fairly among tenants.

What takes more than a millisecond would hold up every stream of its loop: reading a long text, writing a long answer.
Threads do it instead. Each tenant's work is done in its own order, and tenants take turns, so a tenant's 30 MB wait
behind their own. Python runs one thread at a time, so what is done here has to let go of the interpreter every few
milliseconds: a single call into C that keeps it for longer holds up the loop from here just as well.
"""

import asyncio
import contextlib
import queue
import sys
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ...environment import give_back_freed_memory
from ...errors import IntarsiaError, OverQuota

Result = TypeVar("Result")

THREADS = 3
"""One tenant alone gets all but one of them, so that another's first work begins at once."""

LARGE_BYTES = 1 << 18
"""Work of this size and more gives its memory back to the machine afterwards: the C library would keep hundreds of
megabytes for each thread."""

SWITCH_S = 0.0005
"""Time that a thread may run on while the loop waits for the interpreter: Python's own 5 ms passed at every write of
every stream, since a loop lets go of the interpreter to write."""

MAX_WAITING = 4096
"""Pieces of work of one tenant."""


@dataclass(slots=True, eq=False)
class _Work:
    """A piece of work whose result a task waits for."""

    do: Callable[[], Any]
    size_bytes: int
    done: asyncio.Future[Any]


class Beside:
    """Threads for the work of one event loop. All but the work itself happens on that loop."""

    def __init__(
        self, threads: int = THREADS, max_waiting: int = MAX_WAITING, max_waiting_bytes: int | None = None
    ) -> None:
        """max_waiting, max_waiting_bytes: of one tenant's work that has not begun."""
        self._threads = threads
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()  # by tenant, the next in turn first
        self._waiting_bytes: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0
        weakref.finalize(self, _end, self._todo, threads)

    async def run(self, tenant: str, work: Callable[[], Result], size_bytes: int = 0) -> Result:
        """Do the work and return or raise what it does. A caller that gives up early cancels it.

        size_bytes: what it keeps in memory while it waits. Raises `OverQuota` when too much of the tenant's waits.
        """
        self._check_room(tenant, size_bytes)
        one = _Work(work, size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(one)
        self._waiting_bytes[tenant] += size_bytes
        self._begin_what_can()
        try:
            return await one.done
        finally:
            self._drop(tenant, one)
            del one, work  # what is raised keeps this frame, and they would keep it and all that they worked on

    def _check_room(self, tenant: str, size_bytes: int) -> None:
        count, held = len(self._waiting.get(tenant, ())), self._waiting_bytes[tenant]
        limit_bytes = self._max_waiting_bytes
        if count >= self._max_waiting or (limit_bytes is not None and count and held + size_bytes > limit_bytes):
            raise OverQuota(
                f"{count} of your requests, of {held} bytes, wait here to be read already; the limits are "
                f"{self._max_waiting} and {limit_bytes or 'any number of'} bytes. Try again in "
                f"{OverQuota.retry_after_s:g} s.",
                limit=self._max_waiting,
            )

    def _begin_what_can(self) -> None:
        while (tenant := self._next_tenant()) is not None:
            waiting = self._waiting[tenant]
            one = waiting.popleft()
            self._waiting_bytes[tenant] -= one.size_bytes
            if waiting:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant], self._waiting_bytes[tenant]
            self._begin(tenant, one)

    def _next_tenant(self) -> str | None:
        """The tenant whose turn it is; None if no work waits. Tenants with a thread wait for those without."""
        if self._running.total() >= self._threads or not self._waiting:
            return None
        tenant = min(self._waiting, key=self._running.__getitem__)  # of several, the first in turn
        return tenant if self._running[tenant] < max(1, self._threads - 1) else None

    def _begin(self, tenant: str, one: _Work) -> None:
        self._running[tenant] += 1
        if self._started < self._threads and self._running.total() > self._started:
            self._started += 1
            sys.setswitchinterval(SWITCH_S)
            threading.Thread(target=_work, args=(self._todo,), name="beside", daemon=True).start()
        loop = asyncio.get_running_loop()

        def do() -> None:
            try:
                result, error = one.do(), None
            except IntarsiaError as known:
                result, error = None, known.bare()
            except BaseException as raised:  # noqa: BLE001  whatever it is, it is the caller's
                result, error = None, raised
            if one.size_bytes >= LARGE_BYTES:
                give_back_freed_memory()  # milliseconds, during which other threads run
            with contextlib.suppress(RuntimeError):  # the loop has ended, and no caller waits
                loop.call_soon_threadsafe(self._end_of, tenant, one, result, error)

        self._todo.put(do)

    def _end_of(self, tenant: str, one: _Work, result: Any, error: BaseException | None) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if not one.done.done():
            if error is not None:
                one.done.set_exception(error)
            else:
                one.done.set_result(result)
        self._begin_what_can()

    def _drop(self, tenant: str, one: _Work) -> None:
        """Forget work whose caller waits no more, if it has not begun."""
        waiting = self._waiting.get(tenant)
        if waiting is None or one not in waiting:
            return
        waiting.remove(one)
        self._waiting_bytes[tenant] -= one.size_bytes
        if not waiting:
            del self._waiting[tenant], self._waiting_bytes[tenant]


def _work(todo: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """A thread, until it is told to end. It knows nothing of who gives it work, who may then be forgotten."""
    while (do := todo.get()) is not None:
        do()
        del do  # with all that it holds


def _end(todo: "queue.SimpleQueue[Callable[[], None] | None]", threads: int) -> None:
    for _ in range(threads):
        todo.put(None)
