"""A front end's connection to the engine: requests go in, token deltas come out.

    engine ─► EngineClient: a delivery per step ─► Attempt: what waits for one request ─► Generation ─► its reader

A `Generation` is the request as its reader sees it. It runs as one `Attempt` at a time. When the engine is lost or has
no room, that attempt is thrown away, and the next one goes on elsewhere (`recovery.py`).
"""

import asyncio
import contextlib
import logging
import math
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from ...controller.losses import GIVE_UP_AFTER_S
from ...errors import EngineUnavailable, IntarsiaError, InvalidRequest, Overloaded
from ...proto.channel import Address, ChannelClosed
from ...proto.messages import FROM_ENGINE, Abort, Answer, CacheEvents, Delivery, EngineLost, Enough, Submit
from ...proto.reply import NO_MISSES, Backlog, Delta, TokenLogprobs
from ...proto.request import USUAL_OPTIONS, GenerateRequest, Image, RequestOptions, SamplingParams
from ...proto.status import EngineInfo
from .cache_watch import CacheWatches
from .connection import Again, Connection
from .liveness import Line, meet, watch_over
from .questions import Questions
from .recovery import Instead, Lost, Recovery, WithRoom

logger = logging.getLogger(__name__)

__all__ = ["Delta", "EngineClient", "Generation", "TokenLogprobs"]


class EngineClient:
    """Many concurrent requests over one connection. Lives on one event loop.
    An engine that can come back is waited for: requests are asked again then, with the tokens they have."""

    def __init__(
        self, line: Line, info: EngineInfo, again: Again | None = None, give_up_after_s: float = GIVE_UP_AFTER_S
    ):
        """again: brings the engine back when it is lost. None: it never comes back.
        give_up_after_s: how long an engine may be lost again and again without a token in between"""
        self.connection = Connection(line, info, again, give_up_after_s)
        self.questions = Questions(self.connection)
        self.cache_watches = CacheWatches(self.connection)
        self._attempts: dict[int, Attempt] = {}  # by handle
        self._request_ids: set[tuple[str, str]] = set()  # in use, each behind the salt whose it is
        self._tasks = [asyncio.create_task(self._live())]
        if again is not None:
            self._tasks.append(asyncio.create_task(watch_over(self.questions.load, self.connection.drop)))

    @classmethod
    async def connect(
        cls, address: Address, again: Again | None = None, give_up_after_s: float = GIVE_UP_AFTER_S
    ) -> "EngineClient":
        """Raises `EngineUnavailable`."""
        return cls(*await meet(address), again, give_up_after_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose(EngineUnavailable("the connection to the engine was closed"), for_good=True)
        await self.connection.line.close()

    @property
    def info(self) -> EngineInfo:
        return self.connection.info

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        images: Sequence[Image] = (),
        options: RequestOptions = USUAL_OPTIONS,
        stream_interval_s: float = 0.0,
        instead: "Instead[EngineClient] | None" = None,
        with_room: "WithRoom[EngineClient] | None" = None,
    ) -> "Generation":
        """Ask for a completion, or for `sampling.n` of them. The request is sent when its first delta is awaited.

        stream_interval_s: from one delta of an answer to its next, each with all tokens since. 0: each token by
            itself; infinite: the whole answer in one. Fewer deltas cost less.
        instead: where answers go on when this engine is lost. None: only here, if it comes back
        with_room: where it is asked when this engine refuses it for lack of room. None: nowhere
        """
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        prompt = list(prompt_token_ids)
        asked = GenerateRequest(prompt, sampling, images, options, stream_interval_s, len(prompt), is_known=False)
        request_id = request_id or uuid.uuid4().hex
        return Generation(request_id, sampling.n, Recovery(request_id, asked, self, instead, with_room))

    # -- sending -----------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, requests: Mapping[int, GenerateRequest], answers: int) -> "Attempt":
        """Send what one generation asks for: requests by their first answer, each for `answers` answers.
        Raises `EngineUnavailable`, `InvalidRequest` for an id that is in use."""
        self.connection.check_there()
        any_request = next(iter(requests.values()))
        name = any_request.options.salt, request_id  # ids are a tenant's own
        if name in self._request_ids:
            raise InvalidRequest(f"request id {request_id!r} is in use", field="request_id")
        self._request_ids.add(name)
        handles = {first + n: self.connection.draw_handle() for first in requests for n in range(answers)}
        attempt = Attempt(self, name, handles, in_pieces=any_request.stream_interval_s != math.inf)
        self._attempts |= dict.fromkeys(handles.values(), attempt)
        for first, request in requests.items():
            self.connection.send(Submit(handles[first], request))
        return attempt

    def finish(self, attempt: "Attempt", answer: int, *, is_aborted: bool) -> None:
        """Nothing more comes of this answer. is_aborted: the engine is still at it."""
        handle = attempt.handles.pop(answer)
        self._attempts.pop(handle, None)
        if not attempt.handles:
            self._request_ids.discard(attempt.name)
        if is_aborted and self.connection.is_there:
            self.connection.send(Abort(handle))

    # -- receiving ---------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Hand out what the engine says. When it is lost, go on with the one that comes back in its place."""
        while self.connection.failure is None:
            self._lose(await self._receive())
            await self.connection.come_back()

    async def _receive(self) -> IntarsiaError:
        """Hand out what the engine says until it is lost; returns why."""
        reason = EngineUnavailable("the engine has gone; start it again, or wait until it is back")
        stream, losses = self.connection.line.stream, self.connection.losses
        try:
            while True:
                match FROM_ENGINE.read(await stream.receive_message()):
                    case Delivery() as delivery:
                        if losses.in_a_row:
                            losses.progress()
                        self._hand_out(delivery)
                    case Answer(handle, value):
                        losses.progress()
                        if not self.cache_watches.begin(handle):
                            self.questions.answer(handle, value)
                    case CacheEvents(handle, events):
                        self.cache_watches.hear(handle, events)
                    case EngineLost(error, may_come_back=True):
                        reason = error
                    case EngineLost(error):
                        self._lose(error, for_good=True)
        except ChannelClosed:
            return reason
        except Exception as error:  # a bug of ours must still reach every waiting caller
            logger.exception("what the engine says cannot be read")
            return EngineUnavailable(f"what the engine says cannot be read: {error!r}. See the log.")

    def _hand_out(self, delivery: Delivery) -> None:
        """What a step brought. An unknown handle is of an answer that was aborted before the engine heard of that."""
        attempts = self._attempts
        for handle, delta in delivery.deltas:
            if (attempt := attempts.get(handle)) is not None:
                attempt.put(handle, delta)
        for handle, token in zip(delivery.handles, delivery.tokens, strict=True):
            if (attempt := attempts.get(handle)) is not None:
                attempt.put_token(handle, token)
        for handle, error in delivery.errors:
            if (attempt := attempts.get(handle)) is not None:
                attempt.end_with(error)

    def _lose(self, error: IntarsiaError, *, for_good: bool = False) -> None:
        """Tell all that wait for the engine."""
        self.connection.lose(error, for_good=for_good)
        for attempt in self._attempts.values():
            attempt.end_with(Lost(error))
        self._attempts.clear()
        self.questions.end(error)
        self.cache_watches.end(error)


class Attempt:
    """A request at one engine: what has come and was not taken yet, then what ends it.
    Invariant: `handles` are those of the answers that go on."""

    def __init__(self, engine: EngineClient, name: tuple[str, str], handles: dict[int, int], *, in_pieces: bool):
        """handles: by answer. in_pieces: what waits is taken in pieces, so that no request keeps the loop for long."""
        self.name = name
        self.handles = handles
        self._engine = engine
        self._answers = {handle: (answer, 0, NO_MISSES) for answer, handle in handles.items()}  # and what was found
        self._in_pieces = in_pieces
        self._backlog: Backlog | None = None  # none while nothing waits
        self._end: IntarsiaError | Lost | None = None
        self._reader: asyncio.Future[Delta | None] | None = None  # it waits for what comes next
        self._is_behind = False  # what was taken last had waited

    @property
    def unread_bytes(self) -> int:
        return 0 if self._backlog is None else self._backlog.num_bytes

    def put(self, handle: int, delta: Delta) -> None:
        answer, cached_tokens, misses = self._answers[handle]
        cached_tokens, misses = max(cached_tokens, delta.num_cached_tokens), misses or delta.misses
        self._answers[handle] = answer, cached_tokens, misses
        self._put(delta._replace(answer=answer, num_cached_tokens=cached_tokens, misses=misses))

    def put_token(self, handle: int, token: int) -> None:
        answer, cached_tokens, _ = self._answers[handle]
        self._put(Delta((token,), None, None, cached_tokens, None, answer))

    def end_with(self, why: IntarsiaError | Lost) -> None:
        self._end = self._end or why
        self._hand_to_reader(None)

    async def take(self) -> Delta | IntarsiaError | Lost:
        """For one reader. Others get their turn between two pieces of what has waited."""
        if self._is_behind:
            await asyncio.sleep(0)
            self._is_behind = False
        # Mostly the reader is faster, and is handed the next delta as it comes.
        if self._backlog is None and self._end is None:
            self._reader = asyncio.get_running_loop().create_future()
            if (delta := await self._reader) is not None:
                return delta
        if self._backlog is not None:
            delta = self._backlog.take(in_pieces=self._in_pieces)
            self._backlog = self._backlog or None
            self._is_behind = len(delta.token_ids) > 1
            return delta
        assert self._end is not None, "a reader was woken for nothing"
        return self._end

    def _put(self, delta: Delta) -> None:
        if (len(delta.token_ids) == 1 or not self._in_pieces) and self._hand_to_reader(delta):
            return
        self._backlog = self._backlog or Backlog()
        self._backlog.put(delta)
        self._hand_to_reader(None)

    def _hand_to_reader(self, delta: Delta | None) -> bool:
        """Wake the reader if it waits: with a delta, or to look for itself."""
        if self._reader is None or self._reader.done():
            return False
        self._reader.set_result(delta)
        return True

    def finish(self, answer: int, *, is_aborted: bool) -> None:
        """As `EngineClient.finish`."""
        self._engine.finish(self, answer, is_aborted=is_aborted)

    def say_enough(self, answer: int) -> None:
        if self._engine.connection.is_there:
            self._engine.connection.send(Enough(self.handles[answer]))

    def leave(self) -> None:
        """The engine refused the request, or is lost. Whatever still comes is dropped."""
        for answer in list(self.handles):
            self.finish(answer, is_aborted=False)


class Generation(AsyncIterator[Delta]):
    """The deltas of one request as they come, of all its answers in one stream; each says which answer it is of.

    A slow reader finds what has come meanwhile in pieces (see `Backlog`). Leaving a generation before its end, by
    `aclose` or by cancelling its reader, aborts what goes on. When an engine is lost, its answers go on elsewhere.

    Iterating raises `InvalidRequest` (or `RequestTooLarge`) when the request is refused, `Overloaded` when no engine
    has room for it, `DeadlineExceeded` when its time is over, `EngineUnavailable` when the engine is lost for good and
    there is no other, or when engines were lost again and again without a token of this request: it may be the cause.
    """

    def __init__(self, request_id: str, answers: int, recovery: Recovery[EngineClient]):
        self.request_id = request_id
        self._recovery = recovery
        self._attempt: Attempt | None = None  # none while no engine has the request
        self._said: dict[int, list[int]] = {answer: [] for answer in range(answers)}  # tokens of those that go on
        self._aborted: IntarsiaError | None = None

    async def __anext__(self) -> Delta:
        try:
            while self._said:
                # The first time, the request is still to be sent.
                if self._attempt is None:
                    await self._recovery.begin(self._said, self._submit)
                    continue
                # What comes is a delta, or the end of the attempt, or the end of the request.
                item = await self._attempt.take()
                if isinstance(item, Delta):
                    if item.answer not in self._said:
                        continue  # it was ended, and had come a little further
                    self._said[item.answer] += item.token_ids
                    if self._recovery.moves_in_vain:
                        self._recovery.progress()
                    if item.finish_reason is not None:
                        self._finish(item.answer, is_aborted=False)
                    return item
                if not isinstance(item, Lost | Overloaded):
                    raise item
                self._attempt.leave()
                self._attempt = None
                await self._recovery.go_on_after(item, self._said, self._submit)
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        raise self._aborted or StopAsyncIteration

    def _submit(self, engine: EngineClient, requests: Mapping[int, GenerateRequest], answers: int) -> None:
        self._attempt = engine.submit(self.request_id, requests, answers)

    @property
    def unread_bytes(self) -> int:
        """About what has come and was not taken."""
        return 0 if self._attempt is None else self._attempt.unread_bytes

    def enough(self, index: int) -> None:
        """The text of an answer is complete: it ends soon, with a delta that tells of its lease."""
        if self._attempt is not None and index in self._attempt.handles:
            self._attempt.say_enough(index)

    def end(self, index: int) -> None:
        """One answer has said enough; the others go on."""
        if index in self._said:
            self._finish(index, is_aborted=True)

    def abort(self, error: IntarsiaError) -> None:
        """Stop it at once. The iteration gets the error."""
        if self._said:
            self._aborted = error
            if self._attempt is not None:
                self._attempt.end_with(error)
            self._end_all()

    async def aclose(self) -> None:
        """Abort all that goes on."""
        self._recovery.end_turn()
        self._end_all()

    def _end_all(self) -> None:
        for answer in list(self._said):
            self.end(answer)

    def _finish(self, answer: int, *, is_aborted: bool) -> None:
        del self._said[answer]
        if self._attempt is not None:
            self._attempt.finish(answer, is_aborted=is_aborted)
        if not self._said:
            self._recovery.end_turn()

    def __del__(self):
        if self._attempt is not None:  # its reader forgot to close it
            with contextlib.suppress(Exception):
                self._end_all()
