"""An answer as it will come back with the next turn, where that is to be prepared."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...proto.reply import Delta
from ..front_end.front_end import Asked
from ..front_end.next_turns import Answered
from .protocol import ChatRequest, Message
from .requests import turns_of
from .tools import CallPiece, calls_of

FOLLOWED = ("stop", "tool_calls")
"""How answers end that are gone on from: neither those that were cut, nor those that failed."""


def is_followed(body: ChatRequest, images: Sequence[str]) -> bool:
    """Could the next turn be told from this request? Not where there are several answers to choose from, the prompt is
    cut or goes on with the last message, or it has images, which the engine would have to be sent again."""
    is_whole = body.truncate_prompt_tokens is None and not body.continue_final_message
    return is_whole and body.add_generation_prompt is not False and (body.n or 1) == 1 and not images


class AnsweredTurn:
    """Collects one answer."""

    def __init__(self, turns: Sequence[Mapping[str, Any]], asked: Asked, *, thoughts_come_back: bool):
        """turns: of the prompt. thoughts_come_back: usually, where the turns do not show it."""
        self._turns = turns
        self._asked = asked
        self._thoughts_come_back = thoughts_come_back
        self._tokens: list[int] = list(asked.prompt)
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[CallPiece] = []
        self._end: str | None = None
        self._lease = ""

    def add(
        self, delta: Delta, thoughts: str, text: str, calls: Sequence[CallPiece], finish_reason: str | None
    ) -> None:
        """More of it has come."""
        self._tokens += delta.token_ids
        self._lease = delta.lease.id if delta.lease is not None else self._lease
        self._thoughts.append(thoughts)
        self._texts.append(text)
        self._calls += calls
        self._end = finish_reason

    def whole(self) -> Answered | None:
        """None for an answer that is hardly gone on from."""
        if self._end not in FOLLOWED:
            return None
        asked = self._asked
        about = asked.options.tenant, asked.request_id, self._lease
        return Answered(self._turns, tuple(self._replies()), self._tokens, *about)

    def _replies(self) -> Iterator[Mapping[str, Any]]:
        """The likeliest first: with the thoughts or without, as earlier answers in this conversation came back."""
        said = {"role": "assistant", "content": "".join(self._texts) or None}
        if self._calls:
            said["tool_calls"] = [call.model_dump() for call in calls_of(self._calls)]
        thoughts = "".join(self._thoughts)
        both = {False: said, True: said | {"reasoning_content": thoughts}}
        earlier = [turn for turn in self._turns if turn.get("role") == "assistant"]
        if not thoughts:
            ways = [False]
        elif earlier:
            ways = [any(turn.get("reasoning_content") for turn in earlier)]
        else:
            ways = [self._thoughts_come_back, not self._thoughts_come_back]
        for way in ways:
            [turn], _ = turns_of([Message.model_validate(both[way])])
            yield turn
