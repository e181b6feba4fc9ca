"""Frames over TCP between our own actors: a length, then that many bytes of MessagePack. Never pickle.

Actors find each other through Ray, which hands over an address and a secret; the secret is the first frame of every
connection. Bytes then bypass Ray, since an actor call per step and worker would cost more than the step's own overhead
(`docs/measurements_of_parts.md`). A closed connection is how either side learns of the other's death.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from .codec import pack, unpack

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 1024 * 1024

HANDSHAKE_TIMEOUT_S = 5.0
"""For the whole secret, however many pieces it comes in."""

MOST_STRANGERS = 256
"""Connections that may be about to say the secret; with one more, the oldest is closed. Ours say it at once."""

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted: strangers may come in numbers."""

TAKEN_WITHIN_S = 10.0
"""In which a server with an event loop of ours takes what it is sent. One that does not is lost."""

STANDS_FOR_S = 60.0
"""That a client of such a server may take nothing of what it is sent. It loses time, and nothing else."""

CLOSED_WITHIN_S = 2.0
"""For the other side to take the last words of a stream that is closed."""


class Address(NamedTuple):
    """Where a server of ours listens, and the secret it wants to hear first."""

    host: str
    port: int
    secret: bytes


class ChannelClosed(ConnectionError):
    """The other side is gone, or it was never one of ours."""


class CorruptFrame(ChannelClosed):
    """What came is nothing that one of ours would send. Nothing more of it is read."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Around what takes a message apart: whatever is wrong with its form becomes a `CorruptFrame`."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise CorruptFrame(f"{what} cannot be read: {str(error)[:200]}") from error


class _Connected(asyncio.StreamReaderProtocol):
    """Tells of the other side's end even while its stream is not read."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop):
        super().__init__(reader, loop=loop)
        self.ended = asyncio.Event()

    def eof_received(self) -> bool | None:
        self.ended.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        super().connection_lost(exc)


class Stream:
    """One connection, seen from an event loop. Frames arrive in the order they were sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: asyncio.Event | None = None):
        """ended: is set when the other side is gone. None for streams that were accepted: they are read until then."""
        self._reader = reader
        self._writer = writer
        self._ended = ended

    @classmethod
    async def connect(cls, address: Address, taken_within_s: float | None = TAKEN_WITHIN_S) -> "Stream":
        """taken_within_s: see `tune`"""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = _Connected(reader, loop)
        transport, _ = await loop.create_connection(lambda: protocol, address.host, address.port)
        tune(transport.get_extra_info("socket"), taken_within_s)
        stream = cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), protocol.ended)
        stream.send(address.secret)
        return stream

    async def wait_gone(self) -> None:
        """Wait until the other side is gone. Another task may read meanwhile. Of connected streams only."""
        assert self._ended is not None, "a stream that was accepted is read until its end"
        await self._ended.wait()

    @property
    def is_gone(self) -> bool:
        """Whether the other side is known to be gone. Of connected streams only."""
        assert self._ended is not None, "a stream that was accepted is read until its end"
        return self._ended.is_set()

    def send(self, payload: bytes) -> None:
        """Queue one frame. Returns at once; a closed connection shows at the next `receive`."""
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> bytes:
        """The next frame. Raises `ChannelClosed` when there will be none."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            _check_length(length)
            return await self._reader.readexactly(length)
        except CorruptFrame:
            raise
        except (asyncio.IncompleteReadError, OSError) as error:  # a machine that is gone is no ConnectionError
            raise ChannelClosed(str(error)) from error

    def send_message(self, message: Any) -> None:
        self.send(pack(message))

    async def receive_message(self) -> Any:
        payload = await self.receive()
        with reading("a message"):
            return unpack(payload)

    def be_idle(self) -> None:
        """Nothing more is to be sent, so that a machine that is gone is heard of at once (see `tune`)."""
        tune(self._writer.get_extra_info("socket"), None)

    @property
    def unsent_bytes(self) -> int:
        """What waits here since the other side, and the kernel for it, take no more now."""
        return self._writer.transport.get_write_buffer_size()

    def hold_above(self, unsent_bytes: int) -> None:
        """Let `drain` wait once more than this is unsent, until a quarter of it is."""
        self._writer.transport.set_write_buffer_limits(high=unsent_bytes)

    async def drain(self) -> None:
        """Wait until more can be sent. Raises `ChannelClosed`."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(CLOSED_WITHIN_S):
                await self._writer.wait_closed()
        self.drop()

    def drop(self) -> None:
        """End it at once, whatever is still to be sent: the other side may read no more."""
        self._writer.transport.abort()


class StreamServer:
    """Accepts streams that know the secret, in an event loop."""

    def __init__(self, handle: Callable[[Stream], Awaitable[None]]):
        self._handle = handle
        self._secret = secrets.token_bytes(32)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()
        self._strangers: dict[asyncio.Task, None] = {}  # of those tasks, whose secret is still to come; oldest first

    async def start(self, host: str) -> Address:
        """Listen on a free port of `host`."""
        self._server = await asyncio.start_server(self._accept, host, 0, backlog=BACKLOG)
        return Address(host, self._server.sockets[0].getsockname()[1], self._secret)

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        tune(writer.get_extra_info("socket"), STANDS_FOR_S)
        stream = Stream(reader, writer)
        try:
            if await self._is_ours(task, reader):
                await self._handle(stream)
        except CorruptFrame as error:
            logger.warning("a stream is closed: %s", error)
        except (ChannelClosed, asyncio.CancelledError):
            pass  # the other side left, or we are closing: both are an ordinary end
        except Exception:
            logger.exception("a stream is closed because of what came over it")
        finally:
            with contextlib.suppress(asyncio.CancelledError):  # we are closing, and it is about to be
                await stream.close()
            stream.drop()

    async def _is_ours(self, task: asyncio.Task, reader: asyncio.StreamReader) -> bool:
        """Does the first frame hold the secret? Nothing else of a stranger is read."""
        if len(self._strangers) >= MOST_STRANGERS:
            next(iter(self._strangers)).cancel()
        self._strangers[task] = None
        hello = _hello(self._secret)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                header = await reader.readexactly(_LENGTH.size)
                if not hello.startswith(header):
                    return False
                return hmac.compare_digest(header + await reader.readexactly(len(self._secret)), hello)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            return False
        finally:
            self._strangers.pop(task, None)


@dataclass(slots=True)
class _Stranger:
    """A connection that may be about to say the secret."""

    until_s: float  # it has to be said
    said: bytearray = field(default_factory=bytearray)


class BlockingListener:
    """Accepts connections that know the secret, without an event loop. Strangers are heard side by side, so that no one
    waits for one who says nothing."""

    def __init__(self, host: str, timeout_s: float | None = None, taken_within_s: float | None = TAKEN_WITHIN_S):
        """timeout_s: for each `accept`; None waits as long as it takes. taken_within_s: see `tune`"""
        self._taken_within_s = taken_within_s
        self._timeout_s = timeout_s
        secret = secrets.token_bytes(32)
        self._hello = _hello(secret)
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, _Stranger] = {}  # oldest first
        self.address = Address(host, self._listener.getsockname()[1], secret)

    def accept(self) -> socket.socket:
        """The next connection that knows the secret; strangers are shut out. Raises `TimeoutError`."""
        until_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            for key, _ in self._selector.select(self._patience_s(until_s)):
                if key.fileobj is self._listener:
                    self._meet_stranger()
                elif (friend := self._hear(key.fileobj)) is not None:
                    return friend
            now_s = time.monotonic()
            for late in [each for each, stranger in self._strangers.items() if stranger.until_s <= now_s]:
                self._shut_out(late)
            if until_s is not None and now_s >= until_s:
                raise TimeoutError(f"no client that knows the secret came within {self._timeout_s:g} s")

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._shut_out(stranger)
        self._selector.close()
        self._listener.close()

    def _patience_s(self, until_s: float | None) -> float | None:
        """Until the first one's time is over; None: no time is limited."""
        ends = [stranger.until_s for stranger in self._strangers.values()] + ([] if until_s is None else [until_s])
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _meet_stranger(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it left again
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._shut_out(next(iter(self._strangers)))
        connection.setblocking(False)
        self._strangers[connection] = _Stranger(time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: Any) -> socket.socket | None:
        """The connection, once it has said the secret. Nothing else of a stranger is read."""
        stranger = self._strangers.get(connection)
        if stranger is None:  # shut out while its turn came
            return None
        try:
            piece = connection.recv(len(self._hello) - len(stranger.said))
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        stranger.said += piece
        is_whole = len(stranger.said) == len(self._hello)
        if not piece or not self._hello.startswith(stranger.said[: _LENGTH.size]):
            return self._shut_out(connection)
        if is_whole and not hmac.compare_digest(bytes(stranger.said), self._hello):
            return self._shut_out(connection)
        if not is_whole:
            return None
        self._selector.unregister(connection)
        del self._strangers[connection]
        connection.setblocking(True)
        tune(connection, self._taken_within_s)
        return connection

    def _shut_out(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        self._selector.unregister(connection)
        connection.close()


class Begun(NamedTuple):
    """An answer that may not be known yet."""

    read: Callable[[], bytes]  # waits for it
    is_known: Callable[[], bool] = lambda: True


MOST_BEGUN = 2
"""One is computed while the next is prepared. Ours ask for no more at once."""

LOOK_EVERY_S = 1e-4
"""Whether an answer is known, while the next question may come."""


class BlockingServer:
    """Serves one stream in the thread that calls `serve`: a worker serves its controller with it."""

    def __init__(self, host: str, connect_timeout_s: float | None = None):
        """connect_timeout_s: for the other side to connect; None waits as long as it takes."""
        self._listener = BlockingListener(host, connect_timeout_s)
        self.address = self._listener.address
        self._connection: socket.socket | None = None

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer every frame of the first stream that knows the secret. Returns when that stream is closed, or when
        none came in time; or when it sends an empty frame, and then it may be served again.

        answer: raises `CorruptFrame` for what is nothing that ours would send; the stream is closed then
        """
        self.serve_ahead(lambda payload: Begun(partial(answer, payload)), lambda: None)

    def serve_ahead(self, begin: Callable[[bytes], Begun], afterwards: Callable[[], None]) -> None:
        """The same, in the same order, but what comes next is begun before an answer is waited for.

        afterwards: what is to be done each time an answer is on its way
        """
        try:
            if self._connection is None:
                self._connection = self._listener.accept()
                self._listener.close()
            begun: deque[Begun] = deque()
            while True:
                if begun and (len(begun) == MOST_BEGUN or not _comes_before(self._connection, begun[0].is_known)):
                    send_blocking(self._connection, begun.popleft().read())
                    afterwards()
                elif payload := receive_blocking(self._connection):
                    begun.append(begin(payload))
                else:
                    for answer in begun:
                        send_blocking(self._connection, answer.read())
                    return
        except CorruptFrame as error:
            logger.warning("a stream is closed: %s", error)
            self._end()
        except (ChannelClosed, OSError):
            self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _comes_before(connection: socket.socket, is_known: Callable[[], bool]) -> bool:
    """Does something come through the connection before the answer is known?"""
    while not is_known():
        if select.select([connection], [], [], LOOK_EVERY_S)[0]:
            return True
    return False


def connect_blocking(address: Address, timeout_s: float, taken_within_s: float | None) -> socket.socket:
    """A connection to a `BlockingListener`. Raises `OSError`. taken_within_s: see `tune`"""
    connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    connection.settimeout(None)
    tune(connection, taken_within_s)
    connection.sendall(_hello(address.secret))
    return connection


def send_blocking(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_blocking(connection: socket.socket, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The next frame. Raises `ChannelClosed` when there will be none."""
    header = bytearray(_LENGTH.size)
    fill(connection, memoryview(header))
    (length,) = _LENGTH.unpack(header)
    _check_length(length, limit_bytes)
    payload = bytearray(length)
    fill(connection, memoryview(payload))
    return bytes(payload)


def fill(connection: socket.socket, target: memoryview) -> None:
    """Fill `target` from a blocking socket. Raises `ChannelClosed` when less comes."""
    got = 0
    while got < len(target):
        count = connection.recv_into(target[got:])
        if count == 0:
            raise ChannelClosed("the other side closed the connection")
        got += count


def _check_length(length: int, limit_bytes: int = MAX_FRAME_BYTES) -> None:
    if length > limit_bytes:
        raise CorruptFrame(f"a frame of {length} bytes was announced; at most {limit_bytes} are taken")


def _hello(secret: bytes) -> bytes:
    """What a connection of ours begins with."""
    return _LENGTH.pack(len(secret)) + secret


def tune(connection: socket.socket, taken_within_s: float | None) -> None:
    """Send small frames at once, since a step must not wait for Nagle's algorithm, and notice a lost machine.

    A process that dies closes its connections, and is noticed at once. A lost machine closes nothing.

    taken_within_s: The connection ends when what is sent is not taken for so long. None for a side that computes and
        reads when it is done, because the kernel cannot tell such a side from a lost one. Without a limit a lost
        machine is noticed only while nothing is under way, then within three seconds. So such a side needs a second
        connection that is idle.
    """
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}
    options["TCP_USER_TIMEOUT"] = round((taken_within_s or 0) * 1e3)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        if hasattr(socket, option):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
