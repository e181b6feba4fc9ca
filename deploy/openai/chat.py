"""/v1/chat/completions: a conversation goes on."""

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ...errors import InvalidRequest
from ...proto.reply import num_values
from ..front_end.front_end import FrontEnd
from .answers import THOUGHTS, Counter, StreamUsage, now_s
from .conversation import AnswerPart, Conversation
from .logprobs import Spelling, of_chat, of_prompt
from .protocol import AnswerMessage, ChatChoice, ChatCompletion, ChatLogprobs, ChatRequest, TextPart
from .requests import fingerprint_of
from .tools import CallPiece, calls_of


class ChatCall:
    """One request, and the ways to answer it."""

    def __init__(self, front_end: FrontEnd, body: ChatRequest, request_id: str):
        """Raises `InvalidRequest`, naming the field."""
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs come with a whole answer alone; leave stream out, or ask /v1/completions",
                field="prompt_logprobs",
            )
        self._conversation = Conversation(front_end, body, request_id)
        self.front_end = front_end
        self._body = body
        self._id = f"chatcmpl-{request_id}"
        self._created = now_s()
        self._echo = _last_words(body) if body.echo else ""
        self._fingerprint = fingerprint_of(front_end.info)
        self._spelling = Spelling(front_end.tokenizer, bool(body.return_tokens_as_token_ids))

    async def prepare(self) -> None:
        await self._conversation.prepare()

    async def answer(self) -> ChatCompletion:
        asked = self._conversation.asked
        counter = Counter([asked])
        # Not streamed, each answer comes as a whole.
        parts = [each async for each in self._conversation.parts(counter, is_streaming=False)]
        parts.sort(key=lambda each: each.delta.answer)
        about_prompt = next((each.delta.prompt_logprobs for each in parts if each.delta.prompt_logprobs), None)
        rows = (about_prompt, *(each.delta.logprobs for each in parts))
        size = sum(map(num_values, rows)) + sum(len(each.delta.token_ids) for each in parts)

        def made() -> ChatCompletion:
            completion = ChatCompletion(
                id=self._id,
                created=self._created,
                model=self.front_end.info.model,
                system_fingerprint=self._fingerprint,
                choices=[self._choice(each) for each in parts],
                usage=counter.usage(),
                prompt_token_ids=asked.prompt if self._body.return_token_ids else None,
            )
            # Afterwards, since pydantic would look at all of it in one step.
            table = of_prompt(about_prompt, self._spelling)
            completion.prompt_logprobs = table  # type: ignore[assignment]
            return completion

        return await self.front_end.aside(size, made)

    def _choice(self, part: AnswerPart) -> ChatChoice:
        calls = calls_of(part.calls)
        has_content = not (calls or self._conversation.must_call)
        text = self._echo + part.text
        return ChatChoice(
            index=part.delta.answer,
            message=AnswerMessage(
                content=text if text or has_content else None,
                reasoning_content=part.thoughts or None,
                reasoning=part.thoughts or None,
                tool_calls=calls or None,
            ),
            logprobs=self._logprobs(part),
            finish_reason=part.finish_reason,  # type: ignore[arg-type]
            token_ids=list(part.delta.token_ids) if self._body.return_token_ids else None,
        )

    async def events(self) -> AsyncGenerator[dict[str, Any] | str, None]:
        counter = Counter([self._conversation.asked])
        usage = StreamUsage(self._body.stream_options, counter)
        begun: set[int] = set()
        async for part in self._conversation.parts(counter, is_streaming=True):
            choice = self._streamed(part)
            if choice is None:
                continue
            if part.delta.answer not in begun:
                begun.add(part.delta.answer)
                beginnings = [self._event([first]) for first in self._beginning(part)]
                if len(begun) == 1 and self._body.return_token_ids:
                    beginnings[0]["prompt_token_ids"] = self._conversation.asked.prompt
                for event in beginnings:
                    yield usage.put_into(event, unsent=len(part.delta.token_ids))
            yield usage.put_into(self._event([choice]))
        for event in usage.last(self._event([])):
            yield event
        yield "[DONE]"

    def _beginning(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """The role alone, and what is echoed. Before a call there is no content."""
        is_call = self._conversation.must_call or (bool(part.calls) and not part.text)
        yield _choice(part, {"role": "assistant", "content": None if is_call else ""})
        if self._echo:
            yield _choice(part, {"content": self._echo})

    def _streamed(self, part: AnswerPart) -> dict[str, Any] | None:
        """The choice that an event shows for it; None if there is nothing to show."""
        delta: dict[str, Any] = {}
        logprobs = self._logprobs(part) if part.delta.token_ids else None
        ids = part.delta.token_ids if self._body.return_token_ids else ()
        # A token may be a part of a character, which has no text yet, and its log-probability is sent all the same.
        if part.thoughts:
            delta |= dict.fromkeys(THOUGHTS, part.thoughts)
        if part.text or (logprobs and not delta and not part.calls and not self._conversation.must_call):
            delta["content"] = part.text
        if part.calls:
            delta["tool_calls"] = list(map(_call_piece, part.calls))
        if not (delta or logprobs or ids or part.finish_reason):
            return None
        choice = _choice(part, delta) | {"finish_reason": part.finish_reason}
        if logprobs:
            choice["logprobs"] = logprobs.model_dump()
        if self._body.return_token_ids:
            choice["token_ids"] = list(ids)
        return choice

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self.front_end.info.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _logprobs(self, part: AnswerPart) -> ChatLogprobs | None:
        return of_chat(part.delta.logprobs or (), self._spelling) if self._body.logprobs else None


def _choice(part: AnswerPart, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": part.delta.answer, "delta": delta, "logprobs": None, "finish_reason": None}


def _last_words(body: ChatRequest) -> str:
    """The text of the last message, where it is the assistant's: the answer goes on from there."""
    last = body.messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text for part in last.content if isinstance(part, TextPart))


def _call_piece(piece: CallPiece) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.place, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.place, "id": piece.id, "type": "function", "function": function}
