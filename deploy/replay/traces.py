"""Request traces: what came in, in which order, and which prefixes were shared. One reader per published format.

A trace says which blocks of a prompt are alike by ids; where it says nothing, every block is its own.
"""

import csv
import gzip
import heapq
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt of `length` tokens. An id fixes its block and everything before it."""

    length: int
    ids: list[int]  # of its blocks; the last one may be partly filled
    block_tokens: int


DRAWN_REQUESTS = 10_000
"""Drawn from formats that hold distributions instead of requests."""

MINUTES_APART = 2
"""Time between the starts of two sessions, where a trace has sessions without a common clock."""


def read_trace(
    path: Path, form: str | None = None, block_tokens: int = 16, longest_prompt: int | None = None
) -> Iterator[TraceRequest]:
    """The requests of a trace, in the order they are to be replayed. Reads plain files and gzip.

    block_tokens    of blocks in traces that name none
    longest_prompt  leave longer prompts out, and with them the whole session where there are sessions

    Raises `InvalidSetting` for a file that is no known format.
    """
    if form is not None and form not in FORMATS:
        raise InvalidSetting(f"format must be one of {', '.join(FORMATS)}; got {form!r}", field="format")
    read = FORMATS[form or detect(path)]
    try:
        for request in read(open_text(path), block_tokens, longest_prompt):
            if longest_prompt is None or request.length <= longest_prompt:
                yield request
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise InvalidSetting(f"{path} is not what its format promises: {error!r}", field="trace") from None


def detect(path: Path) -> str:
    """The format by a file's first line. Raises `InvalidSetting` when none fits."""
    first = open_text(path).readline()
    if first.startswith("TIMESTAMP,ContextTokens"):
        return "azure"
    if first.startswith("num_prefill_tokens"):
        return "lengths"
    for form, marks in (("mooncake", "hash_ids"), ("agentic", "requests"), ("rag", "parts"), ("servegen", "clients")):
        if f'"{marks}"' in first:
            return form
    if '"model"' in first or '"layers"' in first:
        return "operations"
    raise InvalidSetting(
        f"{path} is no trace of a known format; known are operations, {', '.join(FORMATS)}", field="trace"
    )


def open_text(path: Path, field: str = "trace") -> io.TextIOBase:
    """A text file, packed or not. Raises `InvalidSetting`, of this field, when it cannot be read."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        return gzip.open(path, "rt") if packed else path.open()  # type: ignore[return-value]
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror}", field=field) from None


def json_objects(path: Path, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a file with one on each line, empty lines left out.

    Raises `InvalidSetting`, of this field, for a bad line, and for a file that cannot be read."""
    with open_text(path, field) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise InvalidSetting(f"line {number} of {path} is not JSON: {error}", field=field) from None
            if not isinstance(entry, dict):
                raise InvalidSetting(f"line {number} of {path} must be an object, got {line[:40]!r}", field=field)
            yield number, entry


def _mooncake(lines: io.TextIOBase, block_tokens: int, longest: int | None) -> Iterator[TraceRequest]:
    for line in lines:
        entry = json.loads(line)
        yield TraceRequest(entry["input_length"], entry["hash_ids"], 512)


class _Unique:
    """Ids that occur once."""

    def __init__(self) -> None:
        self._next = -1

    def take(self, count: int) -> list[int]:
        first = self._next
        self._next -= count
        return list(range(first, self._next, -1))


def _unshared(lengths: Iterator[int], block_tokens: int) -> Iterator[TraceRequest]:
    unique = _Unique()
    for length in lengths:
        yield TraceRequest(length, unique.take(-(-length // block_tokens)), block_tokens)


def _azure(lines: io.TextIOBase, block_tokens: int, longest: int | None) -> Iterator[TraceRequest]:
    return _unshared((int(row["ContextTokens"]) for row in csv.DictReader(lines)), block_tokens)


def _lengths(lines: io.TextIOBase, block_tokens: int, longest: int | None) -> Iterator[TraceRequest]:
    return _unshared((int(row["num_prefill_tokens"]) for row in csv.DictReader(lines)), block_tokens)


def _agentic(lines: io.TextIOBase, block_tokens: int, longest: int | None) -> Iterator[TraceRequest]:
    """Sessions start a fixed time apart; ids are local to a session. longest: only sessions with no longer prompt."""
    queue: list[tuple[float, int, int, Any]] = []
    sessions = (json.loads(line)["requests"] for line in lines)
    fitting = (session for session in sessions if longest is None or all(r[2] <= longest for r in session))
    for index, session in enumerate(fitting):
        for position, request in enumerate(session):
            heapq.heappush(queue, (request[0] + 60 * MINUTES_APART * index, index, position, request))
    while queue:
        _, index, _, request = heapq.heappop(queue)
        ids = [(index << 32) + first + k for first, count in request[6] for k in range(count)]
        yield TraceRequest(request[2], ids, 64)  # the last, partly filled block has no id


def _rag(lines: io.TextIOBase, block_tokens: int, longest: int | None) -> Iterator[TraceRequest]:
    """Prompts made of parts: a block is shared when all parts up to its end are."""
    known: dict[tuple[int, tuple[Any, ...]], int] = {}
    for number, line in enumerate(lines):
        entry = json.loads(line)
        stream: list[Any] = []
        for kind, part, tokens in entry["parts"]:
            stream += [(kind, part, k) for k in range(tokens)]
        stream += [("filler", number, k) for k in range(entry["input_length"] - len(stream))]
        ids, parent = [], -1
        for start in range(0, entry["input_length"], block_tokens):
            key = parent, tuple(stream[start : start + block_tokens])
            parent = known.setdefault(key, len(known))
            ids.append(parent)
        yield TraceRequest(entry["input_length"], ids, block_tokens)


def _servegen(lines: io.TextIOBase, block_tokens: int, longest: int | None) -> Iterator[TraceRequest]:
    """Lengths drawn from each client's quantiles, clients by their rates. Seeded: the same requests every time."""
    clients = json.loads(lines.read())["clients"]
    rng = random.Random(0)
    weights = [sum(rate for rate in client["rate_per_s"] if rate) for client in clients]

    def lengths() -> Iterator[int]:
        for client in rng.choices(clients, weights, k=DRAWN_REQUESTS):
            quantiles = rng.choice(client["windows"])["input_tokens"]
            place = rng.random() * (len(quantiles) - 1)
            low = int(place)
            value = quantiles[low] + (quantiles[min(low + 1, len(quantiles) - 1)] - quantiles[low]) * (place - low)
            yield max(1, round(value))

    return _unshared(lengths(), block_tokens)


FORMATS: dict[str, Callable[[io.TextIOBase, int, int | None], Iterator[TraceRequest]]] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "lengths": _lengths,
    "agentic": _agentic,
    "rag": _rag,
    "servegen": _servegen,
}
