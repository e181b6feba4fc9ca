"""What was run and what it answered: a file of results per client, and the page made of all of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .environments import FOLDER, ROOT
from .table import CLIENTS, Client

PAGE = ROOT / "docs" / "clients.md"
RESULTS = FOLDER / "results"

HEAD = """# Clients

Programs that know nothing of Intarsia, unmodified, each in an environment of its own, against `intarsia serve` with the
tests' model: random weights, a token per byte, 32,768 tokens long (262,144 for coding agents). So what is judged is the
protocol: that answers have the shape which the client wants, that tools are called, that schemas hold, that errors
become the client's own. Where a client acts on the words, they are held to a form that it can use; for coding agents a
server between adds that to their requests. This page is written by `make test-clients` (`tests/clients`); it needs the
network, and is no part of `make test`.

"""


class Answer(NamedTuple):
    """Of one probe."""

    probe: str
    ok: bool
    answered: str


class Result(NamedTuple):
    """Of one client. Without versions it could not be installed, and `note` is the reason."""

    versions: dict[str, str]
    answers: tuple[Answer, ...]
    note: str = ""

    @property
    def is_fine(self) -> bool:
        return bool(self.answers) and not self.note and all(answer.ok for answer in self.answers)


def save(client: Client, result: Result) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{client.name}.json").write_text(json.dumps(result))


def load(client: Client) -> Result | None:
    path = RESULTS / f"{client.name}.json"
    if not path.exists():
        return None
    versions, answers, note = json.loads(path.read_text())
    return Result(versions, tuple(Answer(*answer) for answer in answers), note)


def write(page: Path = PAGE) -> None:
    page.write_text(text([(client, load(client)) for client in CLIENTS]))


def text(results: Sequence[tuple[Client, Result | None]]) -> str:
    """The page, of all clients in their order."""
    lines = ["| client | versions | probes that hold |", "|---|---|---|"]
    lines += [
        f"| {client.name} ({client.source}) | {_versions(result)} | {_sum(result)} |" for client, result in results
    ]
    lines += ["", "## What each probe answered", "", "| client | probe | | answered |", "|---|---|---|---|"]
    for client, result in results:
        for answer in result.answers if result else ():
            held = "holds" if answer.ok else "**fails**"
            lines.append(f"| {client.name} | {_cell(answer.probe)} | {held} | {_cell(answer.answered)} |")
    return HEAD + "\n".join(lines) + "\n"


def _versions(result: Result | None) -> str:
    if result is None or not result.versions:
        return ""
    return ", ".join(f"{name} {version}" for name, version in result.versions.items())


def _sum(result: Result | None) -> str:
    if result is None:
        return "not run"
    if not result.versions:
        return f"cannot be installed here: {_cell(result.note)}"
    held = f"{sum(answer.ok for answer in result.answers)} of {len(result.answers)}"
    return f"{held}; {_cell(result.note)}" if result.note else held


def _cell(words: str) -> str:
    """Fit for a cell of a table, whatever a client said."""
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;")
