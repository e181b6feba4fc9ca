"""Calls of tools: how an answer is made to be one, and how one is found in an answer.

Models write calls in the form they were trained on; three are known, and an answer shows which it is by how it begins:

    <tool_call>{"name": .., "arguments": ..}</tool_call>      Qwen, Hermes, Granite, ..
    [TOOL_CALLS][{"name": .., "arguments": ..}]               Mistral; the marker itself may be no text
    {"name": .., "parameters": ..}                            Llama

Where a call is required, the answer's form is a JSON schema, and nothing needs to be guessed.
"""

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...errors import InvalidRequest
from ..formats.grammar import Wanted
from ..front_end.detokenize import could_begin
from .protocol import CalledFunction, ChatRequest, NamedTool, Tool, ToolCall
from .schemas import Shape, check_references, closed, moved

MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")

HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""How most calls begin, up to their arguments."""

PLACE = re.compile(r"#/\$defs/(?P<tool>\d+)(?P<rest>.*)", re.DOTALL)
"""A pointer into the schema that `_calls_schema` makes, where it lies within that of a tool."""

BEGUN_CALL = re.compile(r'\{"name":"(?P<name>[^"]*)"(?:,"arguments":(?P<arguments>.*))?', re.DOTALL)
"""A call within the array that `_calls_schema` asks for, from its beginning to where the answer was cut."""

OPENINGS = ("", "{", '{"')
"""Beginnings of arguments that say nothing yet."""

LONGEST_HEAD_CHARS = 512

MOST_NAMES = 16
"""The most names of tools in an error."""

MOST_FALSE_BEGINNINGS = 16
"""The most braces in a text that begin no object: from each the text may be read to its end."""


NewId = Callable[[str], str]
"""Makes the id of a call out of the name of its tool."""


class CallPiece(NamedTuple):
    """What came of a call: its name with the first piece, and its arguments as they are made."""

    place: int  # among the calls of the answer
    id: str
    name: str | None  # with the first piece
    arguments: str


class ToolUse(NamedTuple):
    """What a request says about tools."""

    tools: Sequence[Tool]  # offered to the model
    shaped: Shape  # how their schemas are shaped
    form: dict[str, Any] | None  # of an answer that must be a call
    called: str | None  # the tool that must be called, if the request names one


def tool_use(body: ChatRequest, shaped: Shape = closed) -> ToolUse | None:
    """Read the fields about tools; None where no call is wanted. Raises `InvalidRequest`, naming the field."""
    tools = body.tools or []
    choice = body.tool_choice
    # Without tools nothing may be chosen.
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequest(
                "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified.",
                field="tool_choice",
            )
        return None
    if choice == "none":
        return None
    # A required call is a form, and a request has one form.
    if choice not in (None, "auto") and body.structured_outputs is not None:
        raise InvalidRequest(
            "tool_choice and structured_outputs both say what the answer looks like; give one of them",
            field="structured_outputs",
        )
    # A named tool: the answer is its arguments. Any tool: the answer is an array of calls. Else the answer is free.
    if isinstance(choice, NamedTool):
        name = choice.function.name
        at = next((n for n, tool in enumerate(tools) if tool.function.name == name), None)
        if at is None:
            known = ", ".join(tool.function.name for tool in tools)
            raise InvalidRequest(f"tool_choice names {name!r}; the tools are {known}", field="tool_choice")
        return ToolUse(tools, shaped, {"json_schema": json.dumps(_parameters(at, tools[at], shaped))}, name)
    if choice == "required":
        form = {"json_schema": json.dumps(_calls_schema(tools, body.parallel_tool_calls, shaped))}
        return ToolUse(tools, shaped, form, None)
    return ToolUse(tools, shaped, None, None)


def wanted_tools(use: ToolUse) -> list[Wanted]:
    """The tools that may be called, with the parameters that their calls are held to."""
    return [
        Wanted(tool.function.name, _parameters(at, tool, use.shaped))
        for at, tool in enumerate(use.tools)
        if use.called in (None, tool.function.name)
    ]


@contextlib.contextmanager
def naming_tools(use: ToolUse) -> Iterator[None]:
    """Make complaints about a tool's schema name the tool, and its field of the request."""
    try:
        yield
    except InvalidRequest as error:
        if error.field == "lark":
            error.field = "tools"
            error.message = error.message.replace("lark", "the grammar of the tools' calls", 1)
        if error.field == "json_schema" and use.form is not None:
            _name_tool(error, use)
        raise


def _name_tool(error: InvalidRequest, use: ToolUse) -> None:
    found = PLACE.match(str(error.details.get("place", "")))
    # Which tool: the one that must be called, the one within whose schema the fault lies, or the only one.
    if use.called is not None:
        at, place = [tool.function.name for tool in use.tools].index(use.called), error.details.get("place", "")
    elif found is not None:
        at, place = int(found["tool"]), f"#{found['rest']}" if found["rest"] else ""
    elif len(use.tools) == 1:
        at, place = 0, ""
    else:
        error.field = "tools"
        return
    error.field = f"tools.{at}.function.parameters"
    complaint = str(error.details.get("complaint", error.message))
    if complaint.startswith("json_schema "):
        whose = f"the parameters of the tool {use.tools[at].function.name!r}"
        error.message = complaint.replace("json_schema", whose, 1) + (f", at {place}" if place else "")


def _parameters(at: int, tool: Tool, shaped: Shape) -> dict[str, Any]:
    """A function has the parameters that it has: no others, unless its schema says so. at: its place among the tools.
    Raises `InvalidRequest`, naming the field."""
    given = tool.function.parameters or {"type": "object", "properties": {}}
    schema = {"additionalProperties": False} | shaped(given)
    check_references(schema, f"tools.{at}.function.parameters", f"the tool {tool.function.name!r}")
    return schema


def _calls_schema(tools: Sequence[Tool], is_parallel: bool | None, shaped: Shape) -> dict[str, Any]:
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
        "$defs": {str(at): moved(_parameters(at, tool, shaped), places[at]) for at, tool in enumerate(tools)},
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
    }
    if is_parallel is False:
        schema["maxItems"] = 1
    return schema


class CallReader:
    """Parts the text of one answer, as it grows, into words and calls."""

    def __init__(self, use: ToolUse, new_id: NewId | None = None):
        """new_id: makes the id of a call out of the name of its tool."""
        new_id = new_id or _new_id
        self._use = use
        self._has_text = False
        self._waiting = ""  # may begin a marker
        self._held: list[str] = []  # of a call, or what looks like one; nothing once a call has begun
        self._holds = use.form is not None
        self._calls = (
            _NamedCall(use.called, new_id)
            if use.called is not None
            else _Calls({tool.function.name for tool in use.tools}, new_id)
        )

    @property
    def has_called(self) -> bool:
        return self._calls.count > 0

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Take more text. Returns the text and the pieces of calls that are certain by now."""
        if self._holds:
            return "", self._hold(text)
        text = self._waiting + text
        self._waiting = ""
        if not self._has_text:
            begun = text.lstrip()
            if begun in ("", "["):
                self._waiting = text
                return "", []
            if begun.startswith(("{", "[{")):
                return "", self._hold(text)
        found = [place for marker in MARKERS if (place := text.find(marker)) >= 0]
        if found:
            return self._say(text[: min(found)]), self._hold(text[min(found) :])
        keep = could_begin(text, MARKERS)
        self._waiting = text[len(text) - keep :]
        return self._say(text[: len(text) - keep]), []

    def finish(self) -> tuple[str, list[CallPiece]]:
        """The rest. An answer that was cut may end in a call whose arguments are cut."""
        if not self._holds:
            return self._waiting, []
        pieces = self._calls.finish(is_required=self._use.form is not None)
        return ("" if self.has_called or self._use.form is not None else "".join(self._held)), pieces

    def _hold(self, text: str) -> list[CallPiece]:
        self._holds = True
        pieces = self._calls.push(text)
        if self.has_called:
            self._held = []
        else:
            self._held.append(text)
        return pieces

    def _say(self, text: str) -> str:
        self._has_text = self._has_text or bool(text.strip())
        return text


def calls_of(pieces: Iterable[CallPiece]) -> list[ToolCall]:
    """Whole calls out of all their pieces."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if piece.name is not None:
            calls[piece.place] = ToolCall(id=piece.id, function=CalledFunction(name=piece.name, arguments=""))
        calls[piece.place].function.arguments += piece.arguments
    return [*calls.values()]


class _NamedCall:
    """One call, whose arguments are all that comes. It begins with the first arguments that say something: an answer
    that is cut before that has no call."""

    def __init__(self, name: str, new_id: NewId):
        self.count = 0
        self._name = name
        self._id = new_id(name)
        self._waiting = ""  # before the call begins, its opening; later, space that may be the end of the answer

    def push(self, text: str) -> list[CallPiece]:
        text = self._waiting + text
        if not self.count:
            text = text.lstrip()
            if "".join(text.split()) in OPENINGS:
                self._waiting = text
                return []
        arguments = text.rstrip()
        self._waiting = text[len(arguments) :]
        return [self._piece(arguments)] if arguments else []

    def finish(self, *, is_required: bool) -> list[CallPiece]:
        return []

    def _piece(self, arguments: str) -> CallPiece:
        is_first, self.count = not self.count, 1
        return CallPiece(0, self._id, self._name if is_first else None, arguments)


class _Calls:
    """Finds the calls in a text as it grows: JSON objects that have the name of a tool. What is between them is passed
    over."""

    def __init__(self, known: Collection[str], new_id: NewId):
        self.count = 0
        self._known = known
        self._new_id = new_id
        self._text = ""  # that has not been looked at
        self._object: _Object | None = None  # that may be a call
        self._seen: list[str] = []  # of it
        self._seen_chars = 0
        self._id = ""
        self._arguments: _Object | None = None  # whose pieces are being sent

    def push(self, text: str) -> list[CallPiece]:
        self._text += text
        pieces: list[CallPiece] = []
        while self._go_on(pieces) if self._arguments is not None else self._begin(pieces):
            pass
        return pieces

    def finish(self, *, is_required: bool) -> list[CallPiece]:
        """is_required: the text is what `_calls_schema` asks for, and a call that is cut is a call all the same."""
        if self._arguments is not None:
            return []
        text = "".join(self._seen) if self._object is not None else ""
        if not is_required:
            whole = [call for value in _json_values(text[1:]) for call in _calls(value, self._known)]
            return [self._first(name, arguments) for name, arguments in whole]
        begun = BEGUN_CALL.match(text)
        return [self._first(begun["name"], begun["arguments"] or "")] if begun is not None else []

    def _begin(self, pieces: list[CallPiece]) -> bool:
        """Look for the next call. Returns whether there is more to read."""
        if self._object is None:
            at = self._text.find("{")
            self._text = self._text[at:] if at >= 0 else ""
            if not self._text:
                return False
            self._object, self._seen, self._seen_chars = _Object(), [], 0
        if self._seen_chars < LONGEST_HEAD_CHARS:
            text = "".join(self._seen) + self._text
            head = HEAD.match(text)
            if head is not None and head["name"] in self._known:
                pieces.append(self._first(head["name"], ""))
                self._text, self._arguments, self._object = text[head.end() :], _Object(), None
                return True
        end = self._object.end_in(self._text)
        self._seen.append(self._text[:end])
        self._seen_chars += end
        self._text = self._text[end:]
        if not self._object.is_whole:
            return False
        self._object = None
        found = _json_values("".join(self._seen))
        pieces += [self._first(name, arguments) for value in found for name, arguments in _calls(value, self._known)]
        return True

    def _go_on(self, pieces: list[CallPiece]) -> bool:
        assert self._arguments is not None
        end = self._arguments.end_in(self._text)
        arguments, self._text = self._text[:end], self._text[end:]
        if self._arguments.is_whole:
            self._arguments = None
        if arguments:
            if pieces and pieces[-1].id == self._id:
                pieces[-1] = pieces[-1]._replace(arguments=pieces[-1].arguments + arguments)
            else:
                pieces.append(CallPiece(self.count - 1, self._id, None, arguments))
        return self._arguments is None

    def _first(self, name: str, arguments: str) -> CallPiece:
        self.count += 1
        self._id = self._new_id(name)
        return CallPiece(self.count - 1, self._id, name, arguments)


class _Object:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    @property
    def is_whole(self) -> bool:
        return self._depth < 0

    def end_in(self, text: str) -> int:
        """The place behind it; the text's end, if it goes on."""
        for place, char in enumerate(text):
            if self._in_text:
                self._in_text = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
                if not self._depth:
                    self._depth = -1
                    return place + 1
        return len(text)


def _json_values(text: str) -> list[Any]:
    """The JSON objects in a text, one after the other; what is between them is passed over."""
    decoder, found, at, failed = json.JSONDecoder(), [], 0, 0
    while (start := text.find("{", at)) >= 0 and failed < MOST_FALSE_BEGINNINGS:
        try:
            value, at = decoder.raw_decode(text, start)
            found.append(value)
        except (ValueError, RecursionError):
            at, failed = start + 1, failed + 1
    return found


def _calls(value: Any, known: Collection[str]) -> list[tuple[str, str]]:
    """Names and arguments, where the value is a call or some."""
    entries = value if isinstance(value, list) else [value]
    calls = []
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("name") not in known:
            return []
        arguments = entry.get("arguments", entry.get("parameters", {}))
        calls.append((entry["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return calls


def _new_id(name: str) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
