"""The file of results: one JSON object a line, written as soon as it is known."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN, ENDED = "began", "ended"
"""Fields with a case's number. A case that began and did not end has ended its process."""

LOST = 3
"""Exit status of a process for which the device does nothing more, after an error of one case."""

FAILED, LEFT_OUT, WRONG = "failed", "left_out", "wrong"


class Lines:
    """Appends to a file, which other processes append to in turn."""

    def __init__(self, path: Path, run: str):
        """run: which one this is, since a file may hold several"""
        self.path, self._run = path, run

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"run": self._run, **row}, default=str) + "\n")
        if not {BEGAN, ENDED} & row.keys():
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    def of_run(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                row = json.loads(line)
                if row["run"] == self._run:
                    yield row

    def unfinished(self, job: str) -> tuple[int, str | None]:
        """Of a job: number of the first case that did not begin, and the name of the last one if it did not end."""
        number, open_case = 0, None
        for row in self.of_run():
            if row.get("job") != job:
                continue
            if BEGAN in row:
                number, open_case = row[BEGAN] + 1, row["case"]
            if ENDED in row:
                open_case = None
        return number, open_case


def short(number: float) -> float:
    """To four digits."""
    return float(f"{number:.4g}")


def told(error: Exception) -> str:
    """In a line, with the place in our code."""
    place, trace = "", error.__traceback__
    while trace is not None:
        name = Path(trace.tb_frame.f_code.co_filename)
        if "site-packages" not in name.parts:
            place = f"{name.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {place}: {text[:400]}"
