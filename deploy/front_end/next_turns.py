"""The next turn of a conversation, computed before it is asked for, up to where its own words begin.

A template seldom writes an answer as the model has drawn it: it leaves thoughts out, writes calls anew, and text is cut
into other tokens. So the history of the next turn is known only in part to the engine, which computes the rest while
the user reads. The template tells what it is: it renders two turns that could follow.

    drawn         <user> What is oak? <assistant> <think> ... </think> A tree.
    next turn     <user> What is oak? <assistant> A tree. <user> \\u241f
    another one   <user> What is oak? <assistant> A tree. <user> A
                                                                 ^ as far as the tokens are the same

It is not known whether the turn will come. So this is done only on wish, and while no request waits.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...controller.scheduling.preparation import LEAST_TOKENS
from ...errors import IntarsiaError
from ...proto.request import RequestOptions
from ...proto.status import PreparedPrompt
from .access import TENANT
from .borders import OTHER_WORDS, Rendering, same
from .engine_client import EngineClient
from .request_log import RECORD, Record
from .router import Router

WORDS = OTHER_WORDS, "A"
"""What is said in the two turns: no tokenizer begins both with the same token."""

MOST_AT_ONCE = 64
"""Conversations whose next turns are rendered or waited for. Of more nothing is prepared."""

Turn = Mapping[str, Any]
"""A message as templates want it."""


class Answered(NamedTuple):
    """A conversation whose answer is there."""

    messages: Sequence[Turn]  # that were asked
    replies: Sequence[Turn]  # the answer in the ways in which it may come back, the likeliest first
    tokens: Sequence[int]  # of prompt and answer, as they were drawn
    tenant: str
    request_id: str
    lease: str = ""  # that it was granted


class NextTurns:
    """Has them prepared. One for each front end; lives on its event loop."""

    def __init__(self, engine: EngineClient, router: Router | None = None):
        self._engine = engine
        self._router = router
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_under_way(self) -> int:
        return len(self._tasks)

    def expect(self, answered: Answered, render: Rendering) -> None:
        """Prepare the turn that may follow. Returns at once."""
        if len(self._tasks) < MOST_AT_ONCE:
            task = asyncio.ensure_future(self._prepare(answered, render, RECORD.get()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Wait until nothing is prepared."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _prepare(self, answered: Answered, render: Rendering, record: Record | None) -> None:
        began_s = time.monotonic()
        # A template that refuses the turn, one that is too long, and an engine that is lost: then nothing is prepared.
        with contextlib.suppress(IntarsiaError):
            if (await self._engine.questions.load()).waiting:
                return
            # 1. As far as what was drawn is the next turn's beginning, the engine has it.
            prompt = await _beginning(answered.messages, answered.replies[0], render)
            kept = same(prompt, answered.tokens)
            computed = len(answered.tokens) - 1  # the last token was drawn and never computed
            if not prompt or (kept >= computed and len(prompt) - 1 - computed < LEAST_TOKENS):
                return
            # 2. The rest of what was drawn is needed no more, if the answer comes back in no other way.
            passed = answered.tokens[kept:]
            for other in answered.replies[1:]:
                if passed and await _beginning(answered.messages, other, render) != prompt:
                    passed = ()
            # 3. The engine says at last what became of it.
            prepared = await self._ask(prompt, answered, kept, passed)
            if record is not None:
                record.log_prepared(answered.request_id, len(prompt) - 1, prepared, time.monotonic() - began_s)

    async def _ask(self, prompt: list[int], answered: Answered, kept: int, passed: Sequence[int]) -> PreparedPrompt:
        tenant, salt = (TENANT.get() or answered.tenant), TENANT.get()
        engine = self._engine
        if self._router is not None:  # where it would be sent, which is where most of it is known
            engine = await self._router.choose(prompt, RequestOptions(tenant=tenant, salt=salt)) or engine
        return await engine.questions.prepare(prompt, tenant, salt, kept, passed, answered.lease)


async def _beginning(messages: Sequence[Turn], reply: Turn, render: Rendering) -> list[int]:
    """The tokens with which the turn after this reply begins, and one that could follow. Empty if there are none."""
    names_tools = any(turn.get("role") == "tool" and turn.get("name") for turn in messages)
    one, other = [
        await render([*messages, reply, *_following(reply, words, names_tools=names_tools)]) for words in WORDS
    ]
    border = same(one, other)
    return one[: border + 1] if 0 < border < len(one) else []


def _following(reply: Turn, words: str, *, names_tools: bool) -> Iterator[Turn]:
    """What is said after a reply: the results of its calls, or what the user says. names_tools: results say whose they
    are, which most clients leave to the id of the call."""
    calls = reply.get("tool_calls") or ()
    for call in calls:
        name = {"name": call["function"]["name"]} if names_tools else {}
        yield {"role": "tool", "tool_call_id": call["id"], "content": words} | name
    if not calls:
        yield {"role": "user", "content": words}
