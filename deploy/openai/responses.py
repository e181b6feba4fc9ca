"""/v1/responses, as far as it maps: a conversation in other words. Nothing is stored, so a request brings all of it."""

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ...errors import InvalidRequest
from ..front_end.front_end import FrontEnd
from .answers import Counter, now_s
from .conversation import AnswerPart, Conversation
from .logprobs import Spelling, of_chat
from .protocol import (
    ChatRequest,
    FlatSchemaFormat,
    InputCall,
    InputCallOutput,
    InputImage,
    InputMessage,
    InputReasoning,
    NamespaceTool,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseBody,
    ResponseOutputDetails,
    ResponsesRequest,
    ResponseTool,
    ResponseToolName,
    ResponseUsage,
    ResponseUsageDetails,
)
from .requests import check_streaming
from .tools import CallPiece

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""

AS_IN_CHAT = (
    "stop", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
    "chat_template_kwargs", "priority",
)  # fmt: skip
"""Fields that mean what they mean in chat."""


class ResponsesCall:
    """One request, and the ways to answer it."""

    def __init__(self, front_end: FrontEnd, body: ResponsesRequest, request_id: str):
        """Raises `InvalidRequest`, naming the field."""
        check_streaming(body)
        self._conversation = Conversation(front_end, _as_chat(body), request_id)
        self._names = {flat: (space, tool.name) for flat, space, tool in _tools(body)}
        self._wants_logprobs = LOGPROBS in (body.include or ())
        self.front_end = front_end
        self._body = body
        self._id = f"resp_{request_id}"
        self._created = now_s()

    async def prepare(self) -> None:
        await self._conversation.prepare()

    async def answer(self) -> ResponseBody:
        counter, items = Counter([self._conversation.asked]), _Items(self._names)
        [part] = [each async for each in self._conversation.parts(counter, is_streaming=False)]
        for _ in (
            *items.add(part.text, part.calls, self._logprobs(part)),
            *items.end(is_cut=part.finish_reason == "length"),
        ):
            pass  # the events that a stream would have
        return self._response(items.done, part, counter)

    async def events(self) -> AsyncGenerator[dict[str, Any] | str, None]:
        counter, items = Counter([self._conversation.asked]), _Items(self._names)
        begun = self._response([], None, counter).model_dump()
        yield items.event("created", response=begun)
        yield items.event("in_progress", response=begun)
        last = None
        async for last in self._conversation.parts(counter, is_streaming=True):
            for event in items.add(last.text, last.calls, self._logprobs(last)):
                yield event
        assert last is not None, "an answer ends with a delta"
        for event in items.end(is_cut=last.finish_reason == "length"):
            yield event
        whole = self._response(items.done, last, counter)
        yield items.event(whole.status, response=whole.model_dump())

    def _logprobs(self, part: AnswerPart) -> list[dict[str, Any]]:
        rows = part.delta.logprobs if self._wants_logprobs else None
        return of_chat(rows, Spelling(self.front_end.tokenizer)).model_dump()["content"] if rows else []

    def _response(
        self, output: list[OutputMessage | OutputCall], part: AnswerPart | None, counter: Counter
    ) -> ResponseBody:
        """part: the last of the answer; None: it has not begun."""
        body, is_cut = self._body, part is not None and part.finish_reason == "length"
        status = "in_progress" if part is None else "incomplete" if is_cut else "completed"
        choice, sampling = body.tool_choice or "auto", self._conversation.asked.sampling
        return ResponseBody(
            id=self._id,
            created_at=self._created,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.front_end.info.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            temperature=sampling.temperature,
            text=body.text.model_dump(exclude_none=True, by_alias=True) if body.text else {"format": {"type": "text"}},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[_shown_tool(tool) for tool in body.tools or ()],
            top_p=sampling.top_p,
            truncation=body.truncation or "disabled",
            usage=_usage(counter) if part is not None else None,
            user=body.user,
            top_logprobs=body.top_logprobs,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_retention=body.prompt_cache_retention,
            prompt_cache_options=body.prompt_cache_options,
            safety_identifier=body.safety_identifier,
            metadata=body.metadata or {},
        )


class _Items:
    """The items of one answer: a message, calls, or both, one after the other, and the events that tell of them."""

    def __init__(self, names: Mapping[str, tuple[str | None, str]]) -> None:
        """names: of tools, as the model knows them -> (namespace, name)."""
        self._names = names
        self.done: list[OutputMessage | OutputCall] = []
        self._open: OutputMessage | OutputCall | None = None
        self._number = -1

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def add(self, text: str, calls: Sequence[CallPiece], logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """More of the answer has come. logprobs: of its tokens, when asked for."""
        if text or (logprobs and isinstance(self._open, OutputMessage)):
            yield from self._say(text, logprobs)
        for piece in calls:
            if piece.name is not None:
                yield from self._close("completed")
                space, name = self._names.get(piece.name, (None, piece.name))
                call = OutputCall(
                    id=_new_id("fc"),
                    call_id=piece.id,
                    name=name,
                    namespace=space,
                    arguments="",
                    status="in_progress",
                )
                yield from self._begin(call)
            call = self._open
            assert isinstance(call, OutputCall), "a call begins with its name"
            call.arguments += piece.arguments
            if piece.arguments:
                about = {"item_id": call.id, "output_index": len(self.done)}
                yield self.event("function_call_arguments.delta", **about, delta=piece.arguments)

    def end(self, *, is_cut: bool) -> Iterator[dict[str, Any]]:
        """It is whole, or is_cut. An answer of nothing is an empty message."""
        if self._open is None and not self.done:
            yield from self._say("", [])
        yield from self._close("incomplete" if is_cut else "completed")

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not isinstance(self._open, OutputMessage):
            yield from self._close("completed")
            message = OutputMessage(id=_new_id("msg"), status="in_progress", content=[])
            yield from self._begin(message)
            yield self.event("content_part.added", **self._part(message), part=OutputText(text="").model_dump())
            message.content.append(OutputText(text=""))
        message = self._open
        assert isinstance(message, OutputMessage)
        if text or logprobs:
            message.content[0].text += text
            message.content[0].logprobs += logprobs
            yield self.event("output_text.delta", **self._part(message), delta=text, logprobs=logprobs)

    def _begin(self, item: OutputMessage | OutputCall) -> Iterator[dict[str, Any]]:
        self._open = item
        yield self.event("output_item.added", output_index=len(self.done), item=item.model_dump())

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[dict[str, Any]]:
        item, place = self._open, len(self.done)
        if item is None:
            return
        if isinstance(item, OutputMessage):
            about, text = self._part(item), item.content[0]
            yield self.event("output_text.done", **about, text=text.text, logprobs=text.logprobs)
            yield self.event("content_part.done", **about, part=text.model_dump())
        else:
            about = {"item_id": item.id, "output_index": place}
            yield self.event("function_call_arguments.done", **about, name=item.name, arguments=item.arguments)
        item.status = status
        self._open = None
        self.done.append(item)
        yield self.event("output_item.done", output_index=place, item=item.model_dump())

    def _part(self, message: OutputMessage) -> dict[str, Any]:
        return {"item_id": message.id, "output_index": len(self.done), "content_index": 0}


def _usage(counter: Counter) -> ResponseUsage:
    usage = counter.usage()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=ResponseUsageDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ResponseOutputDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _shown_tool(tool: ResponseTool | NamespaceTool) -> dict[str, Any]:
    """A tool as the answer shows it again."""
    shown = tool.model_dump(exclude_none=True)
    if isinstance(tool, NamespaceTool):
        return shown | {"tools": [_shown_tool(inner) for inner in tool.tools]}
    return {"strict": None, "parameters": None} | shown


def _tools(body: ResponsesRequest) -> Iterator[tuple[str, str | None, ResponseTool]]:
    """(name for the model, namespace, function) of all of them."""
    for tool in body.tools or ():
        if isinstance(tool, NamespaceTool):
            yield from ((f"{tool.name}.{inner.name}", tool.name, inner) for inner in tool.tools)
        else:
            yield tool.name, None, tool


def _chosen(name: str, tools: Sequence[tuple[str, str | None, ResponseTool]]) -> str:
    """The name for the model of the function that a choice means: by this name, by a namespace and a function joined as
    vLLM does, or by the function's own name. Raises `InvalidRequest` where that is the name of several."""
    for known in (
        [flat for flat, _, _ in tools if flat == name],
        [flat for flat, space, tool in tools if space is not None and f"{space}__{tool.name}" == name],
        [flat for flat, _, tool in tools if tool.name == name],
    ):
        if len(known) > 1:
            raise InvalidRequest(
                f"tool_choice names {name!r}, which is the name of {len(known)} tools; give one of {', '.join(known)}",
                field="tool_choice",
            )
        if known:
            return known[0]
    return name


def _as_function(name: str, tool: ResponseTool) -> dict[str, Any]:
    fields = tool.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": {"name": name, **fields}}


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    """Translate the request into one of chat."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    thoughts: list[str] = []  # that belong to the next turn of the model
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    # Items become messages. What the model thought belongs to its next turn.
    for item in items:
        match item:
            case InputMessage(role=role, content=content):
                parts = content if isinstance(content, str) else [_part(part) for part in content]
                if role != "assistant":
                    messages += _thoughts_alone(thoughts)
                messages.append({"role": role, "content": parts} | _thoughts(thoughts, role))
            case InputReasoning():
                thoughts += [text.text for text in item.content or item.summary]
            case InputCall():
                name = f"{item.namespace}.{item.name}" if item.namespace else item.name
                call = {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": item.arguments},
                }
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": None} | _thoughts(thoughts, "assistant"))
                messages[-1].setdefault("tool_calls", []).append(call)
            case InputCallOutput(call_id=call_id, output=output):
                messages += _thoughts_alone(thoughts)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    if not messages:
        raise InvalidRequest("input has thoughts alone; give a message with them", field="input")
    messages += _thoughts_alone(thoughts)
    tools = list(_tools(body))
    # A tool is chosen by the name that the model knows.
    choice: Any = body.tool_choice
    if isinstance(choice, ResponseToolName):
        choice = {"type": "function", "function": {"name": _chosen(choice.name, tools)}}
    elif choice == "auto" and not tools:
        choice = None  # which is what it says
    # Fields go over one by one; null ones are left out.
    given: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": body.user,
        "response_format": _format(body),
        "tools": [_as_function(flat, tool) for flat, _, tool in tools] or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": LOGPROBS in (body.include or ()) or None,
        "top_logprobs": body.top_logprobs if LOGPROBS in (body.include or ()) else None,
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
        "verbosity": body.text.verbosity if body.text else None,
        **{name: getattr(body, name) for name in AS_IN_CHAT},
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:  # a rule that chat has and /v1/responses lacks
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults, body=given) from None


def _thoughts(thoughts: list[str], role: str) -> dict[str, str]:
    """What a turn of the model thought before, which is taken from the list."""
    if role != "assistant" or not thoughts:
        return {}
    text = "\n".join(thoughts)
    thoughts.clear()
    return {"reasoning_content": text}


def _thoughts_alone(thoughts: list[str]) -> list[dict[str, Any]]:
    """A turn of the model that came no further, which is taken from the list."""
    turn = _thoughts(thoughts, "assistant")
    return [{"role": "assistant", "content": None} | turn] if turn else []


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text}


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text else None
    if isinstance(wanted, FlatSchemaFormat):
        described = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": described}
    return wanted.model_dump(by_alias=True, exclude_none=True) if wanted is not None else None
