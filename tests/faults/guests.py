"""Ordinary users beside an attack, in processes of their own: streams of known answers, and a probe of /health.

What is measured is the longest silence: of a stream, from one piece of its answer to the next, the wait for the first
one counted; of the probe, from its question to the answer. A silence that goes on when it is asked for counts, too.
"""

import asyncio
import contextlib
import json
import multiprocessing
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from intarsia import SamplingParams
from intarsia.deploy.client import AsyncClient
from intarsia.environment import freeze_startup_objects
from intarsia.errors import IntarsiaError

from .served import Target
from .service import Known, answered, draw

BY_HTTP, BY_GRPC = 12, 4
KNOWN = 24
TOKENS = 40, 160

PROBE_EVERY_S = 0.05

OWN_LAG_EVERY_S = 0.02

TENANT = "bob"

WAIT_S = 300.0
"""For a process of guests to say what it saw."""


@dataclass(slots=True)
class Seen:
    """What became of the streams since it was last asked."""

    finished: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    silence_s: float = 0.0
    own_lag_s: float = 0.0  # how late this process itself was: more than that cannot be told


class Guests:
    """Streams that go on until `stop`, one after another in each of 16 places."""

    def __init__(self, target: Target, seed: int, tenant: str = TENANT):
        """Learns the answers from the server, which is to be quiet meanwhile."""
        self._child = _Child(_guests, target, seed, tenant)
        self._child.ask("learn")

    def start(self) -> None:
        self._child.ask("start")

    def seen(self) -> Seen:
        """Since the last time."""
        return self._child.ask("seen")

    def stop(self) -> Seen:
        """Each stream is read to its end."""
        return self._child.ask("stop")

    def close(self) -> None:
        self._child.close()


class Probe:
    """Asks /health every 50 ms."""

    def __init__(self, target: Target):
        self._child = _Child(_probe, target)

    def longest_s(self) -> float:
        """Longest wait for an answer since the last time it was asked."""
        return self._child.ask("seen")

    def close(self) -> None:
        self._child.close()


class _Child:
    """A process that answers questions through a pipe."""

    def __init__(self, call: Callable[..., None], *about: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=call, args=(theirs, *about), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: str) -> Any:
        self._pipe.send(what)
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError(f"no answer to {what!r} within {WAIT_S:g} s")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


# -- in the process of the streams -----------------------------------------------------------------------------------


def _guests(pipe: Connection, target: Target, seed: int, tenant: str) -> None:
    freeze_startup_objects()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        asyncio.run(_serve_guests(pipe, target, seed, tenant))


async def _serve_guests(pipe: Connection, target: Target, seed: int, tenant: str) -> None:
    key = target.keys[tenant]
    async with AsyncClient(target.grpc, api_key=key) as client:
        streams = _Streams(target, key, client, random.Random(seed))
        answers: dict[str, Callable[[], Any]] = {
            "learn": streams.learn,
            "start": streams.start,
            "seen": streams.seen,
            "stop": streams.stop,
        }
        while True:
            await _readable(pipe)
            pipe.send(await answers[pipe.recv()]())


async def _readable(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(pipe.fileno(), there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(pipe.fileno())


class _Learnt(NamedTuple):
    known: Known
    text: str


class _Streams:
    def __init__(self, target: Target, key: str, client: AsyncClient, rng: random.Random):
        self._target, self._key, self._client, self._rng = target, key, client, rng
        self._seen = Seen()
        self._since_s: dict[int, float] = {}  # by place: when its stream was last heard
        self._learnt: list[_Learnt] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def learn(self) -> None:
        """What a server says that has nothing else to do."""
        known = await answered(self._client, draw(self._rng, KNOWN, *TOKENS))
        self._learnt = list(await asyncio.gather(*map(self._with_text, known)))

    async def _with_text(self, known: Known) -> _Learnt:
        return _Learnt(known, "".join([piece async for piece in pieces(self._target, self._key, known)]))

    async def start(self) -> None:
        self._is_stopping = False
        ways = [self._by_http] * BY_HTTP + [self._by_grpc] * BY_GRPC
        self._tasks = [asyncio.create_task(self._go_on(place, way)) for place, way in enumerate(ways)]
        self._lag = asyncio.create_task(self._watch_own_lag())

    async def seen(self) -> Seen:
        now_s = time.monotonic()
        for since_s in self._since_s.values():
            self._seen.silence_s = max(self._seen.silence_s, now_s - since_s)
        seen, self._seen = self._seen, Seen()
        return seen

    async def stop(self) -> Seen:
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        self._lag.cancel()
        return await self.seen()

    async def _go_on(self, place: int, way: Callable[[int, _Learnt], Any]) -> None:
        while not self._is_stopping:
            learnt = self._rng.choice(self._learnt)
            self._since_s[place] = time.monotonic()
            try:
                wrong = await way(place, learnt)
            except (IntarsiaError, OSError, EOFError, ValueError) as error:
                self._seen.failed.append(f"{way.__name__[1:]}: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.1)
                continue
            finally:
                self._heard(place)
                del self._since_s[place]
            self._seen.finished += 1
            if wrong:
                self._seen.wrong.append(wrong)

    def _heard(self, place: int) -> None:
        now_s = time.monotonic()
        self._seen.silence_s = max(self._seen.silence_s, now_s - self._since_s[place])
        self._since_s[place] = now_s

    async def _by_http(self, place: int, learnt: _Learnt) -> str | None:
        said = []
        async for piece in pieces(self._target, self._key, learnt.known):
            said.append(piece)
            self._heard(place)
        text = "".join(said)
        return None if text == learnt.text else f"HTTP: {text!r}, not {learnt.text!r}"[:400]

    async def _by_grpc(self, place: int, learnt: _Learnt) -> str | None:
        said: list[int] = []
        answer = self._client.generate(learnt.known.prompt, learnt.known.sampling)
        async with contextlib.aclosing(answer):
            async for chunk in answer:
                said += chunk.token_ids
                self._heard(place)
        return None if tuple(said) == learnt.known.tokens else f"gRPC: {said}, not {learnt.known.tokens}"[:400]

    async def _watch_own_lag(self) -> None:
        while True:
            started_s = time.monotonic()
            await asyncio.sleep(OWN_LAG_EVERY_S)
            late_s = time.monotonic() - started_s - OWN_LAG_EVERY_S
            self._seen.own_lag_s = max(self._seen.own_lag_s, late_s)


async def pieces(target: Target, key: str, known: Known) -> AsyncIterator[str]:
    """The text of a streamed completion, as it comes. Raises `ValueError` for any answer but a whole one."""
    reader, writer = await asyncio.open_connection(*target.http)
    try:
        writer.write(request_bytes(key, known.prompt, known.sampling))
        status = (await reader.readuntil(b"\r\n\r\n"))[9:12]
        if status != b"200":
            raise ValueError(f"{status.decode()}: {(await reader.read(2000)).decode(errors='replace')}")
        is_done = False
        async for line in _lines(reader):
            if line == b"data: [DONE]":
                is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"{event}")
                yield event["choices"][0]["text"]
        if not is_done:
            raise ValueError("the answer ended before [DONE]")
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of a chunked body, whose chunks end with a line."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        for line in (await reader.readexactly(size + 2)).splitlines():
            yield line


def request_bytes(key: str, prompt: str, sampling: SamplingParams) -> bytes:
    """A completion that is streamed."""
    body = {
        "prompt": prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


# -- in the process of the probe -------------------------------------------------------------------------------------


def _probe(pipe: Connection, target: Target) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        _serve_probe(pipe, target)


def _whole_answer(connection: socket.socket) -> bytes:
    """Its head and its body, which come in one piece or in two; nothing if the connection is closed before its end."""
    said = b""
    while b"\r\n\r\n" not in said or len(said.partition(b"\r\n\r\n")[2]) < _length(said):
        piece = connection.recv(4096)
        if not piece:
            return b""
        said += piece
    return said


def _length(said: bytes) -> int:
    """Of the body, as the head says."""
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", said)
    return int(found[1]) if found else 0


def _serve_probe(pipe: Connection, target: Target) -> None:
    """On one connection, since one that lives is what a load balancer has. Until it hears "ok" it goes on asking, and
    the silence lasts."""
    longest_s, since_s = 0.0, time.monotonic()
    connection = None
    while True:
        asked_s = time.monotonic()
        try:
            connection = connection or socket.create_connection(target.http, timeout=120)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            said = _whole_answer(connection)
        except OSError:
            said = b""
        if not said and connection is not None:
            connection.close()
            connection = None
        longest_s = max(longest_s, time.monotonic() - since_s)
        if pipe.poll(max(0.0, asked_s + PROBE_EVERY_S - time.monotonic())):
            pipe.recv()
            pipe.send(longest_s)
            longest_s = 0.0
        if said.startswith(b"HTTP/1.1 200"):
            since_s = time.monotonic()
