"""JSON of long values, made piece by piece: `json.dumps` is one call into C, during which no other thread runs."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

PIECE = 2000
"""Values, or hundreds of characters, in one call: about a millisecond."""

CHARS_OF_A_VALUE = 100


class Series:
    """An array whose items are made while they are written, each when its turn comes: all together they would take
    many times the memory of what they are made of."""

    __slots__ = ("_items", "num_values")

    def __init__(self, items: Callable[[], Iterable[Any]], num_values: int):
        """num_values: in all items, about."""
        self._items = items
        self.num_values = num_values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())


def json_pieces(value: Any) -> Iterator[str]:
    """Pieces that joined are the JSON of `value`, without white space, and characters as they are."""
    if size_of(value, PIECE) < PIECE or not isinstance(value, dict | list | tuple | Series):
        yield _dumps(value)
    elif isinstance(value, dict):
        yield from _within("{}", ((_dumps({name: 0})[1:-2], inner) for name, inner in value.items()))
    elif isinstance(value, list | tuple) and set(map(type, value)) <= {int, float, bool, type(None)}:
        yield from _of_numbers(value)
    else:
        yield from _within("[]", (("", inner) for inner in value))


def _of_numbers(value: list[Any] | tuple[Any, ...]) -> Iterator[str]:
    before = "["
    for start in range(0, len(value), PIECE):
        yield before + _dumps(value[start : start + PIECE])[1:-1]
        before = ","
    yield "]"


def size_of(value: Any, most: int) -> int:
    """Values in it and in the attributes of its objects, texts as if each hundred characters were one; `most` if there
    are more, which are not all looked at."""
    total = 1
    stack: list[Collection[Any]] = [[value]]
    while stack and total < most:
        for each in stack.pop():  # called for every event of every stream: only what holds more is put aside
            kind = type(each)
            if kind is str:
                total += len(each) // CHARS_OF_A_VALUE
            elif kind not in _SINGLE:
                inner = each.values() if kind is dict else each if kind is list else _values_in(each)
                total += each.num_values if kind is Series else len(inner)
                if total >= most:
                    break
                stack.append(inner)
    return min(total, most)


_SINGLE = frozenset({int, float, bool, type(None)})


def _values_in(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return vars(value).values() if hasattr(value, "__dict__") else ()


def texts_in(value: Any) -> Iterator[str]:
    """All texts in it, at any depth."""
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            stack.extend(each.values())
        elif isinstance(each, list | tuple):
            stack.extend(each)


def _within(brackets: str, items: Iterator[tuple[str, Any]]) -> Iterator[str]:
    """items: what stands before each value, and the value. Small values are written together."""
    before, together, size = brackets[0], [], 0
    for name, inner in items:
        own = 1 + len(inner) // CHARS_OF_A_VALUE if type(inner) is str else size_of(inner, PIECE)
        if size + own >= PIECE and together:
            yield before + ",".join(together)
            before, together, size = ",", [], 0
        if own < PIECE:
            together.append(name + _dumps(inner))
            size += own
        else:
            yield before + name
            yield from json_pieces(inner)
            before = ","
    yield (before if together or before in "{[" else "") + ",".join(together) + brackets[1]


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Series):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON")


_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_listed).encode

at_once: Callable[[Any], str] = _dumps
"""The JSON of a value that is known to be small, which saves looking how large it is."""
