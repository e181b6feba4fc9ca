"""HTTP/2 by hand, for clients that do less, or more, than a library would."""

import socket
import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def call(path: str, headers: Mapping[str, str] | None = None, stream: int = 1) -> bytes:
    """The head of a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    } | dict(headers or {})
    packed = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
    return frame(HEADERS, END_HEADERS, stream, packed)


def half_message(announced_bytes: int, sent: bytes, stream: int = 1) -> bytes:
    """The beginning of one."""
    return frame(DATA, 0, stream, b"\0" + struct.pack(">I", announced_bytes) + sent)


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes((len(text),)) + text.encode()


def connect(address: str, *sent: bytes) -> socket.socket:
    """A connection on which this was sent at once."""
    host, _, port = address.rpartition(":")
    opened = socket.create_connection((host, int(port)), timeout=10)
    opened.sendall(b"".join(sent))
    return opened


def ends_within(opened: socket.socket, seconds: float) -> bool:
    """Whether the other side closes it. What it sends before is dropped."""
    opened.settimeout(seconds)
    try:
        while opened.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def frames_until(opened: socket.socket, kinds: set[int], seconds: float = 10.0) -> tuple[int, int, bytes]:
    """The first frame of these kinds that has a stream: kind, stream, payload. Raises `TimeoutError`."""
    opened.settimeout(seconds)
    while True:
        head = _exactly(opened, 9)
        length, kind, stream = int.from_bytes(head[:3], "big"), head[3], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
        payload = _exactly(opened, length)
        if kind in kinds and stream:
            return kind, stream, payload


def _exactly(opened: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = opened.recv(count - len(data))
        if not piece:
            raise ConnectionError("closed")
        data += piece
    return data
