"""What a front end knows of its engine at any moment: whether it can be reached, and whether it has room.

there ──lost──► away ──met again──► there
                  └──given up──► failed, for good
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from ...controller.losses import Losses
from ...errors import EngineUnavailable, IntarsiaError
from ...proto.channel import Address
from ...proto.messages import FROM_FRONT_END, Refused
from ...proto.status import EngineInfo
from .liveness import Line, meet

logger = logging.getLogger(__name__)

Again = Callable[[], Awaitable[Address]]
"""Brings back an engine that was lost, and returns where it is now. Raises `EngineUnavailable` when it cannot."""


class _Full(NamedTuple):
    """The engine refused a request of a tenant, and would refuse others of it."""

    until_s: float  # on the monotonic clock
    refusal: IntarsiaError


class Refusals:
    """What an engine has just said about having no room for a tenant.

    A flood of requests ends here: the one process that plans the steps of all hears of a fraction of it.
    """

    def __init__(self) -> None:
        self.untold = 0  # requests refused here, of which the engine has not heard
        self._full: dict[str, _Full] = {}

    def is_full(self, tenant: str) -> bool:
        """Whether the engine takes no request of this tenant."""
        full = self._full.get(tenant)
        return full is not None and time.monotonic() < full.until_s

    def check_room(self, tenant: str) -> None:
        """Raises `Overloaded` where the engine is full, and counts that."""
        if self.is_full(tenant):
            self.untold += 1
            raise self._full[tenant].refusal.again()

    def tell(self) -> Refused:
        """What the engine is to hear of them."""
        untold, self.untold = self.untold, 0
        return Refused(untold)

    def note(self, tenant: str, refusal: IntarsiaError) -> None:
        """The engine has refused a request. The refusal may say for how long it would refuse others."""
        full_for_s = float(refusal.details.get("full_for_s", 0.0))
        if full_for_s:
            now_s = time.monotonic()
            self._full = {name: full for name, full in self._full.items() if now_s < full.until_s}
            self._full[tenant] = _Full(now_s + full_for_s, refusal.bare())


class Connection:
    """The line to an engine, or to the one that came back in its place. Lives on one event loop.

    Invariant: `error` is None exactly while the engine can be reached; a `failure` is an error that stays.
    """

    def __init__(self, line: Line, info: EngineInfo, again: Again | None, give_up_after_s: float):
        """again: None: a lost engine never comes back. give_up_after_s: as `EngineClient` has it."""
        self.line = line
        self.info = info
        self.error: IntarsiaError | None = None  # why the engine cannot be reached now
        self.failure: IntarsiaError | None = None  # why it can never be reached again
        self.losses = Losses(give_up_after_s)
        self.refusals = Refusals()
        self.turns = asyncio.Lock()  # held by the one suspect that is tried (`recovery.py`)
        self._next_handle = 0
        self._again = again
        self._left = asyncio.Event()  # set while there is an error
        self._settled = asyncio.Event()  # set while it is known whether the engine can be reached
        self._settled.set()
        self._failed = asyncio.Event()

    @property
    def is_there(self) -> bool:
        return self.error is None

    def check_there(self) -> None:
        """Raises `EngineUnavailable` where the engine cannot be reached."""
        if self.error is not None:
            raise self.error

    def draw_handle(self) -> int:
        """A number that no question or answer had before."""
        self._next_handle += 1
        return self._next_handle - 1

    def ask(self, kind: type, *about: Any) -> int:
        """Send a message of a kind, with a new handle and these fields; returns the handle. Raises as `check_there`."""
        self.check_there()
        handle = self.draw_handle()
        self.send(kind(handle, *about))
        return handle

    def send(self, message: Any) -> None:
        if self.refusals.untold:
            self._write(self.refusals.tell())
        self._write(message)

    def _write(self, message: Any) -> None:
        self.line.stream.send_message(FROM_FRONT_END.plain(message))

    def drop(self) -> None:
        """Give up an engine that hangs. What it says is not heard any more."""
        self.line.drop()

    def lose(self, error: IntarsiaError, *, for_good: bool = False) -> None:
        """The engine cannot be reached any more. Without `for_good`, it may come back."""
        if for_good or self._again is None or self.failure is not None:
            self._fail(error)
        else:
            self.error = error
            self._settled.clear()
            self._left.set()
            self.line.drop()

    async def come_back(self) -> None:
        """Bring back an engine that was lost, or fail. Does nothing after a failure."""
        if self.failure is not None:
            return
        try:
            self.line, self.info = await self._meet_again()
        except IntarsiaError as failure:
            self._fail(failure)
        except Exception as failure:  # a bug of ours must still reach every waiting caller
            logger.exception("the engine cannot be brought back")
            self._fail(EngineUnavailable(f"the engine cannot be brought back: {failure!r}. See the log."))
        else:
            self.losses.back()
            self.error = None
            self._left.clear()
            self._settled.set()

    async def _meet_again(self) -> tuple[Line, EngineInfo]:
        """An engine may be lost again before it is met. Then the next one is waited for."""
        error = self.error
        assert self._again is not None and error is not None
        while True:
            await self.losses.bear(error)
            address = await self._again()
            try:
                return await meet(address)
            except EngineUnavailable as lost:
                error = lost

    def _fail(self, error: IntarsiaError) -> None:
        self.error = self.failure = self.failure or error
        for event in (self._failed, self._left, self._settled):
            event.set()

    async def away(self) -> None:
        """Wait until the engine cannot be reached."""
        await self._left.wait()

    async def back(self) -> bool:
        """Wait until it is known whether the engine can be reached, and return that."""
        await self._settled.wait()
        return self.failure is None

    async def wait_failed(self) -> IntarsiaError:
        """Wait until the engine can never be reached again; returns why."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure
