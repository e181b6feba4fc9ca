"""The results of a batch on disk, in the order in which they came, until all are there.

    OUT.partial    a line that says what it is the journal of, then {"line": 7, "result": {...}} for each result
    OUT            all results in the order of the input; appears at once, when none is missing

Every result is written with one call and is safe from the death of the process from then on. What a killed run left
half-written at the end is cut off by the next one. One run at a time: the file is locked.
"""

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from ...errors import InvalidSetting

FORMAT = 1

ABSENT = 0
"""Offset of a result that is not there: the first line of a journal is no result."""


class Input:
    """A file of lines, of any length: what is kept in memory is where each begins."""

    def __init__(self, path: Path):
        """Raises `InvalidSetting` if it cannot be read. Empty lines are none, but are counted as lines of the file."""
        self.path = path
        self.offsets = array("Q")
        self.numbers = array("L")  # of the lines in the file, from 1
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                at = 0
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        self.offsets.append(at)
                        self.numbers.append(number)
                    at += len(line)
        except OSError as error:
            raise InvalidSetting(f"the batch {path} cannot be read: {error.strerror}", field="input") from None
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.offsets)

    def lines(self, skip: "Journal | None" = None) -> Iterator[tuple[int, bytes]]:
        """(place, line) of all those whose result is not there yet. skip: where results are; None: of all lines."""
        with self.path.open("rb") as file:
            for place, offset in enumerate(self.offsets):
                if skip is None or place not in skip:
                    file.seek(offset)
                    yield place, file.readline().strip()


class Journal:
    """Invariant: each result is in the file at most once, and `_offsets` says where."""

    def __init__(self, out: Path, source: Input, about: Mapping[str, str]):
        """Go on with what an earlier run left, or begin. about: what must be the same for results to belong together.

        Raises `InvalidSetting` when the journal is of another batch, or another run is writing it.
        """
        self.out = out
        self.path = partial_of(out)
        self._offsets = array("Q", bytes(8 * len(source)))
        self.count = 0
        header = {"intarsia_batch": FORMAT, "input_sha256": source.sha256, "lines": len(source), **about}
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InvalidSetting(f"{self.path} cannot be written: {error.strerror}", field="out") from None
        try:
            self._lock()
            self._recover(header)
        except BaseException:
            os.close(self._file)
            raise
        self.resumed = self.count

    def __contains__(self, place: int) -> bool:
        return self._offsets[place] != ABSENT

    @property
    def is_complete(self) -> bool:
        return self.count == len(self._offsets)

    def add(self, place: int, result: str) -> None:
        """Keep the result of a line. It is there, whatever happens to this process from now on."""
        assert place not in self, f"line {place + 1} has a result already"
        written = b'{"line":%d,"result":%s}\n' % (place + 1, result.encode())
        at = os.lseek(self._file, 0, os.SEEK_END)
        done = os.write(self._file, written)
        while done < len(written):
            done += os.write(self._file, written[done:])
        self._offsets[place] = at
        self.count += 1

    def finish(self) -> None:
        """All results are there: put them in order, and let the file appear at once."""
        assert self.is_complete
        draft = self.out.with_name(self.out.name + ".tmp")
        with draft.open("wb") as file, open(self._file, "rb", closefd=False) as journal:
            for place, offset in enumerate(self._offsets):
                file.write(_result_at(journal, offset, place) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.out)
        self.path.unlink()

    def close(self) -> None:
        """Keep it for the next run, against a failure of the machine as well."""
        os.fsync(self._file)
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidSetting(
                f"another run is writing {self.path}; wait for its end, or choose another --out", field="out"
            ) from None

    def _recover(self, header: Mapping[str, object]) -> None:
        with open(self._file, "rb", closefd=False) as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, json.dumps(header).encode() + b"\n", 0)
                return
            self._check(first, header)
            at = len(first)
            for line in file:
                place = _place_of(line, len(self._offsets))
                if place is None:
                    break  # the run was killed while it wrote this
                if place not in self:
                    self._offsets[place] = at
                    self.count += 1
                at += len(line)
        os.ftruncate(self._file, at)

    def _check(self, first: bytes, header: Mapping[str, object]) -> None:
        try:
            found = json.loads(first)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InvalidSetting(
                f"{self.path} is no journal of a batch; remove it, or choose another --out", field="out"
            )
        for name, value in header.items():
            if found.get(name) != value:
                raise InvalidSetting(
                    f"{self.path} holds the results of another batch: its {name} is {found.get(name)!r}, this one's "
                    f"{value!r}. Choose another --out, or begin anew with --restart.",
                    field="out",
                )


def partial_of(out: Path) -> Path:
    """The path of a result's journal."""
    return out.with_name(out.name + ".partial")


def begin_anew(out: Path) -> None:
    """Forget what earlier runs left."""
    for path in (out, partial_of(out)):
        path.unlink(missing_ok=True)


def _place_of(line: bytes, count: int) -> int | None:
    """The index of the batch line that a line of the journal answers; None if the line is cut."""
    if not line.endswith(b"\n"):
        return None
    try:
        place = json.loads(line)["line"] - 1
    except (ValueError, KeyError, TypeError):
        return None
    return place if 0 <= place < count else None


def _result_at(journal: BinaryIO, offset: int, place: int) -> bytes:
    journal.seek(offset)
    before = b'{"line":%d,"result":' % (place + 1)
    line = journal.readline()
    assert line.startswith(before) and line.endswith(b"}\n")
    return line[len(before) : -2]
