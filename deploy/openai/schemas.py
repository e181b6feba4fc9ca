"""JSON schemas within each other: what is put into another schema goes on referring to itself."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from ...errors import InvalidRequest

DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data: a "$ref" in them refers to nothing."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name: a name may be "$ref"."""


def moved(schema: Any, place: str) -> Any:
    """The schema as it stands at `place`, a pointer such as "#/$defs/0": what refers to its own root ("#", "#/...")
    refers to that place. A part with an `$id` is a root of its own and stays as it is."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict) or "$id" in schema:
        return schema
    return {name: _moved_value(name, value, place) for name, value in schema.items()}


def _moved_value(name: str, value: Any, place: str) -> Any:
    if name in DATA:
        return value
    if name == "$ref" and isinstance(value, str):
        return place + value[1:] if value == "#" or value.startswith("#/") else value
    if name in NAMED and isinstance(value, dict):
        return {each: moved(inner, place) for each, inner in value.items()}
    return moved(value, place)


def check_references(schema: Any, field: str, whose: str) -> None:
    """Raises `InvalidRequest`, naming the field, if the schema refers to a part of itself that it does not have.
    whose: what has this schema, in words."""
    for reference in _references(schema):
        if not _exists(schema, reference):
            raise InvalidRequest(
                f"{whose} refers to {reference[:80]!r}, which its schema does not have; add it, or leave the $ref out",
                field=field,
            )


def _references(schema: Any) -> set[str]:
    """Pointers from the schema into itself."""
    if isinstance(schema, list):
        return set().union(*map(_references, schema))
    if not isinstance(schema, dict) or "$id" in schema:
        return set()
    found = set()
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str):
            found |= {value} if value.startswith("#/") else set()
        elif name in NAMED and isinstance(value, dict):
            found |= _references(list(value.values()))
        elif name not in DATA:
            found |= _references(value)
    return found


def _exists(schema: Any, reference: str) -> bool:
    for step in unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return False
    return True
