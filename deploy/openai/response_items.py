"""The items of a response, and the events that tell of them."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from .protocol import OutputCall, OutputItem, OutputMessage, OutputReasoning, OutputText, OutputThought
from .tools import CallPiece


class Items:
    """The items of one answer: thoughts, a message, calls, one after the other, and the events that tell of them."""

    def __init__(self, names: Mapping[str, tuple[str | None, str]]) -> None:
        """names: of tools, as the model knows them -> (namespace, name)."""
        self._names = names
        self.done: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._number = -1

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def add(
        self, thoughts: str, text: str, calls: Sequence[CallPiece], logprobs: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """More of the answer has come. logprobs: of its tokens, when asked for."""
        if thoughts:
            yield from self._think(thoughts)
        if text or (logprobs and isinstance(self._open, OutputMessage)):
            yield from self._say(text, logprobs)
        for piece in calls:
            if piece.name is not None:
                yield from self._close("completed")
                space, name = self._names.get(piece.name, (None, piece.name))
                call = OutputCall(
                    id=new_id("fc"),
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

    def cut(self) -> None:
        """No more comes, and there was no end."""
        for _ in self._close("incomplete"):
            pass

    def _think(self, thoughts: str) -> Iterator[dict[str, Any]]:
        if not isinstance(self._open, OutputReasoning):
            yield from self._close("completed")
            reasoning = OutputReasoning(id=new_id("rs"), status="in_progress", content=[])
            yield from self._begin(reasoning)
            yield self.event("content_part.added", **self._part(reasoning), part=OutputThought(text="").model_dump())
            reasoning.content.append(OutputThought(text=""))
        reasoning = self._open
        assert isinstance(reasoning, OutputReasoning)
        reasoning.content[0].text += thoughts
        yield self.event("reasoning_text.delta", **self._part(reasoning), delta=thoughts)

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not isinstance(self._open, OutputMessage):
            yield from self._close("completed")
            message = OutputMessage(id=new_id("msg"), status="in_progress", content=[])
            yield from self._begin(message)
            yield self.event("content_part.added", **self._part(message), part=OutputText(text="").model_dump())
            message.content.append(OutputText(text=""))
        message = self._open
        assert isinstance(message, OutputMessage)
        if text or logprobs:
            message.content[0].text += text
            message.content[0].logprobs += logprobs
            yield self.event("output_text.delta", **self._part(message), delta=text, logprobs=logprobs)

    def _begin(self, item: OutputItem) -> Iterator[dict[str, Any]]:
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
        elif isinstance(item, OutputReasoning):
            about, thought = self._part(item), item.content[0]
            yield self.event("reasoning_text.done", **about, text=thought.text)
            yield self.event("content_part.done", **about, part=thought.model_dump())
        else:
            about = {"item_id": item.id, "output_index": place}
            yield self.event("function_call_arguments.done", **about, name=item.name, arguments=item.arguments)
        item.status = status
        self._open = None
        self.done.append(item)
        yield self.event("output_item.done", output_index=place, item=item.model_dump())

    def _part(self, item: OutputMessage | OutputReasoning) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self.done), "content_index": 0}


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
