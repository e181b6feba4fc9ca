"""Calls of tools: how an answer is made to be one, and how one is found in an answer.

Models write calls in the form they were trained on; three are known, and told by how the answer goes:

    <tool_call>{"name": .., "arguments": ..}</tool_call>      Qwen, Hermes, Granite, ..
    [TOOL_CALLS][{"name": .., "arguments": ..}]               Mistral; the marker itself may be no text
    {"name": .., "parameters": ..}                            Llama

Where a call is required, the answer's form is a JSON schema, and nothing needs to be guessed.
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...errors import InvalidRequest
from ..text import could_begin
from .protocol import CalledFunction, ChatRequest, NamedTool, Tool, ToolCall
from .schemas import check_references, moved

MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")

BEGUN_CALL = re.compile(r'\{"name":"(?P<name>[^"]*)"(?:,"arguments":(?P<arguments>\{.*))?', re.DOTALL)
"""A call within the array that `_calls_schema` asks for, from its beginning to where the answer was cut."""


class ToolUse(NamedTuple):
    """What a request says about tools."""

    tools: Sequence[Tool]  # that the model is told of
    form: dict[str, Any] | None  # of an answer that must be a call
    called: str | None  # the one that must be called, if it is said which


def tool_use(body: ChatRequest) -> ToolUse | None:
    """None where no call is wanted. Raises `InvalidRequest`, naming the field."""
    tools = body.tools or []
    choice = body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice wants a call, and there are no tools", field="tool_choice")
        return None
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        at = next((n for n, tool in enumerate(tools) if tool.function.name == name), None)
        if at is None:
            known = ", ".join(tool.function.name for tool in tools)
            raise InvalidRequest(f"tool_choice names {name!r}; the tools are {known}", field="tool_choice")
        return ToolUse(tools, {"json_schema": json.dumps(_parameters(at, tools[at]))}, name)
    if choice == "required":
        return ToolUse(tools, {"json_schema": json.dumps(_calls_schema(tools, body.parallel_tool_calls))}, None)
    return ToolUse(tools, None, None)


def _parameters(at: int, tool: Tool) -> dict[str, Any]:
    """A function has the parameters that it has: no others, unless its schema says so. at: its place among the tools.
    Raises `InvalidRequest`, naming the field."""
    schema = {"additionalProperties": False} | (tool.function.parameters or {"type": "object", "properties": {}})
    check_references(schema, f"tools.{at}.function.parameters", f"the tool {tool.function.name!r}")
    return schema


def _calls_schema(tools: Sequence[Tool], is_parallel: bool | None) -> dict[str, Any]:
    """One call or more. Each tool's schema is a definition of its own, since what it refers to is within itself."""
    places = [f"#/$defs/{at}" for at in range(len(tools))]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": place}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool, place in zip(tools, places, strict=True)
    ]
    schema: dict[str, Any] = {
        "$defs": {str(at): moved(_parameters(at, tool), places[at]) for at, tool in enumerate(tools)},
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
    }
    if is_parallel is False:
        schema["maxItems"] = 1
    return schema


class CallReader:
    """Parts the text of one answer, as it grows, into what is said and what is called."""

    def __init__(self, use: ToolUse):
        self._use = use
        self._has_said = False
        self._waiting = ""  # may begin a marker
        self._held = ""  # calls, or what looks like them
        self._holds = use.form is not None

    def push(self, text: str) -> str:
        """What is said by now, beyond doubt."""
        if self._holds:
            self._held += text
            return ""
        text = self._waiting + text
        self._waiting = ""
        if not self._has_said:
            begun = text.lstrip()
            if begun in ("", "["):
                self._waiting = text
                return ""
            if begun.startswith(("{", "[{")):
                return self._hold(text, 0)
        found = [place for marker in MARKERS if (place := text.find(marker)) >= 0]
        if found:
            return self._hold(text, min(found))
        keep = could_begin(text, MARKERS)
        self._waiting = text[len(text) - keep :]
        return self._say(text[: len(text) - keep])

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest that is said, and the calls. An answer that was cut may end in a call whose arguments are cut."""
        if not self._holds:
            return self._waiting, []
        if self._use.called is not None:
            return "", [_call(self._use.called, self._held.strip())]
        if self._use.form is not None:
            return "", _required_calls(self._held)
        known = {tool.function.name for tool in self._use.tools}
        calls = [call for value in _json_values(self._held) for call in _calls(value, known)]
        return ("", calls) if calls else (self._held, [])

    def _hold(self, text: str, start: int) -> str:
        self._holds, self._held = True, text[start:]
        return self._say(text[:start])

    def _say(self, text: str) -> str:
        self._has_said = self._has_said or bool(text.strip())
        return text


def _required_calls(text: str) -> list[ToolCall]:
    """The calls of an answer that must be an array of them. Of one that is cut before its name is whole, nothing."""
    decoder, calls = json.JSONDecoder(), []
    at = text.find("{")
    while at >= 0:
        try:
            entry, at = decoder.raw_decode(text, at)
            calls.append(_call(entry["name"], json.dumps(entry["arguments"])))
        except ValueError:
            begun = BEGUN_CALL.match(text, at)
            return [*calls, _call(begun["name"], begun["arguments"] or "")] if begun is not None else calls
        at = text.find("{", at)
    return calls


def _json_values(text: str) -> list[Any]:
    """The JSON values in a text, one after the other; what is between them is passed over."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while starts := [n for n in (text.find("{", at), text.find("[{", at)) if n >= 0]:
        try:
            value, at = decoder.raw_decode(text, min(starts))
        except ValueError:
            at = min(starts) + 1
            continue
        found.append(value)
    return found


def _calls(value: Any, known: set[str]) -> list[ToolCall]:
    entries = value if isinstance(value, list) else [value]
    calls = []
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("name") not in known:
            return []
        arguments = entry.get("arguments", entry.get("parameters", {}))
        calls.append(_call(entry["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return calls


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=CalledFunction(name=name, arguments=arguments))
