"""What a batch asks and what came of it, counted: before anything is loaded, and when all results are there."""

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import InvalidSetting
from .journal import Input
from .lines import Line, read_line


@dataclass(slots=True)
class Survey:
    """Counts the lines of a batch."""

    lines: int = 0
    strangers: Counter[str] = field(default_factory=Counter)  # lines by the model that they name, where it is another
    first_stranger: int = 0  # its line in the file
    duplicates: int = 0  # lines whose custom_id an earlier one has
    first_duplicate: tuple[int, int, str] = (0, 0, "")  # its line, that of the earlier one, and what both are called

    def notes(self, served: str) -> Iterator[str]:
        """What the batch's owner had better know. Raises `InvalidSetting` if no line can be answered."""
        if self.strangers:
            name, count = self.strangers.most_common(1)[0]
            asked = f"{count:,} of {self.lines:,} lines ask for the model {name[:80]!r}, the first is line "
            asked += f"{self.first_stranger}; this run serves {served!r}"
            if self.strangers.total() == self.lines:
                raise InvalidSetting(
                    f"{asked}. Give --served-model-name {name[:80]}, or leave `model` out of the lines.",
                    field="served_model_name",
                )
            yield f"{asked}. They will be refused."
        if self.duplicates:
            line, earlier, name = self.first_duplicate
            have = "1 line has" if self.duplicates == 1 else f"{self.duplicates:,} lines have"
            yield (
                f"{have} the custom_id of an earlier one, so that it does not tell their results apart: "
                f"line {line} and line {earlier} are both {name[:80]!r}"
            )


def survey(source: Input, served: str) -> Survey:
    """Read all lines once. served: what the model is called."""
    found, seen = Survey(), dict[int, int]()  # by the hash of a custom_id: 60 bytes a line, whatever it is called
    for place, text in source.lines():
        found.lines += 1
        line = read_line(text, source.numbers[place])
        if not isinstance(line, Line):
            continue
        model = line.body.get("model")
        if isinstance(model, str) and model != served:
            found.first_stranger = found.first_stranger or source.numbers[place]
            found.strangers[model] += 1
        earlier = seen.setdefault(hash(line.custom_id), source.numbers[place])
        if earlier != source.numbers[place]:
            if not found.duplicates:
                found.first_duplicate = source.numbers[place], earlier, line.custom_id
            found.duplicates += 1
    return found


NO_REQUEST = "line"
"""What stands in the place of a status for lines that could not be asked."""


@dataclass(slots=True)
class Outcome:
    """Counts the results of all lines, once each has its result."""

    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by status, or `NO_REQUEST`
    first: str = ""  # what the first refusal says

    def __str__(self) -> str:
        told = f"{self.answered:,} answered, {self.refused.total():,} refused"
        if self.refused:
            kinds = ", ".join(f"{status} x{count:,}" for status, count in self.refused.most_common())
            told += f" ({kinds}): first at {self.first}"
        return told


def outcome(out: Path, numbers: "array[int]") -> Outcome:
    """Count finished results. numbers: those of the lines that they answer."""
    found = Outcome()
    with out.open("rb") as file:
        for number, text in zip(numbers, file):
            row = json.loads(text)
            response = row["response"]
            if response is not None and response["status_code"] == 200:
                found.answered += 1
                continue
            error = row["error"] if response is None else response["body"]["error"]
            if not found.refused:
                message = error["message"] if isinstance(error, dict) else str(error)
                found.first = f"line {number}: {message.removeprefix(f'line {number}: ')}"
            found.refused[NO_REQUEST if response is None else str(response["status_code"])] += 1
    return found
