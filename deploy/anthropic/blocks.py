"""An answer as blocks of content: thoughts, words and calls, one after the other, and the events that tell of them."""

from collections.abc import Generator, Iterator, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

from pydantic_core import from_json

from ..openai.conversation import AnswerPart
from ..openai.tools import CallPiece
from .protocol import Called, Said, StopReason, Thought

Block = Said | Thought | Called

Kind = TypeVar("Kind", Said, Thought, Called)


def stop_reason(part: AnswerPart) -> tuple[StopReason, str | None]:
    """Of an answer whose last part this is, and the sequence that stopped it."""
    match part.finish_reason:
        case "length":
            return "max_tokens", None
        case "tool_calls":
            return "tool_use", None
    if part.delta.stop is not None:
        return "stop_sequence", part.delta.stop
    return "end_turn", None


class Blocks:
    """The blocks of one answer.

    Invariant: at most the last of `done` is open, and `_arguments` are those of an open call.
    """

    def __init__(self, *, shows_thoughts: bool = True):
        """shows_thoughts: else their blocks are empty."""
        self.done: list[Block] = []
        self._is_open = False
        self._arguments = ""
        self._thoughts = ""
        self._shows_thoughts = shows_thoughts

    def add(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """More of the answer has come."""
        if part.thoughts:
            yield from self._think(part.thoughts)
        if part.text:
            yield from self._say(part.text)
        yield from self._call(part.calls)

    def end(self) -> Iterator[dict[str, Any]]:
        """The answer is whole, or cut."""
        if not self._is_open:
            return
        self._is_open = False
        match self.done[-1]:
            case Thought() as block:
                block.signature = blake2b(self._thoughts.encode(), digest_size=16).hexdigest()
                self._thoughts = ""
                yield self._delta({"type": "signature_delta", "signature": block.signature})
            case Called() as block:
                block.input = _object(self._arguments)
                self._arguments = ""
            case Said():
                pass
        yield {"type": "content_block_stop", "index": len(self.done) - 1}

    def _think(self, text: str) -> Iterator[dict[str, Any]]:
        block = yield from self._at(Thought(thinking="", signature=""))
        self._thoughts += text
        if self._shows_thoughts:
            block.thinking += text
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        block = yield from self._at(Said(text=""))
        block.text += text
        yield self._delta({"type": "text_delta", "text": text})

    def _call(self, pieces: Sequence[CallPiece]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if piece.name is not None:
                yield from self.end()
                yield from self._at(Called(id=_id(piece.id), name=piece.name, input={}))
            self._arguments += piece.arguments
            if piece.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def _at(self, fresh: Kind) -> Generator[dict[str, Any], None, Kind]:
        """The open block, if it is of that kind; else a fresh one, before which another one ends."""
        if self._is_open and isinstance(last := self.done[-1], type(fresh)):
            return last
        yield from self.end()
        self.done.append(fresh)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self.done) - 1, "content_block": fresh.model_dump()}
        return fresh

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.done) - 1, "delta": delta}


def _id(of_call: str) -> str:
    """A drawn one as Anthropic's begin; one of the model's own as its template wants it back."""
    return f"toolu_{of_call.removeprefix('call_')}" if of_call.startswith("call_") else of_call


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut, those that have come."""
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
