"""Reads a folder of cases: one JSON file for each family."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from intarsia.deploy.formats.chosen import by_name, by_template
from intarsia.deploy.formats.described import Format


class Case(NamedTuple):
    """One output, and what is to be read in it."""

    id: str
    form: Format | None  # None: the file's format is none that is known
    special_tokens: tuple[str, ...]  # of the family
    given: dict[str, Any]  # the case as the file has it

    @property
    def tools(self) -> dict[str, dict[str, Any] | None]:
        """The parameters of each tool, by name."""
        functions = [tool.get("function", tool) for tool in self.given.get("tools") or []]
        return {function["name"]: function.get("parameters") for function in functions}

    @property
    def needs_tokens(self) -> bool:
        """Whether only token ids tell what is a marker."""
        return "needs-token-ids" in self.given.get("tags", ())


def cases_in(folder: Path) -> Iterator[Case]:
    """The cases of all files of a folder, in the order of their names."""
    for path in sorted(folder.glob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        for given in file.get("cases", ()):
            form = form_of(file, given["format"], folder)
            yield Case(given["id"], form, tuple(file.get("special_tokens", ())), given)


def form_of(file: dict[str, Any], name: str, folder: Path) -> Format | None:
    """The product's format for one that a file names: by its name, by what the file says of it, or by its templates."""
    described = file.get("formats", {})
    text = str(described.get(name, "")).replace("\\n", "\n") if isinstance(described, dict) else ""
    found = by_name(name)
    if found is None and text:
        found = by_template(text)
    templates = [folder.parent / "templates" / f"{each}.jinja" for each in file.get("templates", ())]
    for path in templates if found is None else ():
        if path.is_file() and (found := by_template(path.read_text(encoding="utf-8"))) is not None:
            break
    return found or by_name(file.get("family", ""))
