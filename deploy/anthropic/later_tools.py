"""Tools that the model hears of within the conversation, so that the beginning of its prompt stays as it is.

A tool with `defer_loading` is not told to the chat template. The model reads its definition where a message brings it:
in the result of a search for tools, or where the system adds it. From there on it may be called.
"""

import json
from collections.abc import Sequence
from typing import ClassVar

from ...errors import InvalidRequest
from ..openai.protocol import Function, Tool
from .protocol import MessageTool

ADDED = "This tool can be called from here on:"
REMOVED = "This tool can no longer be called: "


class LaterTool(Tool):
    """One that the chat template is not told of."""

    is_in_template: ClassVar[bool] = False


class OfferedTools:
    """The tools that may be called, while a conversation is read from its beginning to its end.

    Changes return what the model reads of them. They raise `InvalidRequest` for a tool that is not known.
    """

    def __init__(self, tools: Sequence[MessageTool]):
        self._known = {tool.name: tool for tool in tools}
        self._offered = {tool.name: _as_chat_has(tool, Tool) for tool in tools if not tool.defer_loading}
        self._read = set(self._offered)  # whose definitions the model has read: each once, however often it is added

    def offered(self) -> list[Tool]:
        return [*self._offered.values()]

    def add(self, name: str) -> str:
        """A tool that the request defines, or that was added before."""
        tool = _as_chat_has(self._definition(name), LaterTool)
        self._offered.setdefault(name, tool)
        if name in self._read:
            return f"{ADDED} {name}"
        self._read.add(name)
        return f"{ADDED}\n{json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False)}"

    def define(self, tool: MessageTool) -> str:
        """A tool that comes with its definition. It takes the place of one by that name."""
        self._known[tool.name] = tool
        self._offered.pop(tool.name, None)
        self._read.discard(tool.name)
        return self.add(tool.name)

    def remove(self, name: str) -> str:
        self._offered.pop(self._definition(name).name, None)
        return REMOVED + name

    def _definition(self, name: str) -> MessageTool:
        if name not in self._known:
            known = ", ".join(self._known) or "none"
            raise InvalidRequest(f"messages refer to the tool {name!r}; the tools are {known}", field="messages")
        return self._known[name]


def _as_chat_has(tool: MessageTool, kind: type[Tool]) -> Tool:
    """Chat's own requests may not have names that long."""
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = parameters | {"examples": tool.input_examples}
    function = Function.model_construct(
        name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict
    )
    return kind(type="function", function=function, cache_control=None)
