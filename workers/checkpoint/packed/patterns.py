"""Patterns of modules' names, as configs have them. A stranger wrote them: they cost little, whatever they say.

Most are names, some have stars, and some are regular expressions. Repeats within repeats make an expression large in
memory when it is compiled, and slow when it is matched: the first are refused, the second run into a limit of time.
"""

import fnmatch
import math
import re
import time
from collections.abc import Iterable

import regex

from ..json_file import clipped, corrupt, quote

MOST_PATTERNS = 2**14
"""Of one list. Published lists have up to some thousand."""

MOST_CHARS = 1024
MOST_DEPTH = 8
"""Of groups within groups."""

MOST_REPEATS = 1000
"""Of all counted repeats of an expression, multiplied."""

MOST_MATCH_S = 0.1
"""For one expression on one name; those of published files take microseconds."""

MOST_MATCHING_S = 20.0
"""For all patterns of a description on all names."""

MOST_SIZE = 2**20
"""Of all regular expressions of a description: their characters, times their counted repeats. One takes 100 bytes."""

COUNTED = re.compile(r"\{(\d{1,9})?(,)?(\d{1,9})?\}")
KNOWN_GROUPS = re.compile(r"\(\?(?!:|=|!|<=|<!|i\))")
REGULAR = "re:"


class Budget:
    """What is left for the patterns of one description."""

    def __init__(self) -> None:
        self._size, self._seconds = MOST_SIZE, MOST_MATCHING_S

    def compile(self, place: str, size: int) -> None:
        """Raises `CorruptCheckpoint`."""
        self._size -= size
        if self._size < 0:
            raise corrupt(f"{place} has too many regular expressions, or too large ones")

    def match(self, place: str, seconds: float) -> None:
        """Raises `CorruptCheckpoint`."""
        self._seconds -= seconds
        if self._seconds < 0:
            raise corrupt(f"{place} has patterns that take more than {MOST_MATCHING_S:.0f} s to compare")


class Patterns:
    """Which modules a list of patterns means: whole names, parts of a name between dots, names with stars (fnmatch),
    and regular expressions that fit from the name's beginning (`re:`)."""

    def __init__(self, place: str, patterns: Iterable[str], budget: Budget):
        """place: where they were found, for messages. Raises `CorruptCheckpoint`."""
        self._place = place
        self._budget = budget
        self._names: list[str] = []
        self._expressions: list[tuple[str, regex.Pattern[str]]] = []
        for count, pattern in enumerate(patterns, 1):
            if count > MOST_PATTERNS:
                raise corrupt(f"{place} has more than {MOST_PATTERNS} patterns")
            self._add(pattern)
        self._whole = frozenset(self._names)

    def __len__(self) -> int:
        return len(self._names) + len(self._expressions)

    def match(self, module: str) -> bool:
        """Raises `CorruptCheckpoint` if that takes long."""
        if module in self._whole:
            return True
        if not len(self):
            return False
        began = time.perf_counter()
        dotted = f".{module}."
        found = any(f".{name}." in dotted for name in self._names)
        found = found or any(self._fits(expression, module) for expression in self._expressions)
        self._budget.match(self._place, time.perf_counter() - began)
        return found

    def _add(self, pattern: str) -> None:
        if len(pattern) > MOST_CHARS:
            raise corrupt(f"{self._place} holds a pattern of {len(pattern)} characters; the limit is {MOST_CHARS}")
        if pattern.startswith(REGULAR):
            self._expressions.append((pattern, self._compiled(pattern.removeprefix(REGULAR))))
        elif any(star in pattern for star in "*?["):
            # Below a module that is named so, too.
            self._budget.compile(self._place, len(pattern))
            translated = fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
            self._expressions.append((pattern, regex.compile(rf"{translated}(?:\..*)?\Z")))
        else:
            self._names.append(pattern)

    def _compiled(self, expression: str) -> "regex.Pattern[str]":
        repeats = math.prod(max(int(low or 0), int(high or 0), 1) for low, _, high in COUNTED.findall(expression))
        why = _too_much(expression, repeats)
        if why is None:
            self._budget.compile(self._place, len(expression) * repeats)
            try:
                return regex.compile(expression)
            except (regex.error, RecursionError, OverflowError) as error:
                why = f"it is no pattern: {clipped(str(error))}"
        raise corrupt(f"{self._place} holds {quote(expression)}, which is not read: {why}")

    def _fits(self, expression: "tuple[str, regex.Pattern[str]]", module: str) -> bool:
        try:
            return expression[1].match(module, timeout=MOST_MATCH_S) is not None
        except TimeoutError:
            raise corrupt(
                f"{self._place} holds {quote(expression[0])}, which takes more than {MOST_MATCH_S} s to compare with "
                f"{quote(module)}"
            ) from None


def _too_much(expression: str, repeats: int) -> str | None:
    """Why an expression is not even compiled. None: it is small."""
    rest = COUNTED.sub("", expression).replace(r"\{", "").replace(r"\}", "")
    if "{" in rest or repeats > MOST_REPEATS:
        return f"its counted repeats come to more than {MOST_REPEATS}, or are of a kind that is not known"
    if KNOWN_GROUPS.search(expression):
        return "it has a group of a kind that is not known"
    depth = deepest = 0
    for character in expression:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        return f"its groups are nested deeper than {MOST_DEPTH}"
    return None
