"""A request in the words of chat, which has one conversation for both."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ...errors import InvalidRequest
from ..openai.protocol import ChatRequest, Function, Tool
from ..openai.requests import chat_of
from .protocol import (
    AnyChoice,
    Asking,
    AssistantMessage,
    AutoChoice,
    ImageBlock,
    MessagesRequest,
    MessageTool,
    NoChoice,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ToolNameChoice,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
    UserMessage,
)

AS_IN_CHAT = (
    "model", "temperature", "top_p", "top_k", "stream", "seed", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos", "priority", "keep_required", "lease",
)  # fmt: skip
"""Fields that mean what they mean in chat."""

HINT_S = {"5m": 300.0, "1h": 3600.0}
"""What the marks of a prompt's blocks ask for."""

BILLING = "x-anthropic-billing-header:"
"""How Claude Code begins a block of its system prompt that is meant for who bills it. It differs from request to
request, so that no two would have a prefix in common."""

NO_THREADS = "thread_unsupported_request"
"""Anthropic's clients go on without a thread when they are told this."""

WRONG = "Error: "
"""What stands before the result of a call that failed: templates know no other way to say it."""


def has_later_system(body: Asking) -> bool:
    """Does the system speak again when the conversation has begun? Many templates refuse that."""
    roles = [message.role for message in body.messages]
    return "system" in roles[_leading(roles) :]


def kept_by_hints(body: Asking) -> float | None:
    """For how many seconds the marks of `cache_control` want the cache to be kept; None: there are none. Where its
    blocks end is of no interest here: all of the conversation is kept."""
    blocks: list[Any] = [*(body.tools or ()), *(body.system if isinstance(body.system, list) else ())]
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            blocks.append(block)
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                blocks += block.content
    marks = [mark for each in (body, *blocks) if (mark := getattr(each, "cache_control", None)) is not None]
    return max((HINT_S[mark.ttl or "5m"] for mark in marks), default=None)


def as_chat(body: Asking, later_system: Literal["system", "user"] = "system") -> ChatRequest:
    """later_system: who says what the system says when the conversation has begun. Raises `InvalidRequest` or
    `RequestValidationError`, naming the field."""
    messages = list(_joined(_messages(body, later_system)))
    if not messages:
        raise InvalidRequest("messages are empty; give one with words", field="messages")
    continues = messages[-1]["role"] == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "the last message calls a tool, and there is no tool_result for it; send the result, or leave the call out",
            field="messages",
        )
    # What the prompt is made of.
    given: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": continues or None,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "chat_template_kwargs": _variables(body),
        **_choice(body),
    }
    if body.output_config is not None:
        given["reasoning_effort"] = body.output_config.effort
        if (wanted := body.output_config.format) is not None:
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    # How it is answered.
    if isinstance(body, MessagesRequest):
        if body.thread is not None:
            raise InvalidRequest(
                "no conversation is kept here; send all of its messages, without thread",
                field="thread",
                error_code=NO_THREADS,
            )
        given |= {name: getattr(body, name) for name in AS_IN_CHAT}
        given["keep_s"] = body.keep_s if body.keep_s is not None else kept_by_hints(body)
        given |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None}
        given["user"] = body.metadata.user_id if body.metadata else None
    return chat_of(given)


def _messages(body: Asking, later_system: str) -> Iterator[dict[str, Any]]:
    """The turns of the conversation, with all that the system says before it as one."""
    leading = _leading([message.role for message in body.messages])
    system = _texts(body.system or ())
    for message in body.messages[:leading]:
        system += _texts(message.content)
    text = "\n".join(each for each in system if not each.startswith(BILLING))
    if text:
        yield {"role": "system", "content": text}
    for message in body.messages[leading:]:
        match message:
            case UserMessage(content=str() as content):
                yield {"role": "user", "content": content}
            case UserMessage(content=list() as blocks):
                yield from _of_user(blocks)
            case AssistantMessage():
                yield _of_assistant(message)
            case SystemMessage(content=content):
                yield {"role": later_system, "content": "\n".join(_texts(content))}


def _leading(roles: Sequence[str]) -> int:
    """How many of the system's messages come before all others."""
    return next((place for place, role in enumerate(roles) if role != "system"), len(roles))


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content if isinstance(block, TextBlock)]


def _joined(turns: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the user says in several messages on end is one turn."""
    last: dict[str, Any] | None = None
    for turn in turns:
        if last is not None and last["role"] == turn["role"] == "user":
            last = {"role": "user", "content": _parts(last["content"]) + _parts(turn["content"])}
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _of_user(blocks: Sequence[TextBlock | ImageBlock | ToolResultBlock]) -> Iterator[dict[str, Any]]:
    """Results of calls are turns of their own; what stands between them is one."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if not isinstance(block, ToolResultBlock):
            parts.append(_part(block))
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    if parts or not blocks:
        yield {"role": "user", "content": parts}


def _result(block: ToolResultBlock) -> str | list[dict[str, Any]]:
    if isinstance(block.content, str):
        return WRONG + block.content if block.is_error else block.content
    parts = [_part(part) for part in block.content]
    if not block.is_error:
        return parts
    if parts and parts[0]["type"] == "text":
        return [{"type": "text", "text": WRONG + parts[0]["text"]}, *parts[1:]]
    return [{"type": "text", "text": WRONG}, *parts]


def _of_assistant(message: AssistantMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    # An answer's texts were one text before its calls were found in it.
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    if texts:
        turn["content"] = "".join(texts)
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock) and block.thinking]
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    calls = [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: MessageTool) -> Tool:
    """As chat has it, whose own requests may not have names that long."""
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = parameters | {"examples": tool.input_examples}
    function = Function.model_construct(
        name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict
    )
    return Tool(type="function", function=function, cache_control=None)


def _choice(body: Asking) -> dict[str, Any]:
    choice: Any = None
    match body.tool_choice:
        case AutoChoice() if body.tools:
            choice = "auto"
        case AnyChoice():
            choice = "required"
        case ToolNameChoice(name=name):
            choice = {"type": "function", "function": {"name": name}}
        case NoChoice():
            choice = "none"
    is_single = getattr(body.tool_choice, "disable_parallel_tool_use", None)
    return {"tool_choice": choice, "parallel_tool_calls": False if is_single else None}


def _variables(body: Asking) -> dict[str, Any] | None:
    """Of the template. Those that turn thoughts on and off have two names among the families."""
    if body.thinking is None:
        return body.chat_template_kwargs
    thinks = not isinstance(body.thinking, ThinkingOff)
    return {"enable_thinking": thinks, "thinking": thinks} | (body.chat_template_kwargs or {})
