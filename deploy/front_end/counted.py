"""How many of something there may be at once: of one caller, and of all."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from ...errors import Overloaded, OverQuota
from .access import CALLER


class Counted:
    """Counts what lasts a while. Callers are told apart by their keys; those without one are one caller."""

    def __init__(self, what: str, most: int, most_of_caller: int):
        """what: in words, for who is refused."""
        self._what = what
        self._most = most
        self._most_of_caller = most_of_caller
        self._here: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One more while this lasts. Raises `Overloaded`."""
        self._check(CALLER.get())
        with self.any_one():
            yield

    @contextlib.contextmanager
    def any_one(self) -> Iterator[None]:
        """The same, whatever the limits."""
        caller = CALLER.get()
        self._here[caller] += 1
        try:
            yield
        finally:
            self._here[caller] -= 1
            if not self._here[caller]:
                del self._here[caller]

    @property
    def total(self) -> int:
        return self._here.total()

    def _check(self, caller: str) -> None:
        if self._here[caller] >= self._most_of_caller:
            raise OverQuota(
                f"you have {self._here[caller]} {self._what} here already, and may have {self._most_of_caller}; end "
                "one before you begin another",
                limit=self._most_of_caller,
            )
        if self.total >= self._most:
            raise Overloaded(f"there may be {self._most} {self._what} here at once; try again later", limit=self._most)
