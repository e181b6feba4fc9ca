"""The connections of a front end to an engine, and how long the engine may keep it waiting."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ...errors import EngineUnavailable, IntarsiaError
from ...proto.channel import TAKEN_WITHIN_S, Address, ChannelClosed, Stream
from ...proto.codec import read
from ...proto.messages import FROM_FRONT_END, Idle, Pair
from ...proto.status import EngineInfo

logger = logging.getLogger(__name__)

HUNG_AFTER_S = 5.0
"""That an engine may take to answer a question, where another one can come in its place."""

LOOKS = 10
"""Waits in which the answer is looked for. A wait that takes long because this process stands still counts once."""

Result = TypeVar("Result")


async def while_we_run(work: Awaitable[Result], within_s: float) -> Result:
    """As `asyncio.wait_for`, but only the time counts in which this process runs. Where it stood still, what
    came meanwhile is read before the other side is blamed. Raises `TimeoutError`."""
    task = asyncio.ensure_future(work)
    try:
        for _ in range(LOOKS):
            if (await asyncio.wait({task}, timeout=within_s / LOOKS))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


async def watch_over(ask: Callable[[], Awaitable[Any]], drop: Callable[[], None]) -> None:
    """Drop the line to an engine that leaves two questions in a row unanswered. Until cancelled."""
    misses = 0
    while True:
        await asyncio.sleep(HUNG_AFTER_S)
        try:
            await while_we_run(ask(), HUNG_AFTER_S)
            misses = 0
        except TimeoutError:
            misses += 1
        except IntarsiaError:
            misses = 0  # the engine is lost, and its connection knows it
        if misses == 2:
            logger.warning("the engine says nothing for %g s; it is given up", 2 * HUNG_AFTER_S)
            drop()
            misses = 0  # the engine that comes in its place may hang at once, too


class Line:
    """The two connections to an engine: one for all there is to say, and one that tells whether its machine is there
    while much is under way on the other. They end together."""

    def __init__(self, stream: Stream, idle: Stream):
        self.stream = stream
        self._idle = idle
        self._watch = asyncio.create_task(self._watch_idle())

    def drop(self) -> None:
        self._watch.cancel()
        for each in (self.stream, self._idle):
            each.drop()

    async def close(self) -> None:
        self._watch.cancel()
        await asyncio.gather(self.stream.close(), self._idle.close())

    async def _watch_idle(self) -> None:
        await self._idle.wait_gone()
        self.drop()


async def meet(address: Address) -> tuple[Line, EngineInfo]:
    """Connect to an engine; returns what it says of itself, too. Raises `EngineUnavailable`."""
    streams: list[Stream] = []
    try:
        for taken_within_s in (TAKEN_WITHIN_S, None):
            streams.append(await Stream.connect(address, taken_within_s))
        name = secrets.token_bytes(16)
        for kind, stream in zip((Pair, Idle), streams, strict=True):
            stream.send_message(FROM_FRONT_END.plain(kind(name)))
        info, _ = [await stream.receive_message() for stream in streams]
        return Line(*streams), read(info, EngineInfo)
    except (ChannelClosed, OSError) as error:
        for stream in streams:
            stream.drop()
        raise EngineUnavailable(f"the engine at {address.host}:{address.port} cannot be reached: {error}") from error
