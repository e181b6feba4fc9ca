"""A request in the words of chat, which has one conversation for both."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ...errors import InvalidRequest
from ..openai.protocol import ChatRequest
from ..openai.requests import chat_of
from .later_tools import OfferedTools
from .protocol import (
    AnyChoice,
    Asking,
    AssistantMessage,
    AutoChoice,
    ImageBlock,
    MessagesRequest,
    NoChoice,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ToolAdditionBlock,
    ToolByName,
    ToolDefinition,
    ToolNameChoice,
    ToolReferenceBlock,
    ToolRemovalBlock,
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
    tools = OfferedTools(body.tools or ())
    messages = list(_joined(_messages(body, tools, later_system)))
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
        "tools": tools.offered() or None,
        "chat_template_kwargs": _variables(body),
        **_choice(body, has_tools=bool(tools.offered())),
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


def _messages(body: Asking, tools: OfferedTools, later_system: str) -> Iterator[dict[str, Any]]:
    """The turns of the conversation, with all that the system says before it as one. tools: follow it to its end."""
    leading = _leading([message.role for message in body.messages])
    system = _of_system(body.system or (), tools)
    for message in body.messages[:leading]:
        system += _of_system(message.content, tools)
    text = "\n".join(each for each in system if not each.startswith(BILLING))
    if text:
        yield {"role": "system", "content": text}
    for message in body.messages[leading:]:
        match message:
            case UserMessage(content=str() as content):
                yield {"role": "user", "content": content}
            case UserMessage(content=list() as blocks):
                yield from _of_user(blocks, tools)
            case AssistantMessage():
                yield _of_assistant(message)
            case SystemMessage(content=content):
                yield {"role": later_system, "content": "\n".join(_of_system(content, tools))}


def _leading(roles: Sequence[str]) -> int:
    """How many of the system's messages come before all others."""
    return next((place for place, role in enumerate(roles) if role != "system"), len(roles))


def _of_system(content: Any, tools: OfferedTools) -> list[str]:
    """Texts, and what the model reads of tools that come and go."""
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for block in content:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ToolAdditionBlock(tool=ToolByName(name=name)):
                texts.append(tools.add(name))
            case ToolAdditionBlock(tool=ToolDefinition(definition=tool)):
                texts.append(tools.define(tool))
            case ToolRemovalBlock(tool=ToolByName(name=name)):
                texts.append(tools.remove(name))
    return texts


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
    return [_text(content)] if isinstance(content, str) else content


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _of_user(
    blocks: Sequence[TextBlock | ImageBlock | ToolResultBlock], tools: OfferedTools
) -> Iterator[dict[str, Any]]:
    """Results of calls are turns of their own; what stands between them is one."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if not isinstance(block, ToolResultBlock):
            parts.append(_part(block))
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, tools)}
    if parts or not blocks:
        yield {"role": "user", "content": parts}


def _result(block: ToolResultBlock, tools: OfferedTools) -> str | list[dict[str, Any]]:
    if isinstance(block.content, str):
        return WRONG + block.content if block.is_error else block.content
    parts = [
        _text(tools.add(part.tool_name)) if isinstance(part, ToolReferenceBlock) else _part(part)
        for part in block.content
    ]
    if not block.is_error:
        return parts
    if parts and parts[0]["type"] == "text":
        return [_text(WRONG + parts[0]["text"]), *parts[1:]]
    return [_text(WRONG), *parts]


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
        return _text(block.text)
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _choice(body: Asking, *, has_tools: bool) -> dict[str, Any]:
    choice: Any = None
    match body.tool_choice:
        case AutoChoice() if has_tools:
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
