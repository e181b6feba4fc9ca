"""/v1/messages: a conversation goes on. It is chat's; what is asked and what is answered is translated."""

from collections.abc import AsyncGenerator
from typing import Any

from ...errors import InvalidRequest, RequestTooLarge
from ...proto.leases import OFF
from ..front_end.front_end import FrontEnd
from ..openai.answers import Counter
from ..openai.conversation import AnswerPart, Conversation
from ..openai.protocol import ChatRequest
from .blocks import Blocks, stop_reason
from .protocol import Asking, CountRequest, InputTokens, MessageBody, MessagesRequest, MessageUsage
from .translate import as_chat, has_later_system


class MessagesCall:
    """One request, and the ways to answer it."""

    def __init__(self, front_end: FrontEnd, body: MessagesRequest, request_id: str):
        """Raises `InvalidRequest`, or `RequestValidationError`, naming the field."""
        self.front_end = front_end
        self._body = body
        self._request_id = request_id
        self._id = f"msg_{request_id}"
        self._shows_thoughts = getattr(body.thinking, "display", None) != "omitted"
        self._conversation = self._said_as(as_chat(body))

    async def prepare(self) -> None:
        """Raises `InvalidRequest`, or `Overloaded` where that would be in vain."""
        try:
            await self._conversation.prepare()
        except InvalidRequest as refusal:
            if not _may_be_said_by_the_user(self._body, refusal):
                raise
            self._conversation = self._said_as(as_chat(self._body, later_system="user"))
            await self._conversation.prepare()

    def _said_as(self, chat: ChatRequest) -> Conversation:
        # Clients send back the thoughts that they were shown.
        return Conversation(self.front_end, chat, self._request_id, thoughts_come_back=self._shows_thoughts)

    async def answer(self) -> MessageBody:
        counter, blocks = Counter([self._conversation.asked]), self._blocks()
        [part] = [each async for each in self._conversation.parts(counter, is_streaming=False)]
        for _ in (*blocks.add(part), *blocks.end()):
            pass  # the events that a stream would have
        reason, sequence = stop_reason(part)
        message = self._message(counter)
        message.content, message.stop_reason, message.stop_sequence = blocks.done, reason, sequence
        return message

    async def events(self) -> AsyncGenerator[dict[str, Any] | str, None]:
        counter, blocks = Counter([self._conversation.asked]), self._blocks()
        last: AnswerPart | None = None
        async for part in self._conversation.parts(counter, is_streaming=True):
            if last is None:  # only now it is known what was found in the cache
                yield {"type": "message_start", "message": self._message(counter).model_dump()}
                yield {"type": "ping"}
            for event in blocks.add(part):
                yield event
            last = part
        assert last is not None, "an answer ends with a delta"
        for event in blocks.end():
            yield event
        reason, sequence = stop_reason(last)
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._usage(counter).model_dump(),
        }
        yield {"type": "message_stop"}

    def _blocks(self) -> Blocks:
        return Blocks(shows_thoughts=self._shows_thoughts)

    def _message(self, counter: Counter) -> MessageBody:
        """As it begins."""
        return MessageBody(
            id=self._id, model=self.front_end.info.model, content=[], stop_reason=None, usage=self._usage(counter)
        )

    def _usage(self, counter: Counter) -> MessageUsage:
        return _usage(counter, is_asked=self._body.keep_s is not None)


async def count_tokens(front_end: FrontEnd, body: CountRequest) -> InputTokens:
    """Raises as `MessagesCall`."""
    try:
        count = await Conversation(front_end, as_chat(body), "").count()
    except InvalidRequest as refusal:
        if not _may_be_said_by_the_user(body, refusal):
            raise
        count = await Conversation(front_end, as_chat(body, later_system="user"), "").count()
    return InputTokens(input_tokens=count)


def _may_be_said_by_the_user(body: Asking, refusal: InvalidRequest) -> bool:
    """Where a template refuses a system that speaks in the middle, as Claude Code's does, the user says it."""
    is_templates = refusal.field == "messages" and not isinstance(refusal, RequestTooLarge)
    return is_templates and has_later_system(body)


def _usage(counter: Counter, *, is_asked: bool) -> MessageUsage:
    """is_asked: for a lease, by more than a hint"""
    usage = counter.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        # A hint that finds no leases here is like any other that has no effect.
        lease=usage.lease if usage.lease is None or usage.lease.reason != OFF or is_asked else None,
        not_cached=usage.prompt_tokens_details.not_cached,
    )
