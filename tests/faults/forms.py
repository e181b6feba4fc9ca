# ruff: noqa: E501
"""JSON schemas and regular expressions that were made to take for ever, or all of the memory."""

import json
from functools import cache


@cache
def hostile_forms() -> list[tuple[str, str]]:
    """Kind and text of each."""
    regexes = [
        "(a+)+$", "(a*)*b", "(a|a)*$", "(a|aa)+$", "(.*)*x", "((a+)+)+$", "(x+x+)+y", "([a-z]+)*[0-9]", "(?:a?){50}a{50}",
        "(.*a){30}", "(.+)+(.+)+(.+)+z", "^(([a-z])+.)+[A-Z]([a-z])+$", "(\\d+){1,1000}", "[\\s\\S]*[\\s\\S]*[\\s\\S]*x",
        "(?=a)b", "(?!a)b", "(?<=a)b", "(a)\\1", "(?P<n>a)(?P=n)", "(?R)", "\\p{L}{1000}", "[[:alpha:]]{5000}", "(", ")", "[",
        "*", "+", "a{", "a{5,2}", "\\", "\\u", "[z-a]", "(?i)" + "É" * 500, "\\b" * 2000, "^" * 1000, "$" * 1000, "",
        "." * 50_000, "|" * 20_000, "a?" * 5000, "(" * 500 + ")" * 500, "(" * 20_000, "[^" + "a-z" * 5000 + "]",
        "(?s:.){0,65535}", "\\x{110000}", "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
    ]  # fmt: skip
    regexes += [f"(a{{1,{n}}}){{1,{n}}}" for n in (10, 50, 100, 300, 500, 1000)]
    regexes += [f"((a{{1,{n}}}){{1,{n}}}){{1,{n}}}" for n in (10, 50, 100, 300)]
    regexes += [f"[a-z]{{{n}}}" for n in (1000, 10_000, 100_000, 1_000_000, 10**9)]
    regexes += [f"(ab|cd|ef|gh){{{n}}}x" for n in (10, 100, 1000, 10_000)]
    regexes += [f".*a.{{{n}}}" for n in (5, 10, 15, 20, 25, 30, 50, 100)]
    regexes += ["(" * n + "a" + "+)" * n for n in (5, 20, 100, 1000)]
    regexes += ["|".join(f"w{k}" for k in range(n)) for n in (1000, 10_000, 50_000)]
    regexes += [f"(?:{'|'.join('a' * k for k in range(1, n))})*" for n in (20, 100, 400)]
    regexes += ["&".join(["(.*a.*)"] * n) for n in (2, 10, 50)]

    deep: object = {"type": "string"}
    schemas: list[object] = []
    for n in range(1, 301):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
        if n in (10, 100, 200, 300):
            schemas.append(deep)
    string = {"type": "string"}
    schemas += [
        {"$ref": "#"}, {"$ref": "#/$defs/nothing"}, {"$ref": "http://127.0.0.1:1/schema.json"}, {"$ref": "file:///etc/passwd"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#"}}, {"type": "object", "additionalProperties": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"allOf": [{"$ref": "#"}]}, {"not": {}}, {"not": {"$ref": "#"}},
        {"type": "nothing"}, {"type": ["string"] * 5000}, {"type": 5}, {"enum": []}, {"const": None}, {"properties": 5},
        {"type": "string", "minLength": 10**9}, {"type": "string", "maxLength": 10**18}, {"type": "string", "minLength": -1},
        {"type": "string", "minLength": 50, "maxLength": 2}, {"type": "array", "minItems": 10**9, "items": string},
        {"type": "array", "minItems": 500, "maxItems": 100_000, "items": {"type": "array", "minItems": 500, "items": string}},
        {"type": "integer", "minimum": 10**30, "maximum": 10**31}, {"type": "integer", "multipleOf": 0},
        {"type": "integer", "minimum": 5, "maximum": 2}, {"type": "number", "multipleOf": 1e-300},
        {"type": "string", "pattern": "(a+)+$"}, {"type": "string", "pattern": "("}, {"type": "string", "format": "regex"},
        {"type": "string", "pattern": "a{1,100000}b{1,100000}"}, {"type": "object", "patternProperties": {"(a+)+": string}},
        {"type": "object", "propertyNames": {"pattern": "(.*)*"}}, {"if": {"$ref": "#"}, "then": {"$ref": "#"}},
        {"type": "object", "required": [f"k{n}" for n in range(5000)]}, True, False, [], 5, "x", None,
        {"type": "object", "properties": {f"k{n}": string for n in range(5000)}, "additionalProperties": False},
        {"enum": [f"v{n}" for n in range(50_000)]}, {"enum": ["x" * 100_000]}, {"const": "y" * 500_000},
        {"anyOf": [{"type": "object", "properties": {f"k{n}": string}, "required": [f"k{n}"]} for n in range(2000)]},
        {"oneOf": [{"const": n} for n in range(3000)]}, {"uniqueItems": True, "type": "array"},
    ]  # fmt: skip
    schemas += [
        {"allOf": [{"anyOf": [{"properties": {f"p{n}_{k}": string}} for k in range(2)]} for n in range(m)]}
        for m in (5, 10, 16, 20, 24)
    ]
    schemas += [{"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}"} for n in range(m)]} for m in (2, 5, 10, 20)]
    schemas += [
        {
            "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(m)} | {f"d{m}": string},
            "$ref": "#/$defs/d0",
        }
        for m in (10, 20, 30)
    ]
    schemas += [
        {"type": "array", "prefixItems": [string] * n, "items": {"anyOf": [string, {"type": "number"}]}}
        for n in (5, 2000)
    ]
    schemas += [{"type": "string", "minLength": n, "maxLength": n + 5} for n in (10, 1000, 100_000)]
    schemas += [{"type": "number", "minimum": -(10**n), "maximum": 10**n} for n in (5, 50, 300)]
    forms = [("regex", text) for text in regexes] + [("json", json.dumps(schema)) for schema in schemas]
    forms += [
        ("json", text) for text in ("", "{", "nonsense", "[" * 10_000, "\x00", '{"type":"object"', "1e999", "NaN")
    ]
    forms += [("json", json.dumps({"type": "string", "pattern": text})) for text in regexes if len(text) < 2000]
    forms += [("json", '{"type":"array","items":' * n + '{"type":"string"}' + "}" * n) for n in (500, 5000, 50_000)]
    return forms
