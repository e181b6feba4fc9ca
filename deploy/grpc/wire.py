"""How much is in a message of protobuf, before objects are made of it.

    request  0a 00 0a 00 0a 00 ...      two bytes each, and each becomes a message of a hundred

A message is read field by field, into the messages within it and over all else, and no further than its bounds. What a
parser would read otherwise than this (groups, lengths beyond the end) is refused, so nothing can hide behind it.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ...errors import InvalidRequest, RequestTooLarge

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Types on the wire. Those of groups are older than all that we take."""

MAX_VARINT_BYTES = 10

GOES_ON = bytes(range(0x80, 0x100))
"""Bytes of a number that are not its last."""

TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class Most(NamedTuple):
    """Of one list."""

    limit: int
    what: str  # is in it, in words
    field: str  # as errors name it

    def check(self, count: int) -> None:
        """Raises `RequestTooLarge`."""
        if count > self.limit:
            raise self.refusal(count)

    def refusal(self, count: int) -> RequestTooLarge:
        words = f"there are {count} or more {self.what}; at most {self.limit} are taken"
        return RequestTooLarge(words, field=self.field, asked=count, limit=self.limit)


class Bounds(NamedTuple):
    """What a message may hold."""

    max_fields: int  # in it and in all messages within it; numbers that are packed are one field
    most: Mapping[str, Most] = {}  # of repeated fields, by their full names


class _Field(NamedTuple):
    """One that is looked into, or counted."""

    full_name: str
    is_repeated: bool
    kind: Descriptor | None  # of the messages in it; None: numbers


def check_wire(data: bytes, kind: Descriptor, bounds: Bounds) -> None:
    """Raises `RequestTooLarge` for a message beyond its bounds, `InvalidRequest` for bytes that are none."""
    try:
        _walk(data, kind, bounds)
    except IndexError:
        raise _broken("it ends within a field") from None


@lru_cache(maxsize=256)
def _inner(kind: Descriptor) -> Mapping[int, _Field]:
    """The fields of a message that hold messages or lists of numbers, by number on the wire."""
    return {
        field.number: _Field(field.full_name, field.is_repeated, field.message_type)
        for field in kind.fields
        if field.type == FieldDescriptor.TYPE_MESSAGE or (field.is_repeated and field.type not in TEXTS)
    }


def _walk(data: bytes, kind: Descriptor, bounds: Bounds) -> None:
    position, end, fields_left = 0, len(data), bounds.max_fields
    inner, counts = _inner(kind), dict[str, int]()
    above: list[tuple[int, Mapping[int, _Field], dict[str, int]]] = []  # the messages around this one
    while True:
        while position < end:
            fields_left -= 1
            if fields_left < 0:
                raise RequestTooLarge(
                    f"the message holds more than {bounds.max_fields} fields; send less at once",
                    limit=bounds.max_fields,
                )
            tag = data[position]
            position += 1
            if tag >= 0x80:
                tag, position = _varint(data, position - 1)
            wire = tag & 7
            if wire == BYTES:
                size = data[position]
                position += 1
                if size >= 0x80:
                    size, position = _varint(data, position - 1)
                if position + size > end:
                    raise _broken("a field is longer than what it is in")
                field = inner.get(tag >> 3)
                if field is None or field.kind is None:
                    if field is not None and field.full_name in bounds.most:
                        _count(field, _numbers(data[position : position + size]), counts, bounds)
                    position += size
                    continue
                if field.is_repeated:
                    _count(field, 1, counts, bounds)
                above.append((end, inner, counts))
                end, inner, counts = position + size, _inner(field.kind), {}
            elif wire == VARINT:
                if data[position] >= 0x80:
                    _, position = _varint(data, position)
                else:
                    position += 1
            elif wire == FIXED32:
                position += 4
            elif wire == FIXED64:
                position += 8
            else:
                raise _broken(f"there are no fields of wire type {wire}")
        if position != end:
            raise _broken("a field is longer than what it is in")
        if not above:
            return
        end, inner, counts = above.pop()


def _count(field: _Field, more: int, counts: dict[str, int], bounds: Bounds) -> None:
    if (most := bounds.most.get(field.full_name)) is not None:
        counts[field.full_name] = count = counts.get(field.full_name, 0) + more
        most.check(count)


def _numbers(packed: bytes) -> int:
    """How many, of those that take as many bytes as they need."""
    return len(packed.translate(None, GOES_ON))


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number there, and where it ends."""
    number = 0
    for n in range(MAX_VARINT_BYTES):
        byte = data[position + n]
        number |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            return number, position + n + 1
    raise _broken(f"a number has more than {MAX_VARINT_BYTES} bytes")


def _broken(why: str) -> InvalidRequest:
    return InvalidRequest(f"the request's bytes are no message of its kind: {why}")


def kind_of(parse: Any) -> Descriptor | None:
    """What a generated `FromString` makes messages of; None for another function."""
    return getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
