"""JSON schemas within each other: what is put into another schema goes on referring to itself."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ...errors import InvalidRequest

DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data: a "$ref" in them refers to nothing."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name: a name may be "$ref"."""

OPENS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref"})
"""Keywords that say which properties an object may have beside those it names."""

Shape = Callable[[Any], Any]
"""What becomes of a client's schema before an answer is held to it."""

TOGETHER = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas"})
"""Keywords whose schemas hold for the same object as their own one."""


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


def as_given(schema: Any) -> Any:
    """Objects may have properties that the schema does not name, as JSON Schema has it."""
    return schema


def closed(schema: Any) -> Any:
    """The schema with objects that have the properties they name and no others, where it does not say what else they
    may have. Models would invent names for as long as they may, and few authors of schemas want that. Parts of an
    `allOf`, which describe one object together, stay open."""
    return _closed(schema, "#", set(_parts_of_others(schema)))


def _closed(schema: Any, place: str, parts: Collection[str]) -> Any:
    """place: where it stands, as a pointer. parts: places of schemas that are parts of others."""
    if isinstance(schema, list):
        return [_closed(each, f"{place}/{n}", parts) for n, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        inner = f"{place}/{name}"
        if name in DATA or (name in TOGETHER and _has_parts(schema)):
            found[name] = value
        elif name in NAMED and isinstance(value, dict):
            found[name] = {each: _closed(one, f"{inner}/{each}", parts) for each, one in value.items()}
        else:
            found[name] = _closed(value, inner, parts)
    if "properties" in schema and place not in parts and not (OPENS & schema.keys() or _has_parts(schema)):
        found["additionalProperties"] = False
    return found


def _has_parts(schema: Mapping[str, Any]) -> bool:
    """Is an object described by several schemas together? An `allOf` of one, beside words about it, is that one."""
    together = TOGETHER & schema.keys()
    return bool(together) and (together != {"allOf"} or len(schema["allOf"]) != 1 or "properties" in schema)


def _parts_of_others(schema: Any) -> Iterator[str]:
    """Places of the definitions that are parts of others."""
    if isinstance(schema, list):
        for each in schema:
            yield from _parts_of_others(each)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in TOGETHER and _has_parts(schema):
                yield from _references(value)
            if name not in DATA:
                yield from _parts_of_others(
                    list(value.values()) if name in NAMED and isinstance(value, dict) else value
                )


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
