"""What every call of gRPC meets before its method: its key, whether its message comes, whether that is a message, and
what it may hold. Afterwards, whether the client reads the answer.

    headers ─► key? ─► message, in time? ─► within its bounds? ─► parsed ─► the method ─► answers, taken in time?

gRPC reads a message by itself before it calls a method, for as long as that takes. Here every method is one that takes
a stream, so that we read the messages. Of a call without a key nothing is read, and half a message is not waited for.
All methods share the door, those of health and reflection, too. It sees how a call begins and ends; the pieces of an
answer are written by `server.py`.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from ...errors import DeadlineExceeded, IntarsiaError, InvalidRequest, Overloaded
from ..front_end.access import RPCS, TENANT, Access, Level
from ..front_end.beside import Beside
from ..front_end.counted import Counted
from ..front_end.request_log import LOGGED, RequestLog
from ..settings.limits import Limits
from .convert import MODEL, error_to_status
from .wire import Bounds, check_wire, kind_of

logger = logging.getLogger(__name__)

SHORT_MESSAGE_BYTES = 4096
"""It is looked through and parsed in two milliseconds at most; a longer one beside the loop."""

SLOW_AFTER_S = 1.0
"""A message that is not there by then is counted as a whole one under way: how much of it has come is not told."""

MOST_LEFT, MOST_LEFT_OF_CALLER = 512, 64
"""Answers that were ended because their clients do not read, and whose last piece is still to be read."""

SWEEPS = 8
"""Looks at all calls in the time that a client may take nothing."""


OF_A_MODEL = {path for path in RPCS if path.startswith("/intarsia.")} - {"/intarsia.v1.Inference/Abort"}


class Door(grpc.aio.ServerInterceptor):
    """Stands before all methods of a server."""

    def __init__(
        self,
        access: Access,
        limits: Limits,
        beside: Beside,
        bounds: Mapping[str, Bounds],
        write: "Write",
        request_log: RequestLog | None = None,
        choose: Callable[[str | None], None] | None = None,
    ):
        """bounds: of the messages of each method, by its path; others have their fields counted.
        write: writes what a method answers to a client. choose: has the model of this name answer the call; None:
        there is one model"""
        self._choose = choose
        self._log = request_log
        self._access = access
        self._limits = limits
        self._beside = beside
        self._bounds = bounds
        self._write = write
        self._usual = Bounds(limits.max_json_items)
        per_message = limits.max_message_bytes
        self._slow = Counted(
            "messages that are not whole yet",
            max(1, limits.max_bodies_bytes // per_message),
            max(1, limits.max_key_bodies_bytes // per_message),
        )
        self._streams = Counted("open streams of this method", limits.max_watchers, limits.max_key_watchers)
        self._unread = Unread(limits.unread_timeout_s)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        level = RPCS.get(handler_call_details.method, Level.KEY)
        logged = contextlib.nullcontext[Any]
        if self._log is not None and handler_call_details.method in LOGGED:
            logged = partial(self._log.one, handler_call_details.method)
        metadata = dict(handler_call_details.invocation_metadata)
        try:
            self._access.check(level, metadata.get("authorization"))
            if self._choose is not None and handler_call_details.method in OF_A_MODEL:
                self._choose(metadata.get(MODEL))
        except IntarsiaError as error:
            with contextlib.suppress(IntarsiaError), logged():
                raise error
            return _refusal(error)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        read = self._reader(handler, self._bounds.get(handler_call_details.method, self._usual))
        if handler.request_streaming:
            return self._talking(handler, read)
        if not handler.response_streaming:
            return self._answering(handler, read)
        return self._streaming(handler, read, logged)

    # -- kinds of methods --------------------------------------------------------------------------------------------

    def _streaming(
        self, handler: Any, read: "Reader", logged: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Any:
        async def answer(messages: AsyncIterator[bytes], context: Any) -> None:
            with logged():
                self._unread.check()
                request = _checked(await read(await self._one(messages)))
                with self._unread.of_this_call(context) as call:
                    # In a task of its own, so that a piece of the answer does not pass through here.
                    await asyncio.create_task(self._write(handler.unary_stream(request, context), call))

        return grpc.stream_stream_rpc_method_handler(_ended(answer), None, handler.response_serializer)

    def _answering(self, handler: Any, read: "Reader") -> Any:
        async def answer(messages: AsyncIterator[bytes], context: Any) -> Any:
            return await handler.unary_unary(_checked(await read(await self._one(messages))), context)

        return grpc.stream_unary_rpc_method_handler(_ended(answer), None, handler.response_serializer)

    def _talking(self, handler: Any, read: "Reader") -> Any:
        """One that really takes a stream: there are few at once, and each ends when nothing is asked for a while."""

        async def answer(messages: AsyncIterator[bytes], context: Any) -> None:
            async def asked() -> AsyncIterator[Any]:
                while (data := await self._next(messages)) is not None:
                    yield _checked(await read(data))

            with self._streams.one(), self._unread.of_this_call(context) as call:
                await self._write(handler.stream_stream(asked(), context), call)

        return grpc.stream_stream_rpc_method_handler(_ended(answer), None, handler.response_serializer)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def _one(self, messages: AsyncIterator[bytes]) -> bytes:
        """The message of a call that has one. Raises `DeadlineExceeded`, `Overloaded` or `InvalidRequest`."""
        loop, refused, incoming = asyncio.get_running_loop(), list[Overloaded](), aiter(messages)
        with contextlib.ExitStack() as held:

            def count() -> None:
                try:
                    held.enter_context(self._slow.one())
                except Overloaded as error:
                    refused.append(error)
                    clock.reschedule(loop.time())

            held.callback(loop.call_later(SLOW_AFTER_S, count).cancel)
            try:
                async with asyncio.timeout(self._limits.idle_timeout_s) as clock:
                    return await anext(incoming)
            except TimeoutError:
                raise (refused or [_late(self._limits.idle_timeout_s)])[0] from None
            except StopAsyncIteration:
                raise InvalidRequest("the call ended without a message") from None
            finally:
                await _close(incoming)

    async def _next(self, messages: AsyncIterator[bytes]) -> bytes | None:
        """None: there are no more."""
        try:
            async with asyncio.timeout(self._limits.idle_timeout_s):
                return await anext(messages, None)
        except TimeoutError:
            raise _late(self._limits.idle_timeout_s) from None

    def _reader(self, handler: Any, bounds: Bounds) -> "Reader":
        parse = handler.request_deserializer
        kind = kind_of(parse)

        def work(data: bytes) -> Any:
            """What an error would hold, in the frames that it came through, would wait for the garbage collector; so it
            is a result here."""
            try:
                if kind is not None:
                    check_wire(data, kind, bounds)
                return parse(data) if parse is not None else data
            except IntarsiaError as error:
                return error.bare()
            except DecodeError as error:
                return InvalidRequest(f"the request's bytes are no message of its kind: {error}")

        async def read(data: bytes) -> Any:
            if len(data) <= SHORT_MESSAGE_BYTES:
                return work(data)
            try:
                return await self._beside.run(TENANT.get(), lambda: work(data), len(data))
            except Overloaded as error:
                return error.bare()

        return read


async def _close(incoming: Any) -> None:
    """It keeps its last message otherwise, for as long as something of the call is kept."""
    if hasattr(incoming, "aclose"):
        await incoming.aclose()


def _checked(request: Any) -> Any:
    """Raises what a reader found."""
    if isinstance(request, IntarsiaError):
        raise request
    return request


Reader = Callable[[bytes], Awaitable[Any]]
"""Makes a request of bytes, or an error that says why it cannot."""


class WrittenCall:
    """A call whose answer is being written. It may wait for its client."""

    __slots__ = ("context", "task", "variables", "waiting_since_s")

    def __init__(self, task: asyncio.Task[Any], context: Any):
        self.task = task
        self.context = context
        self.variables = copy_context()
        self.waiting_since_s: float | None = None  # that a piece waits to be taken, on the monotonic clock


Write = Callable[[Any, WrittenCall], Coroutine[Any, Any, None]]
"""Writes what an asynchronous generator brings, closes it, and keeps `waiting_since_s` up to date."""


class Unread:
    """Ends calls of clients that take nothing of what is sent to them.

    Their tasks wait within gRPC and are cancelled. What was written last stays there, and behind it the status that
    says why, until the client reads it or goes: of such calls a caller may leave so many before it is refused others.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._calls: set[WrittenCall] = set()
        self._left = Counted("answers that you do not read", MOST_LEFT, MOST_LEFT_OF_CALLER)
        self._ends: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None  # while there are calls

    def check(self) -> None:
        """Raises `Overloaded` for a caller who has left too many."""
        if self._ends:  # the only ones that count
            with self._left.one():
                pass

    @contextlib.contextmanager
    def of_this_call(self, context: Any) -> Iterator[WrittenCall]:
        """While this lasts, the call of the current task is ended when a piece waits for too long."""
        task = asyncio.current_task()
        assert task is not None
        call = WrittenCall(task, context)
        self._calls.add(call)
        if self._sweep is None:
            self._look_later()
        try:
            yield call
        finally:
            self._calls.discard(call)

    def _look_later(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(self._timeout_s / SWEEPS, self._look)

    def _look(self) -> None:
        self._sweep = None
        before_s = time.monotonic() - self._timeout_s
        for call in [each for each in self._calls if (each.waiting_since_s or math.inf) < before_s]:
            self._calls.discard(call)
            end = call.task.get_loop().create_task(self._end(call), context=call.variables)
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)
        if self._calls:
            self._look_later()

    async def _end(self, call: WrittenCall) -> None:
        logger.info("a call is given up: its client has not read for %g s", self._timeout_s)
        call.task.cancel()
        await asyncio.wait([call.task])
        error = DeadlineExceeded(
            f"the client has not read for {self._timeout_s:g} s (unread_timeout_s), so its answer was ended",
            limit=self._timeout_s,
        )
        with self._left.any_one(), contextlib.suppress(Exception):  # it has gone, or has its status
            await call.context.abort_with_status(status_of(error))


# -- errors ----------------------------------------------------------------------------------------------------------


def _late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"no whole message came for {timeout_s:g} s; send it at once", limit=timeout_s)


def _refusal(error: IntarsiaError) -> Any:
    """A handler that does nothing else, for calls of any kind. Nothing of them is read."""

    async def refuse(messages: Any, context: Any) -> None:
        await context.abort_with_status(status_of(error))

    return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type]


class _Status(NamedTuple):
    """What ends a call, as gRPC wants it."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


@contextlib.contextmanager
def noting() -> Iterator[list[IntarsiaError]]:
    """Gives a list, in which the error is that ends what is done here, if one does. What is no error of ours is our own
    fault, and only the log learns of it."""
    refused: list[IntarsiaError] = []
    try:
        yield refused
    except IntarsiaError as error:
        refused.append(error.bare())
    except grpc.aio.AbortError:  # the method has said its status itself
        raise
    except grpc.aio.InternalError:  # it was to say something to a client that has gone meanwhile
        raise asyncio.CancelledError from None
    except Exception:
        logger.exception("a call failed on an internal error")
        refused.append(IntarsiaError("internal error; the server's log has the details"))


def _ended(answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    """A method that does what `answer` does, and ends with a status where that ends with an error. gRPC keeps the
    frames through which it ends a call, so nothing of what was asked is in this one."""

    async def method(messages: Any, context: Any) -> Any:
        with noting() as refused:
            return await answer(messages, context)
        return await _end_call(context, refused.pop())

    return method


async def _end_call(context: Any, error: IntarsiaError) -> None:
    try:
        await context.abort_with_status(status_of(error))
    except grpc.aio.InternalError:  # the client has gone meanwhile
        raise asyncio.CancelledError from None


def status_of(error: IntarsiaError) -> Any:
    """An error as what a call ends with."""
    status: Any = rpc_status.to_status(error_to_status(error))
    metadata = tuple(status.trailing_metadata)
    if error.retry_after_s is not None:  # what clients with a retry policy go by
        metadata += (("grpc-retry-pushback-ms", str(round(error.retry_after_s * 1000))),)
    return _Status(status.code, status.details, metadata)
