"""/v1/chat/completions: a conversation goes on, by the template of the model."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ...controller.engine import TokenLogprobs
from ...errors import InvalidRequest
from ..front_end import Asked, FrontEnd
from ..images import from_data_url
from ..tokenizer import Tokenizer
from .answers import Collected, Counter, StreamUsage, now_s, pieces, prompt_logprobs_of, token_text
from .protocol import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    ToolCall,
    TopLogprob,
)
from .requests import check_model, sampling_of, terms_of, turns_of
from .tools import CallReader, tool_use


class ChatCall:
    """One request, and the ways to answer it."""

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
        self._front_end = front_end
        self._body = body
        self._id = f"chatcmpl-{request_id}"
        self._request_id = request_id
        self._created = now_s()
        self._use = tool_use(body)
        self._asked: list[Asked] = []

    async def prepare(self) -> None:
        """The template is applied, images are looked at. Raises `InvalidRequest`."""
        body, front_end = self._body, self._front_end
        turns, urls = turns_of(body.messages)
        options = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        elif body.add_generation_prompt is not None:
            options["add_generation_prompt"] = body.add_generation_prompt
        tools = [tool.model_dump(exclude_none=True) for tool in self._use.tools] if self._use else []
        prompt = await front_end.encode_chat(turns, tools, **options)
        images = await front_end.read_images([from_data_url(url) for url in urls])
        left = max(1, front_end.info.longest_request - len(prompt))
        max_tokens = body.max_completion_tokens or body.max_tokens or left
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_of(body, max_tokens, logprobs, self._use.form if self._use else None)
        self._asked = [Asked(prompt, sampling, images, terms_of(body), self._request_id)]

    async def answer(self) -> ChatCompletion:
        [asked], tokenizer = self._asked, self._front_end.tokenizer
        counter = Counter(self._asked)
        collected = [Collected() for _ in range(asked.sampling.n)]
        async for piece in pieces(self._front_end, self._asked, is_streaming=False):
            counter.add(piece)
            collected[piece.delta.answer].add(piece)
        wants_ids = bool(self._body.return_token_ids)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._front_end.info.model,
            choices=[self._choice(n, one) for n, one in enumerate(collected)],
            usage=counter.usage(),
            prompt_token_ids=asked.prompt if wants_ids else None,
            prompt_logprobs=prompt_logprobs_of(collected[0].prompt_logprobs, tokenizer),
        )

    def _choice(self, index: int, one: Collected) -> ChatChoice:
        text, calls = one.text, []
        if self._use is not None:
            reader = CallReader(self._use)
            said = reader.push(text)
            rest, calls = reader.finish()
            text = said + rest
        return ChatChoice(
            index=index,
            message=AnswerMessage(content=text if text or not calls else None, tool_calls=calls or None),
            logprobs=_logprobs(one.logprobs, self._front_end.tokenizer) if self._body.logprobs else None,
            finish_reason=_reason(one.finish_reason, calls),  # type: ignore[arg-type]
            token_ids=one.token_ids if self._body.return_token_ids else None,
        )

    async def events(self) -> AsyncGenerator[dict[str, Any] | str, None]:
        [asked], tokenizer = self._asked, self._front_end.tokenizer
        counter = Counter(self._asked)
        usage = StreamUsage(self._body.stream_options, counter)
        readers = [CallReader(self._use) for _ in range(asked.sampling.n)] if self._use else None
        begun: set[int] = set()
        async for piece in pieces(self._front_end, self._asked, is_streaming=True):
            counter.add(piece)
            index, reason = piece.delta.answer, piece.delta.finish_reason
            text, calls = piece.text, []
            if readers is not None:
                text = readers[index].push(text)
                if reason is not None:
                    rest, calls = readers[index].finish()
                    text += rest
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if index not in begun else {}
            begun.add(index)
            if text:
                delta["content"] = text
            if calls:
                delta["tool_calls"] = [call.model_dump() | {"index": n} for n, call in enumerate(calls)]
            logprobs = _logprobs(piece.delta.logprobs or (), tokenizer).model_dump() if self._body.logprobs else None
            choice: dict[str, Any] = {
                "index": index,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": _reason(reason, calls),
            }
            if self._body.return_token_ids:
                choice["token_ids"] = list(piece.delta.token_ids)
            if not delta and reason is None and not self._body.logprobs and not self._body.return_token_ids:
                continue
            yield usage.put_into(self._event([choice]))
        for event in usage.last(self._event([])):
            yield event
        yield "[DONE]"

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._front_end.info.model,
            "choices": choices,
        }


def _reason(reason: str | None, calls: Sequence[ToolCall]) -> str | None:
    return "tool_calls" if reason == "stop" and calls else reason


def _logprobs(rows: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> ChatLogprobs:
    def about(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **about(row.token_id, row.logprob), top_logprobs=[TopLogprob(**about(*other)) for other in row.top]
            )
            for row in rows
        ]
    )
