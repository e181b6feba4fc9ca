"""Responses that are kept, and those that are made in the background.

    POST ─► `call` ─► what came before ─► ResponsesCall ─┬─ answered while the client waits, then kept
                                                         └─ `begin`: made in a task of its own, told to its followers

A tenant finds its own ones alone, whether they are kept or still being made.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import EngineUnavailable, IntarsiaError, InvalidRequest, OverQuota, UnknownPrevious, UnknownResponse
from ..front_end.access import TENANT, VIEWER
from ..front_end.front_end import FEW_VALUES, FrontEnd
from ..front_end.json_pieces import size_of
from ..front_end.request_log import RequestLog, logged, note_error
from ..http.prometheus import KeptFigures
from ..settings.limits import Limits
from .answers import as_json
from .kept_conversations import ITEMS, KeptConversations
from .protocol import InputItem, ItemReference, ResponseBody, ResponsesRequest
from .responses import Kept, ResponsesCall, items_of, references_of
from .stored import ResponseStore, Stored

logger = logging.getLogger(__name__)

ENDPOINT = "/v1/responses"
"""How the request log calls a response that was made in the background: its own line, when it has ended."""

MOST_TOLD_CHARS = 4 * 2**20
"""Of the events of one response that are kept while it is being made: those of about 16,000 tokens."""

BROKEN = "internal error; the server's log has the details"


class Name(NamedTuple):
    """Whose response it is, and which."""

    tenant: str
    id: str


class Running:
    """A response that is made in the background, and its stream so far."""

    def __init__(self, call: ResponsesCall):
        self.call = call
        self.task: asyncio.Task[None] | None = None
        self.is_stopping = False  # with the server, and not because a client wants it
        self.told: deque[str] = deque()  # events; none where no stream was asked for
        self.forgotten = 0  # events before these
        self._told_chars = 0
        self._has_ended = False
        self._more = asyncio.Event()

    @property
    def is_streamed(self) -> bool:
        return bool(self.call.body.stream)

    def tell(self, event: dict[str, Any] | str) -> None:
        if not self.is_streamed:
            return
        self.told.append(as_json(event))
        self._told_chars += len(self.told[-1])
        while self._told_chars > MOST_TOLD_CHARS and len(self.told) > 1:
            self._told_chars -= len(self.told.popleft())
            self.forgotten += 1
        self._wake()

    def end(self) -> None:
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[dict[str, Any] | str, None]:
        """The events behind this one, and those to come. Raises `InvalidRequest` where they are forgotten."""
        place = after + 1
        while True:
            if place < self.forgotten:
                raise InvalidRequest(
                    f"events before {self.forgotten} are not kept any more; get the response without stream",
                    field="starting_after",
                )
            if place < self.forgotten + len(self.told):
                yield json.loads(self.told[place - self.forgotten])
                place += 1
            elif self._has_ended:
                return
            else:
                await self._more.wait()


class KeptResponses:
    """Of one server. Lives on its event loop."""

    def __init__(self, store: ResponseStore, limits: Limits, log: RequestLog | None = None):
        self._store = store
        self._limits = limits
        self._log = log
        self._running: dict[Name, Running] = {}
        self.conversations = KeptConversations(store)

    async def stop(self) -> None:
        """What is being made has failed; what is kept stays."""
        for running in self._running.values():
            running.is_stopping = True
        await asyncio.gather(*(self._stop(running) for running in [*self._running.values()]))

    async def figures(self) -> KeptFigures:
        """Of what the caller may see: a tenant's own responses."""
        viewer = VIEWER.get()
        count, size = await self._store.ask(lambda database: database.totals(viewer))
        return KeptFigures(count, size, sum(viewer in (None, name.tenant) for name in self._running))

    # -- a new response ------------------------------------------------------------------------------------------------

    async def call(self, front_end: FrontEnd, body: ResponsesRequest, request_id: str) -> ResponsesCall:
        """What is asked, with what came before. Raises `InvalidRequest`, naming the field."""
        tenant, conversation = TENANT.get(), body.conversation_id
        # What came before.
        if conversation is not None and body.previous_response_id is not None:
            raise InvalidRequest(
                "conversation and previous_response_id both say what came before; give one of them",
                field="conversation",
            )
        if conversation is not None:
            history = await self.conversations.history(front_end, conversation)
        else:
            history = await self._history(front_end, body.previous_response_id)
        body = await self._without_references(front_end, body)
        # What is kept of it.
        if body.store is False and body.background:
            raise InvalidRequest("what is made in the background is kept; leave store out", field="store")
        if body.store is False and conversation is None:
            return ResponsesCall(front_end, body, request_id, Kept(history))
        items = await front_end.aside(size_of(body, FEW_VALUES), lambda: items_of(body))

        async def keep(whole: ResponseBody) -> bool:
            return await self._put(Name(tenant, f"resp_{request_id}"), whole, items)

        async def answered(whole: ResponseBody) -> None:
            assert conversation is not None
            output = whole.model_dump(mode="json")["output"]
            await self.conversations.answered(tenant, conversation, [*items, *output])

        kept = Kept(
            history,
            None if body.store is False else keep,
            items,
            None if conversation is None else answered,
            bool(body.background),
        )
        return ResponsesCall(front_end, body, request_id, kept)

    async def _history(self, front_end: FrontEnd, previous: str | None) -> list[InputItem]:
        if previous is None:
            return []
        tenant = TENANT.get()
        items = await self._store.ask(lambda database: database.chain(tenant, previous))
        if items is None:
            raise UnknownPrevious(
                f"Previous response with id '{previous[:100]}' not found. It, or one that it goes on from, is not kept "
                "any more; send the whole conversation.",
                field="previous_response_id",
            )
        return await front_end.aside(size_of(items, FEW_VALUES), lambda: ITEMS.validate_python(items))

    async def _without_references(self, front_end: FrontEnd, body: ResponsesRequest) -> ResponsesRequest:
        """The request with the items that it names by their ids. Raises `InvalidRequest`."""
        names, tenant = references_of(body), TENANT.get()
        if not names:
            return body
        found = await self._store.ask(lambda database: database.items(tenant, names))
        missing = next((name for name in names if name not in found), None)
        if missing is not None:
            raise InvalidRequest(f"Item with id '{missing[:100]}' not found.", field="input")
        values = [*found.values()]
        items = await front_end.aside(size_of(values, FEW_VALUES), lambda: ITEMS.validate_python(values))
        known = dict(zip(found, items, strict=True))
        given = () if isinstance(body.input, str) else body.input
        whole = [known[item.id] if isinstance(item, ItemReference) else item for item in given]
        return body.model_copy(update={"input": whole})

    async def _put(self, name: Name, response: ResponseBody, items: Sequence[Mapping[str, Any]]) -> bool:
        """Whether it is kept. A disk that is full is no reason to lose an answer."""
        previous = response.previous_response_id
        stored = Stored(name.id, response.status, previous, response.model_dump(mode="json"), items)
        try:
            await self._store.ask(lambda database: database.put(name.tenant, stored))
        except sqlite3.Error as error:
            logger.warning("a response could not be kept: %s", error)
            return False
        return True

    # -- in the background ---------------------------------------------------------------------------------------------

    def begin(self, call: ResponsesCall) -> Running:
        """Make a response that was prepared. Raises `OverQuota` where the tenant has as many as may be."""
        name, limit = Name(TENANT.get(), call.id), self._limits.max_background
        if sum(other.tenant == name.tenant for other in self._running) >= limit:
            raise OverQuota(
                f"{limit} of your responses are being made in the background, and more may not be (max_background); "
                "wait until one is whole",
                limit=limit,
            )
        if name in self._running:
            raise InvalidRequest(f"a response of the id {call.id!r} is being made; give another", field="request_id")
        running = self._running[name] = Running(call)
        running.task = asyncio.create_task(self._make(name, running))
        return running

    async def _make(self, name: Name, running: Running) -> None:
        call, response = running.call, None
        try:
            with logged(self._log, ENDPOINT):
                try:
                    await self._put(name, call.so_far(), call.kept.items)
                    async with contextlib.aclosing(call.events()) as events:
                        async for event in events:
                            running.tell(event)
                except IntarsiaError as error:
                    note_error(error)
                    response = call.ended("failed", error)
                except asyncio.CancelledError:
                    stopped = EngineUnavailable("the server ended before the answer was whole")
                    response = call.ended("failed", stopped) if running.is_stopping else call.ended("cancelled")
                except Exception:
                    logger.exception("a response in the background could not be made")
                    response = call.ended("failed", IntarsiaError(BROKEN))
            if response is not None and response.status == "failed":
                running.tell(call.failed_event(response))
            if response is not None:
                await self._put(name, response, call.kept.items)
            if running.is_streamed and not running.forgotten:
                told = [*running.told]
                await self._store.ask(lambda database: database.put_events(*name, told))
        finally:
            running.end()
            del self._running[name]

    async def _stop(self, running: Running) -> None:
        if running.task is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)

    # -- what is kept --------------------------------------------------------------------------------------------------

    async def find(self, id_: str) -> dict[str, Any]:
        """A response as it is now. Raises `UnknownResponse`."""
        running = self._running.get(Name(TENANT.get(), id_))
        if running is not None:
            return running.call.so_far().model_dump(mode="json")
        return (await self._stored(id_)).body

    async def follow(self, id_: str, after: int) -> AsyncGenerator[dict[str, Any] | str, None]:
        """The events of a response behind this one. Raises `UnknownResponse`, and `InvalidRequest` for one that was not
        streamed in the background."""
        running = self._running.get(Name(TENANT.get(), id_))
        if running is not None and running.is_streamed:
            return running.follow(after)
        told = (await self._stored(id_)).events
        if told is None:
            raise InvalidRequest(
                f"{id_[:100]} was not asked for with background: true and stream: true; get it without stream",
                field="stream",
            )
        return _each(told[after + 1 :])

    async def items(self, id_: str) -> Sequence[Mapping[str, Any]]:
        """All that the model was given for a response, in its order: what came before, and its own input. Raises
        `UnknownResponse`."""
        stored, tenant = await self._stored(id_), TENANT.get()
        previous = stored.previous
        if previous is None:
            return stored.items
        before = await self._store.ask(lambda database: database.chain(tenant, previous))
        return [*(before or ()), *stored.items]

    async def cancel(self, id_: str) -> dict[str, Any]:
        """Stop what is being made in the background. Raises `UnknownResponse`, and `InvalidRequest` for a response that
        its client waited for."""
        running = self._running.get(Name(TENANT.get(), id_))
        if running is not None:
            await self._stop(running)
        body = (await self._stored(id_)).body
        if not body["background"]:
            raise InvalidRequest(
                "Cannot cancel a synchronous response: it was not made in the background.", field="response_id"
            )
        return body

    async def delete(self, id_: str) -> None:
        """Forget it; one that is being made is stopped. Raises `UnknownResponse`."""
        tenant = TENANT.get()
        running = self._running.get(Name(tenant, id_))
        if running is not None:
            await self._stop(running)
        if not await self._store.ask(lambda database: database.delete(tenant, id_)):
            raise _unknown(id_)

    async def _stored(self, id_: str) -> Stored:
        tenant = TENANT.get()
        stored = await self._store.ask(lambda database: database.get(tenant, id_))
        if stored is None:
            raise _unknown(id_)
        return stored


def _unknown(id_: str) -> UnknownResponse:
    return UnknownResponse(f"Response with id '{id_[:100]}' not found.", field="response_id")


async def _each(told: list[str]) -> AsyncGenerator[dict[str, Any] | str, None]:
    for text in told:
        yield json.loads(text)
