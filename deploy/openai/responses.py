"""/v1/responses: a conversation in other words. What is kept of it is the business of `kept.py`."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...errors import ContextTooLong, IntarsiaError, InvalidRequest, Overloaded, PoolExhausted
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
    InputItem,
    InputMessage,
    InputReasoning,
    ItemReference,
    NamespaceTool,
    OutputItem,
    ResponseBody,
    ResponseError,
    ResponseOutputDetails,
    ResponsesRequest,
    ResponseStatus,
    ResponseTool,
    ResponseToolName,
    ResponseUsage,
    WebSearchTool,
)
from .requests import chat_of, check_streaming
from .response_items import Items, new_id

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""

AS_IN_CHAT = (
    "stop", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
    "chat_template_kwargs", "priority", "keep_s", "keep_required", "lease",
)  # fmt: skip
"""Fields that mean what they mean in chat."""

ID_OF = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
"""How ids of items begin."""


class Kept(NamedTuple):
    """What was kept of a conversation, and what is kept of its next response."""

    history: Sequence[InputItem] = ()
    keep: Callable[[ResponseBody], Awaitable[bool]] | None = None  # whether that could be done; None: it is not kept
    items: Sequence[Mapping[str, Any]] = ()  # of its own input, as they are kept
    answered: Callable[[ResponseBody], Awaitable[None]] | None = None  # adds to the conversation that it goes on with
    is_background: bool = False  # it is made whether the client waits or not


NOTHING_KEPT = Kept()


class ResponsesCall:
    """One request, and the ways to answer it."""

    def __init__(self, front_end: FrontEnd, body: ResponsesRequest, request_id: str, kept: Kept = NOTHING_KEPT):
        """Raises `InvalidRequest`, naming the field."""
        check_streaming(body)
        self._conversation = Conversation(front_end, _as_chat(body, kept.history), request_id, thoughts_come_back=True)
        self._wants_logprobs = LOGPROBS in (body.include or ())
        self.front_end = front_end
        self.body = body
        self.id = f"resp_{request_id}"
        self.kept = kept
        self._created = now_s()
        self._items = Items({flat: (space, tool.name) for flat, space, tool in _tools(body)})
        self._counter: Counter | None = None
        self._last: AnswerPart | None = None

    async def prepare(self) -> None:
        await self._conversation.prepare()
        self._counter = Counter([self._conversation.asked])

    async def answer(self) -> ResponseBody:
        async for part in self._parts(is_streaming=False):
            for _ in self._told(part):
                pass  # the events that a stream would have
        return await self._whole()

    async def events(self) -> AsyncGenerator[dict[str, Any] | str, None]:
        begun, items = self.so_far().model_dump(), self._items
        yield items.event("created", response=begun)
        if self.kept.is_background:
            yield items.event("queued", response=begun)
        yield items.event("in_progress", response=begun | {"status": "in_progress"})
        async for part in self._parts(is_streaming=True):
            for event in self._told(part):
                yield event
        whole = await self._whole()
        yield items.event(whole.status, response=whole.model_dump())

    def so_far(self) -> ResponseBody:
        """The response while it is being made."""
        waits = self._last is None and self.kept.is_background
        return self._response("queued" if waits else "in_progress", [])

    def ended(self, status: Literal["failed", "cancelled"], error: IntarsiaError | None = None) -> ResponseBody:
        """The response where its answer came to no end of its own: with what has come of it."""
        self._items.cut()
        response = self._response(status, self._items.done)
        if error is not None:
            response.error = ResponseError(code=_code_of(error), message=error.message)
        return response

    def failed(self, error: IntarsiaError) -> dict[str, Any]:
        """The last event of a stream that came to no end of its own."""
        return self.failed_event(self.ended("failed", error))

    def failed_event(self, response: ResponseBody) -> dict[str, Any]:
        return self._items.event("failed", response=response.model_dump())

    async def _parts(self, *, is_streaming: bool) -> AsyncGenerator[AnswerPart, None]:
        assert self._counter is not None, "prepare first"
        async for part in self._conversation.parts(self._counter, is_streaming=is_streaming):
            self._last = part
            yield part

    def _told(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """The events that tell of a part of the answer."""
        yield from self._items.add(part.thoughts, part.text, part.calls, self._logprobs(part))
        if part.finish_reason is not None:
            yield from self._items.end(is_cut=part.finish_reason == "length")

    async def _whole(self) -> ResponseBody:
        """The response whose answer has come. It is kept where it is to be."""
        assert self._last is not None, "an answer ends with a delta"
        is_cut = self._last.finish_reason == "length"
        whole = self._response("incomplete" if is_cut else "completed", self._items.done)
        if is_cut:
            whole.incomplete_details = {"reason": "max_output_tokens"}
        if self.kept.keep is not None:
            whole.store = await self.kept.keep(whole)
        if self.kept.answered is not None:
            await self.kept.answered(whole)
        return whole

    def _logprobs(self, part: AnswerPart) -> list[dict[str, Any]]:
        rows = part.delta.logprobs if self._wants_logprobs else None
        return of_chat(rows, Spelling(self.front_end.tokenizer)).model_dump()["content"] if rows else []

    def _response(self, status: ResponseStatus, output: list[OutputItem]) -> ResponseBody:
        assert self._counter is not None, "prepare first"
        body, sampling = self.body, self._conversation.asked.sampling
        choice = body.tool_choice or "auto"
        return ResponseBody(
            id=self.id,
            created_at=self._created,
            status=status,
            background=self.kept.is_background,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.front_end.info.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            conversation=None if body.conversation_id is None else {"id": body.conversation_id},
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            store=self.kept.keep is not None,
            temperature=sampling.temperature,
            text=body.text.model_dump(exclude_none=True, by_alias=True) if body.text else {"format": {"type": "text"}},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[_shown_tool(tool) for tool in body.tools or () if not isinstance(tool, WebSearchTool)],
            top_p=sampling.top_p,
            truncation=body.truncation or "disabled",
            usage=None if status in ("queued", "in_progress") else _usage(self._counter),
            user=body.user,
            top_logprobs=body.top_logprobs,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_retention=body.prompt_cache_retention,
            prompt_cache_options=body.prompt_cache_options,
            safety_identifier=body.safety_identifier,
            metadata=body.metadata or {},
        )


def items_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input of a request as it is kept."""
    return kept_items(_own_items(body))


def kept_items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Each by itself, with an id."""
    found = []
    for item in items:
        kept = item.model_dump(exclude_none=True)
        if isinstance(item, InputMessage) and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            kept["content"] = [{"type": kind, "text": item.content}]
        kept.setdefault("id", new_id(ID_OF[item.type]))
        found.append({"status": "completed"} | kept)
    return found


def references_of(body: ResponsesRequest) -> list[str]:
    """Items of kept responses that a request names."""
    return [item.id for item in _own_items(body) if isinstance(item, ItemReference)]


def _own_items(body: ResponsesRequest) -> Sequence[InputItem]:
    return [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def _code_of(error: IntarsiaError) -> str:
    """In OpenAI's words."""
    if isinstance(error, ContextTooLong):
        return "context_length_exceeded"
    if isinstance(error, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, Overloaded | PoolExhausted) else "server_error"


def _usage(counter: Counter) -> ResponseUsage:
    usage = counter.usage()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=usage.prompt_tokens_details,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ResponseOutputDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
        lease=usage.lease,
    )


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
        elif isinstance(tool, ResponseTool):
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


def _as_chat(body: ResponsesRequest, history: Sequence[InputItem] = ()) -> ChatRequest:
    """Translate the request into one of chat. history: what was said before."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    thoughts: list[str] = []  # that belong to the next turn of the model
    # Items become messages. What the model thought belongs to its next turn.
    for item in (*history, *_own_items(body)):
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
                parts = output if isinstance(output, str) else [_part(part) for part in output]
                messages.append({"role": "tool", "tool_call_id": call_id, "content": parts})
            case ItemReference():
                raise AssertionError("references are looked up before")
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
    # Fields go over one by one.
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
    return chat_of(given)


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
