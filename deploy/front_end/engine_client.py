"""A front end's connection to the engine: requests go in, token deltas come out."""

import asyncio
import contextlib
import logging
import math
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ...controller.losses import GIVE_UP_AFTER_S, Losses, is_the_cause
from ...controller.metrics import Metrics
from ...controller.snapshot import EngineView
from ...errors import EngineUnavailable, IntarsiaError, InvalidRequest, Overloaded
from ...kvcache.events import Events
from ...proto.channel import Address, ChannelClosed
from ...proto.codec import read
from ...proto.messages import (
    CACHE_EVENTS,
    FROM_ENGINE,
    FROM_FRONT_END,
    Abort,
    Answer,
    AskCacheState,
    AskLoad,
    AskMetrics,
    AskProbe,
    AskSnapshot,
    CacheEvents,
    Delivery,
    EngineLost,
    Refused,
    Submit,
    UnwatchCache,
    WatchCache,
)
from ...proto.reply import Backlog, Delta, TokenLogprobs
from ...proto.request import USUAL_TERMS, GenerateRequest, Image, SamplingParams, Terms
from ...proto.status import CacheState, EngineInfo, EngineLoad, Look, Probe
from .cache_watch import MOST_UNREAD_NAMES, Subscription, Watch
from .liveness import Line, meet, while_we_run

logger = logging.getLogger(__name__)

Known = TypeVar("Known")

UNWATCH_AFTER_S = 1.0
"""Without a watcher of the cache here: to begin anew costs the engine more than to go on."""

HUNG_AFTER_S = 5.0
"""For an engine to answer a question. One that may not come back is asked nothing."""

MOST_MOVES_IN_VAIN = 3
"""Times that a request goes on without a token since the last time."""

MOST_MOVES_TOGETHER = 1
"""The same in company. After that it waits its turn: of those that may be what the engine goes of, one is tried at a
time, and who is innocent gets its token."""

TURN_PAUSE_S = 1.0
"""At most, before a turn: other front ends give turns, too, and should not do it at the same moment each time."""

MOST_TRIES = 10
"""Of reaching an engine in one move: it may be gone again at once."""

__all__ = ["Delta", "EngineClient", "Generation", "TokenLogprobs"]


class EngineClient:
    """Many concurrent requests over one connection. Lives on one event loop.

    An engine that can come back is waited for: requests are asked again then, with the tokens they have.
    """

    def __init__(
        self,
        line: Line,
        info: EngineInfo,
        again: "Again | None" = None,
        give_up_after_s: float = GIVE_UP_AFTER_S,
    ):
        """again: brings the engine back when it has gone; None: it never comes back.
        give_up_after_s: when it comes back again and again, and says no token in between"""
        self.info = info
        self._line = line
        self._again = again
        self._losses = Losses(give_up_after_s)
        self._answers: dict[int, _Answer] = {}  # by handle
        self._questions: dict[int, asyncio.Future[Any]] = {}  # by handle
        self._watches: dict[int, Subscription] = {}  # by handle
        self._watched: dict[str | None, int] = {}  # handles by viewer
        self._request_ids: set[tuple[str, str]] = set()  # in use, each with the salt whose it is
        self._full: dict[str, _Full] = {}  # by tenant
        self._untold_refusals = 0  # by ourselves
        self._turns = asyncio.Lock()  # held by one of the requests that may be what the engine goes of
        self._next_handle = 0
        self._away: IntarsiaError | None = None  # why the engine can not be reached now
        self._failure: IntarsiaError | None = None  # why it can not be reached ever
        self._gone = asyncio.Event()  # for ever
        self._settled = asyncio.Event()  # it is there, or gone for ever
        self._settled.set()
        self._left = asyncio.Event()  # it can not be reached now
        self._tasks = [asyncio.create_task(self._live())]
        if again is not None:
            self._tasks.append(asyncio.create_task(self._watch_over()))

    @classmethod
    async def connect(
        cls, address: Address, again: "Again | None" = None, give_up_after_s: float = GIVE_UP_AFTER_S
    ) -> "EngineClient":
        """Raises `EngineUnavailable`."""
        return cls(*await meet(address), again, give_up_after_s)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        images: Sequence[Image] = (),
        terms: Terms = USUAL_TERMS,
        stream_interval_s: float = 0.0,
        instead: "Instead | None" = None,
        with_room: "WithRoom | None" = None,
    ) -> "Generation":
        """Ask for a completion, or for `sampling.n` of them. The request is sent when its first delta is awaited.

        stream_interval_s: from one delta of an answer to its next, each with all tokens since. 0: each token by
            itself; infinite: the whole answer in one. Fewer deltas cost less.
        instead: where answers go on when this engine is gone; None: only here, if it comes back
        with_room: where it is asked when this engine refuses it for lack of room; None: nowhere
        """
        prompt = list(prompt_token_ids)
        asked = GenerateRequest(prompt, sampling, images, terms, stream_interval_s, len(prompt), is_known=False)
        return Generation(self, asked, request_id or uuid.uuid4().hex, instead, with_room)

    async def load(self, viewer: str | None = None) -> EngineLoad:
        """How busy the engine is. viewer: with the requests of this salt; None: of all. Raises `EngineUnavailable` when
        it is gone."""
        return await self._ask(AskLoad, viewer, kind=EngineLoad)

    async def cache_state(self, viewer: str | None = None) -> CacheState:
        """Where the pool's blocks are. viewer: as for `load`. Raises `EngineUnavailable` when the engine is gone."""
        return await self._ask(AskCacheState, viewer, kind=CacheState)

    async def probe(self, tokens: Sequence[int], salt: str = "") -> Probe:
        """What a request with this prompt would meet here. Raises `EngineUnavailable` when the engine is gone."""
        return await self._ask(AskProbe, list(tokens), salt, kind=Probe)

    async def metrics(self) -> Metrics:
        """What was measured since the start. Raises `EngineUnavailable` when the engine is gone."""
        return await self._ask(AskMetrics, kind=Metrics)

    async def view(self, look: Look) -> EngineView:
        """All there is to see at one moment. Raises `EngineUnavailable` when the engine is gone."""
        return await self._ask(AskSnapshot, look, kind=EngineView)

    async def watch_cache(
        self, viewer: str | None = None, most_unread_names: int = MOST_UNREAD_NAMES
    ) -> AsyncGenerator[Events, None]:
        """What becomes known in the prefix cache and what is known no longer, as it happens; what is known already
        comes first, after a `Cleared`. Close it to stop. The engine tells it once, however many watch here.

        viewer: of the blocks of this salt; None: of all.
        Raises `Overloaded` when more has happened than the caller has taken: what is known must be asked for anew.
        Raises `EngineUnavailable` when the engine is gone.
        """
        self._check_there()
        if viewer not in self._watched:
            self._watched[viewer] = handle = self._draw_handle()
            self._watches[handle] = Subscription()
            self._send(WatchCache(handle, viewer))
        subscription = self._watches[self._watched[viewer]]
        watch: Watch | None = None
        try:
            watch = await subscription.watch(most_unread_names)
            while True:
                yield await watch.take()
        finally:
            subscription.leave(watch)
            if not subscription.watches:
                asyncio.get_running_loop().call_later(UNWATCH_AFTER_S, self._unwatch, viewer, subscription)

    def _unwatch(self, viewer: str | None, subscription: Subscription) -> None:
        """If no watcher has come meanwhile."""
        handle = self._watched.get(viewer)
        if handle is None or self._watches.get(handle) is not subscription or subscription.watches:
            return
        del self._watched[viewer], self._watches[handle]
        self._send(UnwatchCache(handle))

    def _send(self, message: Any) -> None:
        self._line.stream.send_message(FROM_FRONT_END.plain(message))

    async def _ask(self, question: type, *about: Any, kind: type[Known]) -> Known:
        self._check_there()
        self._tell_refusals()
        handle = self._draw_handle()
        self._questions[handle] = asyncio.get_running_loop().create_future()
        self._send(question(handle, *about))
        try:
            return read(await self._questions[handle], kind)
        finally:
            self._questions.pop(handle, None)

    def _check_there(self) -> None:
        error = self._failure or self._away
        if error is not None:
            raise error

    def _draw_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle - 1

    @property
    def failure(self) -> IntarsiaError | None:
        """Why the engine can not be reached any more; None while it can, or while it may come back."""
        return self._failure

    @property
    def is_there(self) -> bool:
        """Whether the engine can be reached now."""
        return self._failure is None and self._away is None

    async def away(self) -> None:
        """Wait until the engine can not be reached."""
        await self._left.wait()

    async def back(self) -> bool:
        """Wait until the engine can be reached, or never again. Whether it can."""
        await self._settled.wait()
        return self._failure is None

    async def wait_gone(self) -> IntarsiaError:
        """Wait until the engine can not be reached any more; why that is."""
        await self._gone.wait()
        assert self._failure is not None
        return self._failure

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(EngineUnavailable("the connection to the engine was closed"))
        await self._line.close()

    # -- for `Generation` --------------------------------------------------------------------------------------------

    def _submit(
        self, generation: "Generation", requests: Mapping[int, GenerateRequest], answers: int
    ) -> dict[int, int]:
        """Send what each answer is to come from; `answers` of them from each. Returns their handles, by answer."""
        self._check_there()
        if generation.name in self._request_ids:
            raise InvalidRequest(f"request id {generation.request_id!r} is in use", field="request_id")
        self._request_ids.add(generation.name)
        self._tell_refusals()
        handles = {}
        for first, request in requests.items():
            for index in range(first, first + answers):
                handles[index] = self._draw_handle()
                self._answers[handles[index]] = _Answer(generation.inbox, index)
            self._send(Submit(handles[first], request))
        return handles

    def is_full(self, tenant: str) -> bool:
        """Whether the engine has just said that it takes nobody of `tenant`."""
        full = self._full.get(tenant)
        return full is not None and time.monotonic() < full.until_s

    def check_room(self, tenant: str) -> None:
        """Raises `Overloaded` where the engine is full, and counts that. A flood ends here: the one process that plans
        the steps of all hears of a fraction of it."""
        if self.is_full(tenant):
            self._untold_refusals += 1
            raise self._full[tenant].refusal.again()

    def _note_refusal(self, tenant: str, refusal: IntarsiaError) -> None:
        full_for_s = float(refusal.details.get("full_for_s", 0.0))
        if full_for_s:
            now_s = time.monotonic()
            self._full = {name: full for name, full in self._full.items() if now_s < full.until_s}
            self._full[tenant] = _Full(now_s + full_for_s, refusal.bare())

    def _tell_refusals(self) -> None:
        if self._untold_refusals:
            self._send(Refused(self._untold_refusals))
            self._untold_refusals = 0

    def _abort(self, handle: int) -> None:
        if self.is_there:
            self._send(Abort(handle))

    def _forget(self, handle: int) -> None:
        self._answers.pop(handle, None)

    def _release_id(self, name: tuple[str, str]) -> None:
        self._request_ids.discard(name)

    # -- what the engine says ----------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Listen to the engine; when it goes, to the one that comes back in its place."""
        while True:
            error = await self._receive()
            if self._again is None or self._failure is not None:
                return self._fail(error)
            self._away = error
            self._settled.clear()
            self._left.set()
            self._tell_all(error)
            self._line.drop()
            try:
                self._line, self.info = await self._met_again(error)
            except IntarsiaError as failure:
                return self._fail(failure)
            except Exception as failure:  # a bug of ours must still reach every waiting caller
                logger.exception("the engine can not be brought back")
                return self._fail(EngineUnavailable(f"the engine can not be brought back: {failure!r}. See the log."))
            self._losses.back()
            self._away = None
            self._left.clear()
            self._settled.set()

    async def _met_again(self, error: IntarsiaError) -> tuple[Line, EngineInfo]:
        """The engine that is back. It may be gone again before it is met."""
        assert self._again is not None
        while True:
            await self._losses.bear(error)
            address = await self._again()
            try:
                return await meet(address)
            except EngineUnavailable as gone:
                error = gone

    async def _watch_over(self) -> None:
        """Give up an engine that says nothing when it is asked, twice."""
        misses = 0
        while True:
            await asyncio.sleep(HUNG_AFTER_S)
            try:
                await while_we_run(self.load(), HUNG_AFTER_S)
                misses = 0
            except TimeoutError:
                misses += 1
            except IntarsiaError:
                misses = 0  # it has gone
            if misses == 2:
                logger.warning("the engine says nothing for %g s; it is given up", 2 * HUNG_AFTER_S)
                self._line.drop()
                misses = 0  # who comes in its place may hang at once, too

    async def _receive(self) -> IntarsiaError:
        """Hand out what the engine says until it has gone; why that is."""
        reason = EngineUnavailable("the engine has gone; start it again, or wait until it is back")
        try:
            while True:
                message = FROM_ENGINE.read(await self._line.stream.receive_message())
                match message:
                    case Delivery():
                        if self._losses.in_a_row:
                            self._losses.progress()
                        self._hand_out(message)
                    case Answer(handle, value):
                        self._losses.progress()
                        self._answer(handle, value)
                    case CacheEvents(handle, events):
                        if (watching := self._watches.get(handle)) is not None:
                            watching.hear(Events(list(map(CACHE_EVENTS.read, events))))
                    case EngineLost(error, may_come_back=True):
                        reason = error
                    case EngineLost(error):
                        self._fail(error)
        except ChannelClosed:
            return reason
        except Exception as error:  # a bug of ours must still reach every waiting caller
            logger.exception("what the engine says can not be read")
            return EngineUnavailable(f"what the engine says can not be read: {error!r}. See the log.")

    def _hand_out(self, delivery: Delivery) -> None:
        """What a step brought. Handles without an answer were aborted, and the engine had not heard of it yet."""
        answers = self._answers
        for handle, delta in delivery.deltas:
            if (answer := answers.get(handle)) is not None:
                answer.put(delta)
        for handle, token in zip(delivery.handles, delivery.tokens, strict=True):
            if (answer := answers.get(handle)) is not None:
                answer.put_token(token)
        for handle, error in delivery.errors:
            if (answer := answers.get(handle)) is not None:
                answer.put(error)

    def _answer(self, handle: int, value: Any) -> None:
        question = self._questions.get(handle)
        if question is None and handle in self._watches:
            question = self._watches[handle].begun
        if question is not None and not question.done():
            question.set_result(value)

    def _fail(self, error: IntarsiaError) -> None:
        """It never comes back."""
        self._failure = self._failure or error
        self._tell_all(self._failure)
        self._gone.set()
        self._left.set()
        self._settled.set()

    def _tell_all(self, error: IntarsiaError) -> None:
        """Whoever waits for the engine."""
        watches, self._watches, self._watched = self._watches, {}, {}
        answers, self._answers = self._answers, {}
        questions, self._questions = self._questions, {}
        for watching in watches.values():
            watching.end(error)
        for answer in answers.values():
            answer.put(_Lost(error))
        for question in questions.values():
            if not question.done():
                question.set_exception(error)


class _Full(NamedTuple):
    """What the engine said to somebody, and would say to others of the tenant."""

    until_s: float
    refusal: IntarsiaError


class _Lost(NamedTuple):
    """The engine of an answer has gone."""

    error: IntarsiaError


class Inbox:
    """What has come for a request and was not taken yet; then what ends it."""

    def __init__(self, *, in_pieces: bool = True):
        """in_pieces: what waits is taken in pieces, so that one request does not keep the loop long; else in one."""
        self._in_pieces = in_pieces
        self._backlog = Backlog()
        self._end: IntarsiaError | _Lost | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_behind = False  # what was taken last had waited

    @property
    def unread_bytes(self) -> int:
        return self._backlog.num_bytes

    def put(self, delta: Delta) -> None:
        self._backlog.put(delta)
        self._wake()

    def end_with(self, why: "IntarsiaError | _Lost") -> None:
        self._end = self._end or why
        self._wake()

    async def take(self) -> "Delta | IntarsiaError | _Lost":
        """For one who waits at a time. Others get their turn between two pieces of what has waited."""
        if self._is_behind:
            await asyncio.sleep(0)
        while not self._backlog and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._backlog:
            delta = self._backlog.take(in_pieces=self._in_pieces)
            self._is_behind = len(delta.token_ids) > 1
            return delta
        assert self._end is not None
        return self._end

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Answer:
    """Where the deltas of one answer go."""

    def __init__(self, inbox: Inbox, index: int):
        self._inbox = inbox
        self._index = index
        self._cached_tokens = 0

    def put(self, item: Delta | IntarsiaError | _Lost) -> None:
        if isinstance(item, Delta):
            self._cached_tokens = max(self._cached_tokens, item.num_cached_tokens)
            self._inbox.put(item._replace(answer=self._index, num_cached_tokens=self._cached_tokens))
        else:
            self._inbox.end_with(item)

    def put_token(self, token: int) -> None:
        self._inbox.put(Delta((token,), None, None, self._cached_tokens, None, self._index))


class Generation(AsyncIterator[Delta]):
    """The deltas of one request as they come, of all its answers in one stream; each says which answer it is of.

    A reader slower than the engine finds what has come meanwhile in pieces of `PIECE_TOKENS` (see
    `Backlog`), and others get their turn between two of them.

    Leaving it before its end, by `aclose` or by cancelling whoever waits, aborts what goes on.

    An engine that goes takes no answer with it if it comes back, or where there is another one: each goes on there with
    the tokens it has, and since draws are keyed by seed and position, as it would have.

    A request that was lost with engines again and again is tried alone, as far as this client's requests go.

    Iterating raises `InvalidRequest` (or `RequestTooLarge`) when the request is refused, `Overloaded` when no engine
    has room for it, `DeadlineExceeded` when its time is over, `EngineUnavailable` when the engine is gone for good and
    there is no other, or when engines went again and again without a token of this request: it may be what they die of.
    """

    def __init__(
        self,
        client: EngineClient,
        asked: GenerateRequest,
        request_id: str,
        instead: "Instead | None" = None,
        with_room: "WithRoom | None" = None,
    ):
        self.request_id = request_id
        self._in_pieces = asked.stream_interval_s != math.inf  # an answer that is wanted as a whole comes as one
        self.inbox = Inbox(in_pieces=self._in_pieces)
        self._client = client
        self._instead = instead
        self._with_room = with_room
        self._refused_by: list[EngineClient] = []  # for lack of room
        if asked.sampling.seed is None:
            asked = asked._replace(sampling=replace(asked.sampling, seed=secrets.randbits(63)))
        self._asked = asked
        self.name = asked.terms.salt, request_id  # ids are a tenant's own
        self._handles: dict[int, int] = {}  # by answer, once it is sent
        self._open = set(range(asked.sampling.n))  # answers that go on
        self._said: list[list[int]] = [[] for _ in self._open]  # what is known of each, should it go on elsewhere
        self._moves_in_vain = 0  # since the last token
        self._lost_since_s = 0.0  # when the first of them was
        self._turn: asyncio.Lock | None = None  # held while it is tried alone
        self._deadline_s = math.inf
        self._aborted: IntarsiaError | None = None

    async def __anext__(self) -> Delta:
        if self._aborted is not None:
            raise self._aborted
        try:
            if not self._handles and self._open:
                if self._asked.terms.timeout_s is not None:
                    self._deadline_s = time.monotonic() + self._asked.terms.timeout_s
                await self._begin()
            while self._open:
                item = await self.inbox.take()
                if isinstance(item, _Lost):
                    await self._move(item.error)
                    item = self._aborted  # while nobody looked
                if isinstance(item, Overloaded):
                    self._client._note_refusal(self._asked.terms.tenant, item)
                    if await self._turn_to_another():
                        await self._begin()
                        continue
                if isinstance(item, IntarsiaError):
                    raise item
                if item is not None and item.answer in self._open:
                    self._said[item.answer] += item.token_ids
                    self._moves_in_vain = 0
                    self._end_turn()
                    if item.finish_reason is not None:
                        self._close(item.answer)
                    return item
        except BaseException:
            await self.aclose()
            raise
        raise StopAsyncIteration

    @property
    def unread_bytes(self) -> int:
        """About what has come and was not taken."""
        return self.inbox.unread_bytes

    async def _begin(self) -> None:
        """Raises `Overloaded` if it is known beforehand that no engine has room."""
        while True:
            try:
                self._client.check_room(self._asked.terms.tenant)
                self._handles = self._client._submit(self, {0: self._asked}, self._asked.sampling.n)
            except Overloaded:
                if await self._turn_to_another():
                    continue
                raise
            except EngineUnavailable as error:
                await self._move(error)
            if self._aborted is not None:  # while nobody looked
                raise self._aborted
            return

    def _leave_engine(self) -> None:
        """Nothing that comes from it is for this request any more."""
        if self._handles:
            for handle in self._handles.values():
                self._client._forget(handle)
            self._client._release_id(self.name)
            self._handles = {}

    async def _turn_to_another(self) -> bool:
        """Leave an engine that has no room. False when all have said so."""
        self._leave_engine()
        self._refused_by.append(self._client)
        other = await self._with_room(self._refused_by) if self._with_room is not None else None
        if other is None:
            return False
        self._client, self.inbox = other, Inbox(in_pieces=self._in_pieces)
        return True

    async def _move(self, error: IntarsiaError) -> None:
        """Go on with another engine, or with this one when it is back. Raises `error`, why the engine is gone, when
        there will be none."""
        self._end_turn()
        if self._handles:
            if not self._moves_in_vain:
                self._lost_since_s = time.monotonic()
            self._moves_in_vain += 1
            self._leave_engine()
        if is_the_cause(self._moves_in_vain, self._lost_since_s, MOST_MOVES_IN_VAIN):
            raise EngineUnavailable(
                f"engines were lost {self._moves_in_vain} times while this request ran, without a token of it between; "
                f"last: {error}"
            )
        for _ in range(MOST_TRIES):
            other = await self._instead(self._client) if self._instead is not None else None
            if other is None and await self._client.back():
                other = self._client
            if other is None:
                raise error
            self._client, self.inbox, self._handles = other, Inbox(in_pieces=self._in_pieces), {}
            if self._moves_in_vain > MOST_MOVES_TOGETHER:
                await self._take_turn(other._turns)
            try:
                self._handles = other._submit(self, self._rest(), 1)
            except EngineUnavailable as gone:
                error = gone
                self._end_turn()
                continue
            logger.info("request %s goes on where an engine is", self.request_id)
            return
        raise error

    async def _take_turn(self, turns: asyncio.Lock) -> None:
        await turns.acquire()
        self._turn = turns
        await asyncio.sleep(secrets.randbelow(1000) / 1000 * TURN_PAUSE_S)

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    def _rest(self) -> dict[int, GenerateRequest]:
        """What each open answer is to go on from."""
        asked = self._asked
        terms = asked.terms
        if terms.timeout_s is not None:
            terms = replace(terms, timeout_s=max(1e-3, self._deadline_s - time.monotonic()))
        assert asked.sampling.seed is not None
        requests = {}
        for answer in self._open:
            told = bool(self._said[answer]) or answer > 0  # of the prompt's log-probabilities
            sampling = replace(
                asked.sampling,
                n=1,
                seed=(asked.sampling.seed + answer) % 2**63,
                prompt_logprobs=None if told else asked.sampling.prompt_logprobs,
            )
            tokens = [*asked.tokens, *self._said[answer]]
            requests[answer] = asked._replace(tokens=tokens, sampling=sampling, terms=terms, is_known=True)
        return requests

    def end(self, index: int) -> None:
        """One answer has said enough; the others go on."""
        if index in self._open:
            handle = self._close(index)
            self._client._abort(handle)

    def abort(self, error: IntarsiaError) -> None:
        """Stop it at once. The iteration gets the error."""
        if self._open:
            self._aborted = error
            self.inbox.end_with(error)
            if self._handles:  # else it is on its way to another engine, and stops there
                for index in list(self._open):
                    self.end(index)

    async def aclose(self) -> None:
        """Abort all that goes on."""
        self._end_turn()
        for index in list(self._open):
            if not self._handles:
                self._open.discard(index)
            else:
                self.end(index)

    def _close(self, index: int) -> int:
        handle = self._handles[index]
        self._open.discard(index)
        self._client._forget(handle)
        if not self._open:
            self._end_turn()
            self._client._release_id(self.name)
        return handle

    def __del__(self):
        if self._handles and self._open:  # nobody listens any more
            with contextlib.suppress(Exception):
                for index in list(self._open):
                    self.end(index)


Again = Callable[[], Awaitable[Address]]
"""Brings an engine back that has gone; where it is then. Raises `EngineUnavailable` when it can not."""

Instead = Callable[[EngineClient], Awaitable[EngineClient | None]]
"""Another engine of the same model, given one that is gone; None where there is none."""

WithRoom = Callable[[Collection[EngineClient]], Awaitable[EngineClient | None]]
"""Another engine of the same model, given those that have none; None where there is none."""
