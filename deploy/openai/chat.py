"""/v1/chat/completions: a conversation goes on."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ...controller.deltas import TokenLogprobs, num_values
from ..front_end import FrontEnd
from ..tokenizer import Tokenizer
from .answers import Counter, StreamUsage, now_s, prompt_logprobs_of, token_text
from .conversation import Conversation, Said
from .protocol import AnswerMessage, ChatChoice, ChatCompletion, ChatLogprob, ChatLogprobs, ChatRequest, TopLogprob


class ChatCall:
    """One request, and the ways to answer it."""

    def __init__(self, front_end: FrontEnd, body: ChatRequest, request_id: str):
        """Raises `InvalidRequest`, naming the field."""
        self._conversation = Conversation(front_end, body, request_id)
        self.front_end = front_end
        self._body = body
        self._id = f"chatcmpl-{request_id}"
        self._created = now_s()

    async def prepare(self) -> None:
        await self._conversation.prepare()

    async def answer(self) -> ChatCompletion:
        asked = self._conversation.asked
        counter = Counter([asked])
        # Not streamed, each answer comes as a whole.
        said = [each async for each in self._conversation.say(counter, is_streaming=False)]
        said.sort(key=lambda each: each.delta.answer)
        about_prompt = next((each.delta.prompt_logprobs for each in said if each.delta.prompt_logprobs), None)
        rows = (about_prompt, *(each.delta.logprobs for each in said))
        size = sum(map(num_values, rows)) + sum(len(each.delta.token_ids) for each in said)

        def made() -> ChatCompletion:
            completion = ChatCompletion(
                id=self._id,
                created=self._created,
                model=self.front_end.info.model,
                choices=[self._choice(each) for each in said],
                usage=counter.usage(),
                prompt_token_ids=asked.prompt if self._body.return_token_ids else None,
            )
            # Afterwards, since pydantic would look at all of it in one step.
            table = prompt_logprobs_of(about_prompt, self.front_end.tokenizer)
            completion.prompt_logprobs = table  # type: ignore[assignment]
            return completion

        return await self.front_end.aside(size, made)

    def _choice(self, said: Said) -> ChatChoice:
        return ChatChoice(
            index=said.delta.answer,
            message=AnswerMessage(
                content=said.text if said.text or not said.calls else None, tool_calls=said.calls or None
            ),
            logprobs=self._logprobs(said),
            finish_reason=said.finish_reason,  # type: ignore[arg-type]
            token_ids=list(said.delta.token_ids) if self._body.return_token_ids else None,
        )

    async def events(self) -> AsyncGenerator[dict[str, Any] | str, None]:
        counter = Counter([self._conversation.asked])
        usage = StreamUsage(self._body.stream_options, counter)
        begun: set[int] = set()
        async for said in self._conversation.say(counter, is_streaming=True):
            index = said.delta.answer
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if index not in begun else {}
            begun.add(index)
            if said.text:
                delta["content"] = said.text
            if said.calls:
                delta["tool_calls"] = [call.model_dump() | {"index": n} for n, call in enumerate(said.calls)]
            logprobs = self._logprobs(said)
            choice: dict[str, Any] = {
                "index": index,
                "delta": delta,
                "logprobs": logprobs.model_dump() if logprobs else None,
                "finish_reason": said.finish_reason,
            }
            if self._body.return_token_ids:
                choice["token_ids"] = list(said.delta.token_ids)
            if delta or said.finish_reason or logprobs or self._body.return_token_ids:
                yield usage.put_into(self._event([choice]))
        for event in usage.last(self._event([])):
            yield event
        yield "[DONE]"

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self.front_end.info.model,
            "choices": choices,
        }

    def _logprobs(self, said: Said) -> ChatLogprobs | None:
        return _logprobs(said.delta.logprobs or (), self.front_end.tokenizer) if self._body.logprobs else None


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
