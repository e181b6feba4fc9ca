"""What attacks are made of: a registry of them, the scene in which one plays, and clients that cost little.

An attack is a function of a `Scene`. It prepares its bytes, says `scene.go()`, and then does harm while
`scene.is_on()`, in a process of its own at nice 10, so that what is measured beside it is the server.
"""

import contextlib
import multiprocessing
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from .served import Target

PATIENCE_S = 45.0
"""For an answer; more is "no answer"."""

PAUSE_S = 0.25
"""Between one try and the next."""

NICE = 10

_OWN = re.escape(f"/{Path(__file__).resolve().parts[1]}/")  # where this checkout is, whatever that is called

LEAKS = re.compile(rf"(/(home|root|tmp|usr)/|{_OWN}|site-packages|name_or_path|Traceback|\.py\b)")
"""What no answer may hold: paths and internals of the server."""

TENANT = "alice"

Play = Callable[["Scene"], None]


class Attack(NamedTuple):
    name: str
    about: str
    play: Play
    control: Play | None  # what the silence is compared with: the same without harm; None: no such traffic at all
    least_s: float  # it needs that long
    most_peak_bytes: float  # that the front end may take more while it lasts


ATTACKS: dict[str, Attack] = {}


def attack(
    *, control: Play | None = None, least_s: float = 0.0, most_peak_bytes: float = float("inf")
) -> Callable[[Play], Play]:
    """Registers a function under its name; its docstring says what it does."""

    def register(play: Play) -> Play:
        name = play.__name__
        ATTACKS[name] = Attack(name, " ".join((play.__doc__ or "").split()), play, control, least_s, most_peak_bytes)
        return play

    return register


@dataclass(slots=True)
class Outcome:
    """What the attackers got."""

    got: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)  # what the door may not do


@dataclass(slots=True)
class Scene:
    target: Target
    seconds: float
    scale: float  # of the sizes: 1 is what the adversary took
    pipe: Connection
    outcome: Outcome = field(default_factory=Outcome)
    until_s: float = 0.0

    @property
    def key(self) -> str:
        return self.target.keys[TENANT]

    def sized(self, count: float) -> int:
        return max(1, int(count * self.scale))

    def go(self) -> None:
        """All is prepared: wait for the word, and begin."""
        self.pipe.send("prepared")
        self.pipe.recv()
        self.until_s = time.monotonic() + self.seconds

    def is_on(self) -> bool:
        return time.monotonic() < self.until_s

    def note(self, status: str, said: str = "") -> None:
        """A status, and what came with it."""
        self.outcome.got[status] += 1
        leak = LEAKS.search(said)
        if status in ("500", "INTERNAL", "UNKNOWN", "no answer") or leak:
            place = said[max(0, leak.start() - 100) : leak.end() + 100] if leak else said[:200]
            if len(self.outcome.problems) < 10:
                self.outcome.problems.append(f"{status}: {place}")

    def problem(self, what: str) -> None:
        self.outcome.problems.append(what)

    # -- clients -----------------------------------------------------------------------------------------------------

    def connect(self, port: int | None = None, *, receive_bytes: int | None = None) -> socket.socket:
        made = socket.socket()
        if receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(PATIENCE_S)
        made.connect((self.target.http[0], port or self.target.http[1]))
        return made

    @property
    def grpc_port(self) -> int:
        return int(self.target.grpc.rpartition(":")[2])

    def head(self, path: str, length: int, *more: str, key: str | None = None, verb: str = "POST") -> bytes:
        lines = [
            f"{verb} {path} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {key or self.key}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            *more,
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    def post(self, path: str, body: bytes, *, key: str | None = None) -> tuple[str, str]:
        """Status and text; "closed" if it went without a word, "no answer" after `PATIENCE_S`."""
        try:
            with self.connect() as to:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an answer may have come already
                    to.sendall(self.head(path, len(body), "Connection: close", key=key))
                    to.sendall(body)
                return read_answer(to)
        except TimeoutError:
            return "no answer", ""
        except OSError as error:
            return type(error).__name__, ""

    def repeat(self, path: str, *bodies: bytes, key: str | None = None) -> None:
        """Post them in turns until the time is over."""
        while self.is_on():
            for body in bodies:
                status, said = self.post(path, body, key=key)
                self.note(status, said)
                time.sleep(PAUSE_S)

    def repeat_rpc(self, method: str, payload: bytes) -> None:
        while self.is_on():
            self.note(*rpc(self.target, method, payload, self.key))
            time.sleep(PAUSE_S)


def read_answer(to: socket.socket, most_bytes: int = 4_000_000) -> tuple[str, str]:
    """Status and text of what comes until the other side closes."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while len(received) < most_bytes and (piece := to.recv(65536)):
            received += piece
    if not received:
        return "closed", ""
    return received[9:12].decode("latin-1"), received.decode(errors="replace")


def rpc(
    target: Target, method: str, payload: bytes, key: str | None, *, patience_s: float = PATIENCE_S
) -> tuple[str, str]:
    """How a call with these bytes ends, and what was said. Answers are counted and thrown away."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    metadata = [("authorization", f"Bearer {key}")] if key else []
    with grpc.insecure_channel(target.grpc, options) as channel:
        call: Any = channel.unary_stream(f"/intarsia.v1.Inference/{method}")
        try:
            for _ in call(payload, timeout=patience_s, metadata=metadata):
                pass
        except grpc.RpcError as raised:
            error: Any = raised
            code = error.code().name
            return ("no answer" if code == "DEADLINE_EXCEEDED" else code), error.details() or ""
    return "OK", ""


def message_field(number: int, payload: bytes) -> bytes:
    """A field of bytes, text, a message, or packed numbers, as protobuf writes it."""
    return bytes([number << 3 | 2]) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def raise_file_limit() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# -- a process for an attack -----------------------------------------------------------------------------------------


class Attackers:
    """An attack that is prepared, begins with `go`, and ends by itself or by `end`."""

    def __init__(self, play: Play, target: Target, seconds: float, scale: float):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_play, args=(theirs, play, target, seconds, scale), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(60) or self._pipe.recv() != "prepared":
            raise RuntimeError("the attack could not be prepared")

    def go(self) -> None:
        self._pipe.send("go")

    def is_done(self) -> bool:
        return self._pipe.poll(0) or not self._process.is_alive()

    def end(self) -> Outcome:
        """What they got; those that are not done are ended."""
        if self._pipe.poll(0):
            with contextlib.suppress(EOFError):
                outcome = self._pipe.recv()
                self._process.join(10)
                return outcome
        self._process.kill()
        self._process.join()
        return Outcome(Counter(), ["the attackers had to be ended"])


def _play(pipe: Connection, play: Play, target: Target, seconds: float, scale: float) -> None:
    os.nice(NICE)
    raise_file_limit()
    scene = Scene(target, seconds, scale, pipe)
    try:
        play(scene)
    except OSError as error:
        scene.note(type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001 - of the attack itself: said, and no success
        scene.problem(f"the attack failed: {type(error).__name__}: {error}")
    pipe.send(scene.outcome)
