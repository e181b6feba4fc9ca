"""What all readers of calls share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .cursor import Cursor, Steps
from .described import Calls
from .draft import Draft
from .events import Event, NotACall
from .typed import Schema

LONGEST_NAME_CHARS = 256

NAME = re.compile(r"[^\s<>{}\[\]()\"'`=,;|]+")


@dataclass(slots=True)
class Reading:
    """Where a call is read, by what description, and what came of it so far."""

    cursor: Cursor
    calls: Calls
    schemas: Mapping[str, Schema]  # of the tools that are offered, by name
    out: list[Event]
    draft: Draft

    @classmethod
    def of(cls, cursor: Cursor, calls: Calls, schemas: Mapping[str, Schema], out: list[Event]) -> "Reading":
        return cls(cursor, calls, schemas, out, Draft(cursor, out))

    def named(self, name: str) -> str:
        """The name of a tool, without what is around it. Raises `NotACall` for what is none."""
        name = name.strip()
        if not NAME.fullmatch(name) or (self.calls.is_known_only and self.schemas and name not in self.schemas):
            raise NotACall
        return name

    def pass_over(self, *markers: str) -> Steps[bool]:
        """Pass over white space and one of the markers, if they follow."""
        self.cursor.keep()
        yield from self.cursor.skip_space()
        found = yield from self.cursor.match(markers)
        if found is None:
            self.cursor.go_back()
        self.cursor.forget()
        return found is not None
