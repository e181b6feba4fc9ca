"""/v1/responses, as far as it maps: a conversation in other words. Nothing is stored, so a request brings all of it."""

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from ..front_end import FrontEnd
from .answers import Counter, now_s
from .conversation import Conversation, Said
from .protocol import (
    ChatRequest,
    FlatSchemaFormat,
    InputCall,
    InputCallOutput,
    InputImage,
    InputMessage,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseBody,
    ResponseOutputDetails,
    ResponsesRequest,
    ResponseToolName,
    ResponseUsage,
    ResponseUsageDetails,
)


class ResponsesCall:
    """One request, and the ways to answer it."""

    def __init__(self, front_end: FrontEnd, body: ResponsesRequest, request_id: str):
        """Raises `InvalidRequest`, naming the field."""
        self._conversation = Conversation(front_end, _as_chat(body), request_id)
        self.front_end = front_end
        self._body = body
        self._id = f"resp_{request_id}"
        self._created = now_s()

    async def prepare(self) -> None:
        await self._conversation.prepare()

    async def answer(self) -> ResponseBody:
        counter = Counter([self._conversation.asked])
        [said] = [each async for each in self._conversation.say(counter, is_streaming=False)]
        return self._response(said.text, said, counter)

    async def events(self) -> AsyncGenerator[dict[str, Any] | str, None]:
        counter, number, text = Counter([self._conversation.asked]), -1, ""
        message_id = _new_id("msg")

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number, **fields}

        begun = self._response("", None, counter).model_dump()
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        part = {"item_id": message_id, "output_index": 0, "content_index": 0}
        is_open, last = False, None
        async for last in self._conversation.say(counter, is_streaming=True):
            if not last.text:
                continue
            if not is_open:
                is_open = True
                empty = OutputMessage(id=message_id, status="in_progress", content=[])
                yield event("output_item.added", output_index=0, item=empty.model_dump())
                yield event("content_part.added", **part, part=OutputText(text="").model_dump())
            text += last.text
            yield event("output_text.delta", **part, delta=last.text, logprobs=[])
        assert last is not None, "an answer ends with a delta"
        whole = self._response(text, last, counter, message_id)
        for place, item in enumerate(whole.output):
            if isinstance(item, OutputMessage):
                if is_open:
                    yield event("output_text.done", **part, text=text, logprobs=[])
                    yield event("content_part.done", **part, part=item.content[0].model_dump())
                else:
                    yield event("output_item.added", output_index=place, item=item.model_dump())
            else:
                about = {"item_id": item.id, "output_index": place}
                begun_call = item.model_copy(update={"arguments": "", "status": "in_progress"})
                yield event("output_item.added", output_index=place, item=begun_call.model_dump())
                yield event("function_call_arguments.delta", **about, delta=item.arguments)
                yield event("function_call_arguments.done", **about, name=item.name, arguments=item.arguments)
            yield event("output_item.done", output_index=place, item=item.model_dump())
        yield event(whole.status, response=whole.model_dump())

    def _response(self, text: str, said: Said | None, counter: Counter, message_id: str | None = None) -> ResponseBody:
        """said: the last of the answer; None: it has not begun."""
        body, is_cut = self._body, said is not None and said.finish_reason == "length"
        status = "in_progress" if said is None else "incomplete" if is_cut else "completed"
        output: list[OutputMessage | OutputCall] = []
        if said is not None and (text or not said.calls):
            content = [OutputText(text=text)]
            output.append(OutputMessage(id=message_id or _new_id("msg"), status=status, content=content))
        for call in said.calls if said is not None else ():
            name, arguments = call.function.name, call.function.arguments
            output.append(
                OutputCall(id=_new_id("fc"), call_id=call.id, name=name, arguments=arguments, status="completed")
            )
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
            tools=[
                {"strict": None, "parameters": None} | tool.model_dump(exclude_none=True) for tool in body.tools or ()
            ],
            top_p=sampling.top_p,
            usage=_usage(counter) if said is not None else None,
            user=body.user,
            metadata=body.metadata or {},
        )


def _usage(counter: Counter) -> ResponseUsage:
    usage = counter.usage()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=ResponseUsageDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ResponseOutputDetails(),
        total_tokens=usage.total_tokens,
    )


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request in the words of chat."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in items:
        match item:
            case InputMessage(role=role, content=content):
                parts = content if isinstance(content, str) else [_part(part) for part in content]
                messages.append({"role": role, "content": parts})
            case InputCall():
                call = {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case InputCallOutput(call_id=call_id, output=output):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    choice: Any = body.tool_choice
    if isinstance(choice, ResponseToolName):
        choice = {"type": "function", "function": {"name": choice.name}}
    given: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": body.user,
        "response_format": _format(body),
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools or ()
        ]
        or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    return ChatRequest.model_validate({name: value for name, value in given.items() if value is not None})


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text}


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text else None
    if isinstance(wanted, FlatSchemaFormat):
        described = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": described}
    return wanted.model_dump() if wanted is not None else None
