"""MessagePack, as all internal messages use it: tuples stay tuples, bytes stay bytes, nothing is ever executed."""

from typing import Any

import msgpack


def pack(message: Any) -> bytes:
    packed = msgpack.packb(message)
    assert packed is not None  # it is, unless a packer without autoreset is used
    return packed


def unpack(data: bytes) -> Any:
    """Raises `ValueError` for what is no message."""
    try:
        return msgpack.unpackb(data, use_list=False)
    except (TypeError, msgpack.UnpackException) as error:  # keys that are none; the rest are ValueErrors
        raise ValueError(f"these {len(data)} bytes are no message: {error!r}") from error
