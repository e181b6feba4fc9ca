"""What a row of the table of settings says, and what is made of rows: fields of components."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from .sizes import parse_bytes, parse_tokens

SERVE, BATCH = "serve", "batch"
"""The commands that start engines, and take settings."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    default: Any
    fills: str  # the component's field: "scheduler.max_num_seqs"; empty: the command itself acts on it
    help: str
    unset: str = ""  # what None means, in words
    more: str = ""  # said beside it, where there is more room than in --help
    read: Callable[[Any, str], Any] | None = None  # (what was given, the setting's name) -> the field's value
    serving: Any = None  # the default of servers, where it is another
    short: str = ""  # a short flag beside the long one
    variable: str = ""  # an environment variable beside the usual one
    most: int | None = None  # the largest number that the flag takes; the smallest is 0 then
    follows: str = ""  # the setting after which --help shows it; empty: it is shown where it is written
    commands: tuple[str, ...] = (SERVE, BATCH)
    name: str = ""  # name and kind are those of the key
    kind: Any = None

    @property
    def may_be_none(self) -> bool:
        return type(None) in get_args(self.kind)

    @property
    def for_servers(self) -> Any:
        """The default of the commands, and of the Serve application."""
        return self.default if self.serving is None else self.serving

    def value(self, given: Mapping[str, Any]) -> Any:
        """The value that the field gets. Raises `InvalidSetting`."""
        value = given.get(self.name, self.default)
        return value if self.read is None else self.read(value, self.name)


def rows_of(keys: Any, **same: Any) -> Iterator[Setting]:
    """The rows of a typed dictionary, each with its name and type. same: what all of them have in common."""
    for name, annotation in keys.__annotations__.items():
        yield replace(annotation.__metadata__[0], name=name, kind=annotation.__origin__, **same)


def in_order(rows: Sequence[Setting]) -> list[Setting]:
    """Settings in the order in which --help shows them."""
    ordered = [row for row in rows if not row.follows]
    for row in rows:
        if row.follows:
            place = next(n for n, other in enumerate(ordered) if other.name == row.follows)
            ordered.insert(place + 1, row)
    return ordered


def fields_of(rows: Iterable[Setting], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of each component that rows fill: {"scheduler": {"max_num_seqs": 64, ...}, ...}. What is not given has
    its default. Raises `InvalidSetting`, naming the setting, and `TypeError` for a name that no row has."""
    known = {row.name: row for row in rows}
    for name in given:
        if name not in known:
            raise TypeError(f"{name} is no setting.{did_you_mean(name, known)}")
    found: dict[str, dict[str, Any]] = {}
    for row in known.values():
        component, _, field = row.fills.partition(".")
        found.setdefault(component, {})[field] = row.value(given)
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known; empty if no other is like it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


# -- readers -----------------------------------------------------------------------------------------------------------


def tokens(value: str | int | None, name: str) -> int | None:
    return None if value is None else parse_tokens(value, name)


def count_of_bytes(value: str | int | None, name: str) -> int | None:
    return None if value is None else parse_bytes(value, name)


def several(value: Sequence[str] | None, name: str) -> tuple[str, ...]:
    return tuple(value or ())
