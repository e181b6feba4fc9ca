"""One codec for all that travels between our processes: named types over MessagePack, made from their annotations.

A message is a `NamedTuple` and packs as an array of its fields; a frozen dataclass packs as a map of them. `decode`
turns bytes back into the type that is asked for. `Checked` also checks every value on the way, for what comes from
outside an engine: front ends send what users gave them. Steps and their results come from the engine's own processes
and are turned back without a look at each number: 256 requests take 45 us instead of 170.

Nothing is ever executed, and no class is named on the wire: which type to expect is the reader's to know, or, where
several may come, a tag before the fields tells (`Tagged`).

A value may be: int, float, str, bytes, bool, None, an enum, a tuple or sequence of one kind or of given kinds, a
mapping of texts to values, a message, a class that says itself how it travels (`to_wire`, `from_wire`), or one of
several of these that MessagePack can tell apart.
"""

import dataclasses
import enum
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

T = TypeVar("T")

Reader = Callable[[Any], Any] | None
"""From plain values to a value of a kind. None: they are one already."""

PLAIN = (int, float, str, bytes, bool, type(None))


def pack(message: Any) -> bytes:
    """Any value that may travel."""
    packed = msgpack.packb(message, default=_plain_value)
    assert packed is not None  # it is, unless a packer without autoreset is used
    return packed


def _plain_value(value: Any) -> Any:
    """Of what MessagePack does not know by itself."""
    if hasattr(value, "to_wire"):
        return value.to_wire()
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"a {type(value).__name__} cannot travel")


def unpack(data: bytes) -> Any:
    """Plain values, tuples for arrays. Raises `ValueError` for what is no message."""
    try:
        return msgpack.unpackb(data, use_list=False)
    except (TypeError, msgpack.UnpackException) as error:  # keys that are none; the rest are ValueErrors
        raise ValueError(f"these {len(data)} bytes are no message: {error!r}") from error


def decode(data: bytes, kind: type[T]) -> T:
    """The message of a kind that these bytes are. Raises `ValueError` for bytes that are none."""
    return read(unpack(data), kind)


def read(value: Any, kind: type[T], *, checked: bool = False) -> T:
    """From plain values. Raises `ValueError`, naming the place, for what is no value of this kind, as far as it is
    looked at; `InvalidRequest` where a type checks its own values."""
    reader = _reader(kind, checked)
    try:
        return value if reader is None else reader(value)
    except TypeError as error:  # too few fields, too many, or no row where there should be one
        raise ValueError(f"{value!r:.80} is no {kind.__name__}: {error}") from error


class Tagged:
    """Messages of several kinds on one connection: an array of a kind's number and its fields. Fields at the end that
    have their default values stay behind."""

    def __init__(self, *kinds: Any, checked: bool):
        """checked: every value is looked at when a message is read."""
        self._kinds = kinds
        self._checked = checked
        self._tags = {kind: tag for tag, kind in enumerate(kinds)}
        self._defaults = [tuple(kind._field_defaults.values()) for kind in kinds]

    def plain(self, message: Any) -> list[Any]:
        """As `pack` takes it."""
        tag = self._tags[type(message)]
        fields = [tag, *message]
        for default in reversed(self._defaults[tag]):
            is_default = fields[-1] == default or (
                default == () and fields[-1] == []
            )  # MessagePack has one kind of row
            if not is_default:
                break
            fields.pop()
        return fields

    def read(self, value: Any) -> Any:
        """Raises `ValueError` for what is no message of these kinds."""
        if type(value) is not tuple or not value or type(value[0]) is not int or not 0 <= value[0] < len(self._kinds):
            raise ValueError(f"{value!r:.80} is no message of {', '.join(kind.__name__ for kind in self._kinds)}")
        return read(value[1:], self._kinds[value[0]], checked=self._checked)


@cache
def _reader(kind: Any, checked: bool) -> Reader:
    """Made once from the annotation of a kind."""
    kind = kind.__supertype__ if isinstance(kind, NewType) else kind
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return None
    if kind in PLAIN or kind is None:
        return _plain({type(None) if kind is None else kind}) if checked else None
    if origin in (Union, types.UnionType):
        return _one_of(arguments, checked)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return _row(arguments, checked)
    if origin in (tuple, Sequence):
        return _many(arguments[0], checked)
    if origin in (Mapping, dict):
        return _map(arguments[1], checked)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if hasattr(kind, "from_wire"):
        return kind.from_wire
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _named_tuple(kind, checked)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    raise TypeError(f"{kind} cannot travel: see the kinds in {__name__}")


def _plain(kinds: set[type]) -> Reader:
    allowed = kinds | {int} if float in kinds else kinds  # MessagePack has 1.0 as a float, and people have it as 1

    def read_plain(value: Any) -> Any:
        if type(value) not in allowed:
            raise ValueError(f"{value!r:.80} is no {' or '.join(sorted(kind.__name__ for kind in kinds))}")
        return value

    return read_plain


def _one_of(kinds: Sequence[Any], checked: bool) -> Reader:
    """Of kinds that are not plain there is one at most."""
    plain = {kind for kind in kinds if kind in PLAIN}
    rest = [kind for kind in kinds if kind not in PLAIN]
    if not rest:
        return _plain(plain) if checked else None
    other = _reader(rest[0], checked)
    if other is None:
        return None
    return lambda value: value if type(value) in plain else other(value)


def _many(kind: Any, checked: bool) -> Reader:
    """Rows of plain values are checked in one go: a prompt may have a million tokens."""
    kind = kind.__supertype__ if isinstance(kind, NewType) else kind
    if checked and kind in PLAIN:
        allowed = {kind, int} if kind is float else {kind}

        def read_plain(value: Any) -> Any:
            if type(value) is not tuple or not allowed.issuperset(map(type, value)):
                raise ValueError(f"{value!r:.80} is no row of {kind.__name__}")
            return value

        return read_plain
    one = _reader(kind, checked)
    if one is not None:
        return lambda value: tuple([one(each) for each in value])
    return _plain({tuple}) if checked else None


def _row(kinds: Sequence[Any], checked: bool) -> Reader:
    readers = [_reader(kind, checked) for kind in kinds]
    if not any(readers):
        return None
    return lambda value: tuple(
        [each if reader is None else reader(each) for reader, each in zip(readers, value, strict=True)]
    )


def _map(kind: Any, checked: bool) -> Reader:
    one = _reader(kind, checked)

    def read_map(value: Any) -> Any:
        if type(value) is not dict:
            raise ValueError(f"{value!r:.80} is no map")
        return value if one is None else {name: one(each) for name, each in value.items()}

    return read_map


def _dataclass(kind: Any) -> Reader:
    return lambda value: kind(**value)  # it checks its own values


def _named_tuple(kind: Any, checked: bool) -> Reader:
    """Fields that have defaults may be left out at the end."""
    hints = get_type_hints(kind)
    readers = [
        (place, name, reader) for place, name in enumerate(kind._fields) if (reader := _reader(hints[name], checked))
    ]
    if not readers:
        return (lambda value: kind(*value)) if kind._field_defaults else kind._make

    def read_named(value: Any) -> Any:
        fields = list(value)
        for place, name, reader in readers:
            if place < len(fields):
                try:
                    fields[place] = reader(fields[place])
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        return kind(*fields)

    return read_named
