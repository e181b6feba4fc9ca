"""Values that a model writes as bare text, made JSON as the tool's schema wants them.

"5" for a string and 5 for an integer; null only where the schema allows it; what does not fit stays text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .json_values import NUMBER

MOST_REFERENCES = 32
"""Followed from one schema to another, which bounds those that lead back to themselves."""

KINDS = ("null", "boolean", "integer", "number", "object", "array")
"""In the order in which a text is tried as one of them, before it is a string."""

INTEGER = re.compile(r"-?(0|[1-9]\d{0,400})(\.0+)?")

LOOSE_INTEGER = re.compile(r"[-+]?\d{1,400}(\.0+)?")
"""What is one where nothing but an integer may be."""

FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
LARGEST = 1e300
"""A number beyond it stays text, which has all of its digits."""

BOOLEANS = {"true": "true", "false": "false"}
NULLS = ("null", "none", "nil")


class Schema:
    """The parameters of one tool, as far as they decide what a text means."""

    def __init__(self, parameters: Mapping[str, Any] | None):
        self._root = parameters if isinstance(parameters, Mapping) else {}
        self._of: Mapping[str, Any] = _mapping(self._root.get("properties"))

    def knows(self, key: str) -> bool:
        return key in self._of

    @property
    def has_parameters(self) -> bool:
        return bool(self._of)

    def kinds(self, key: str) -> frozenset[str] | None:
        """What the parameter may be. None: the schema does not say."""
        if key not in self._of:
            return None
        return self._kinds(self._of[key], MOST_REFERENCES)

    def is_text(self, key: str) -> bool:
        """Whether whatever is written is a string."""
        return self.kinds(key) == {"string"}

    def _kinds(self, schema: Any, references: int) -> frozenset[str] | None:
        if not isinstance(schema, Mapping) or not references:
            return None
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._kinds(self._at(reference), references - 1)
        kind = schema.get("type")
        if isinstance(kind, str):
            return frozenset({kind}) | ({"null"} if schema.get("nullable") is True else set())
        if isinstance(kind, Sequence):
            return frozenset(each for each in kind if isinstance(each, str))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, Sequence):
            return frozenset(map(_kind_of, values))
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(inner := schema.get(name), Sequence):
                found = [self._kinds(each, references - 1) for each in inner]
                known = [each for each in found if each is not None]
                return frozenset().union(*known) if known and (name == "allOf" or len(known) == len(found)) else None
        if "properties" in schema:
            return frozenset({"object"})
        return frozenset({"array"}) if "items" in schema else None

    def _at(self, reference: str) -> Any:
        """What a pointer into the schema points at; None if nothing."""
        found: Any = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def typed(text: str, kinds: frozenset[str] | None, is_json: bool | None = None) -> str:
    """The JSON of a value that was written as text.

    kinds: what the schema allows; None where it does not say, and then is_json decides, which some formats tell beside
    the value. Without either it is a string.
    """
    if kinds is None:
        kinds = frozenset({*KINDS, "string"}) if is_json else frozenset({"string"})
    bare = text.strip()
    for kind in KINDS:
        if kind in kinds or (kind == "integer" and "number" in kinds):
            found = _as(kind, bare, is_loose="string" not in kinds)
            if found is not None:
                return found
    return json.dumps(text, ensure_ascii=False)


def _as(kind: str, bare: str, *, is_loose: bool) -> str | None:
    match kind:
        case "null":
            return "null" if bare.lower() in NULLS else None
        case "boolean":
            return BOOLEANS.get(bare.lower())
        case "integer":
            pattern = LOOSE_INTEGER if is_loose else INTEGER
            return str(int(bare.partition(".")[0])) if pattern.fullmatch(bare) else None
        case "number":
            if NUMBER.fullmatch(bare):
                return bare
            is_number = is_loose and FLOAT.fullmatch(bare) is not None
            return json.dumps(float(bare)) if is_number and abs(float(bare)) < LARGEST else None
        case _:
            return _collection(kind, bare)


def _collection(kind: str, bare: str) -> str | None:
    if not bare.startswith("{" if kind == "object" else "["):
        return None
    try:
        json.loads(bare)
        return bare
    except (ValueError, RecursionError):
        return _pythons(bare)


def _pythons(bare: str) -> str | None:
    """A list or dict as Python writes it."""
    from .literals import as_json

    return as_json(bare)


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case Mapping():
            return "object"
        case list() | tuple():
            return "array"
        case _:
            return "string"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
