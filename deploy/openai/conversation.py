"""What chat and responses share: a conversation by the model's template, and what is said and called in its answers."""

from collections.abc import AsyncGenerator
from typing import NamedTuple

from ...controller.engine import TokenDelta
from ...errors import InvalidRequest
from ..front_end import Asked, FrontEnd
from .answers import Counter, pieces
from .protocol import ChatRequest, ToolCall
from .requests import check_model, sampling_of, terms_of, turns_aside
from .tools import CallReader, tool_use


class Said(NamedTuple):
    """What came for one answer."""

    delta: TokenDelta
    text: str  # without what is a call
    calls: list[ToolCall]  # with the last delta

    @property
    def finish_reason(self) -> str | None:
        reason = self.delta.finish_reason
        return "tool_calls" if reason == "stop" and self.calls else reason


class Conversation:
    """One request. `prepare`, then `say`."""

    def __init__(self, front_end: FrontEnd, body: ChatRequest, request_id: str):
        """Raises `InvalidRequest`, naming the field."""
        check_model(body.model, front_end.info.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
        if body.add_generation_prompt and body.continue_final_message:
            raise InvalidRequest(
                "continue_final_message goes on with the last message, add_generation_prompt begins another; give one",
                field="continue_final_message",
            )
        self.front_end = front_end
        self._body = body
        self._request_id = request_id
        self._use = tool_use(body)
        self._asked: Asked | None = None

    async def prepare(self) -> None:
        """The template is applied, images are looked at. Raises `InvalidRequest`, or `Overloaded` where that would be
        in vain."""
        body, front_end = self._body, self.front_end
        terms = terms_of(body)
        front_end.check_room(terms.tenant)
        turns, urls = await turns_aside(front_end, body.messages)
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        continues = bool(body.continue_final_message)
        begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        tools = [tool.model_dump(exclude_none=True) for tool in self._use.tools] if self._use else []
        prompt = await front_end.encode_chat(
            turns, tools, variables, add_generation_prompt=begins, continue_final_message=continues
        )
        images = await front_end.read_images(urls)
        left = max(1, front_end.info.longest_request - len(prompt))
        max_tokens = body.max_completion_tokens or body.max_tokens or left
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        form = self._use.form if self._use else None
        sampling = sampling_of(body, front_end.info, max_tokens, logprobs, form)
        self._asked = Asked(prompt, sampling, images, terms, self._request_id)

    @property
    def asked(self) -> Asked:
        assert self._asked is not None, "prepare first"
        return self._asked

    async def say(self, counter: Counter, *, is_streaming: bool) -> AsyncGenerator[Said, None]:
        """What comes, of all answers in one stream. Counts it."""
        readers = [CallReader(self._use) for _ in range(self.asked.sampling.n)] if self._use else None
        async for piece in pieces(self.front_end, [self.asked], is_streaming=is_streaming):
            counter.add(piece)
            text, calls = piece.text, []
            if readers is not None:
                reader = readers[piece.delta.answer]
                text = reader.push(text)
                if piece.delta.finish_reason is not None:
                    rest, calls = reader.finish()
                    text += rest
            yield Said(piece.delta, text, calls)
