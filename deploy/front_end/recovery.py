"""Where a request is asked: at an engine that has room, and at another one when its engine is lost.

    no room ──► the next engine that may have some, until all have refused
    lost    ──► another engine, or the same when it is back; after two losses without a token: alone
                └─► given up after too many: the request may be their cause

It goes on with the tokens it has.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from ...controller.losses import is_the_cause
from ...errors import EngineUnavailable, IntarsiaError, Overloaded
from ...proto.request import GenerateRequest
from .connection import Connection

logger = logging.getLogger(__name__)

MOST_MOVES_IN_VAIN = 3
"""Moves of a request without a token in between. After one more, the request is taken for the cause and given up."""

MOST_MOVES_TOGETHER = 1
"""Moves without a token during which others may run beside the request. After that it waits for its turn, because it
may be what the engine is lost of. Such suspects are tried one at a time. A request that is not the cause gets a token,
and is no suspect any more."""

TURN_PAUSE_S = 1.0
"""The longest pause before a turn. Other front ends try their suspects, too. The pauses are random, so that two front
ends do not try theirs at the same moment each time."""

MOST_TRIES = 10
"""Engines that one move tries. An engine that was chosen may be lost before it is asked."""


class Lost(NamedTuple):
    """The engine of a request is lost; why."""

    error: IntarsiaError


class Place(Protocol):
    """An engine, as a request sees it that looks for one."""

    connection: Connection


Engine = TypeVar("Engine", bound=Place)

Instead = Callable[[Engine], Awaitable[Engine | None]]
"""Another engine of the same model, given one that is lost. None where there is none."""

WithRoom = Callable[[Collection[Engine]], Awaitable[Engine | None]]
"""Another engine of the same model, given those that have no room. None where there is no other."""

Submit = Callable[[Engine, Mapping[int, GenerateRequest], int], None]
"""Sends requests to an engine, each by its first answer and for so many answers. Raises `EngineUnavailable`."""

Said = Mapping[int, Sequence[int]]
"""The tokens of each answer that goes on."""


class Recovery(Generic[Engine]):
    """Chooses the engines for one request, and remembers which ones were lost or refused it."""

    def __init__(
        self,
        request_id: str,
        asked: GenerateRequest,
        engine: Engine,
        instead: Instead[Engine] | None,
        with_room: WithRoom[Engine] | None,
    ):
        """engine: is asked first. instead, with_room: as `EngineClient.generate` has them."""
        self.moves_in_vain = 0  # since the last token
        self._lost_since_s = 0.0  # when the first of these moves was
        self._request_id = request_id
        self._asked = asked
        self._engine = engine
        self._instead = instead
        self._with_room = with_room
        self._refused_by: list[Engine] = []
        self._deadline_s = math.inf
        self._turn: asyncio.Lock | None = None  # held while the request is tried alone

    async def begin(self, said: Said, submit: Submit[Engine]) -> None:
        """Ask for all answers at once, at the first engine that is not known to be full.

        Raises `Overloaded` when all engines are, and what `go_on_after` raises.
        """
        asked, tenant = self._asked, self._asked.options.tenant
        if asked.options.timeout_s is not None:
            self._deadline_s = min(self._deadline_s, time.monotonic() + asked.options.timeout_s)
        while said:
            try:
                self._engine.connection.refusals.check_room(tenant)
                submit(self._engine, {0: asked}, asked.sampling.n)
            except Overloaded as refusal:
                await self._turn_to_another(refusal)
            except EngineUnavailable as error:
                await self._move(error, said, submit)
                return
            else:
                return

    async def go_on_after(self, end: Lost | Overloaded, said: Said, submit: Submit[Engine]) -> None:
        """The engine is lost, or has no room. When the request was closed meanwhile, `said` is empty.

        Raises the refusal when all engines have refused. Raises why the engine was lost when there will be none.
        Raises `EngineUnavailable` for a request that must be taken for the cause of losses.
        """
        if isinstance(end, Overloaded):
            self._engine.connection.refusals.note(self._asked.options.tenant, end)
            await self._turn_to_another(end)
            await self.begin(said, submit)
        else:
            if not self.moves_in_vain:
                self._lost_since_s = time.monotonic()
            self.moves_in_vain += 1
            await self._move(end.error, said, submit)

    def progress(self) -> None:
        """A token has come: the request was not the cause of the losses before."""
        self.moves_in_vain = 0
        self.end_turn()

    def end_turn(self) -> None:
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    async def _turn_to_another(self, refusal: Overloaded) -> None:
        self._refused_by.append(self._engine)
        other = await self._with_room(self._refused_by) if self._with_room is not None else None
        if other is None:
            raise refusal
        self._engine = other

    async def _move(self, error: IntarsiaError, said: Said, submit: Submit[Engine]) -> None:
        self.end_turn()
        if is_the_cause(self.moves_in_vain, self._lost_since_s, MOST_MOVES_IN_VAIN):
            raise EngineUnavailable(
                f"engines were lost {self.moves_in_vain} times while this request ran, without a token of it between; "
                f"last: {error}"
            )
        for _ in range(MOST_TRIES):
            # Another engine is there at once. Without one, wait until the lost one is back.
            other = await self._instead(self._engine) if self._instead is not None else None
            if other is None and not await self._engine.connection.back():
                raise error
            self._engine = other or self._engine
            # A suspect waits until it may run alone.
            if self.moves_in_vain > MOST_MOVES_TOGETHER:
                await self._take_turn()
            if not said:
                return
            # The engine may be lost again before it is asked.
            try:
                submit(self._engine, _rest_of(self._asked, said, self._deadline_s), 1)
            except EngineUnavailable as failure:
                error = failure
                self.end_turn()
            else:
                logger.info("request %s goes on where an engine is", self._request_id)
                return
        raise error

    async def _take_turn(self) -> None:
        turns = self._engine.connection.turns
        await turns.acquire()
        self._turn = turns
        await asyncio.sleep(secrets.randbelow(1000) / 1000 * TURN_PAUSE_S)


def _rest_of(asked: GenerateRequest, said: Said, deadline_s: float) -> Mapping[int, GenerateRequest]:
    """For each answer, a request that goes on from its tokens. Draws are keyed by seed and position, so the answer
    continues as it would have. deadline_s: of the whole request, on the monotonic clock."""
    options = asked.options
    if options.timeout_s is not None:
        options = replace(options, timeout_s=max(1e-3, deadline_s - time.monotonic()))
    assert asked.sampling.seed is not None
    requests = {}
    for answer, tokens in said.items():
        is_prompt_told = bool(tokens) or answer > 0  # its log-probabilities come with the first token of answer 0
        sampling = replace(
            asked.sampling,
            n=1,
            seed=(asked.sampling.seed + answer) % 2**63,
            prompt_logprobs=None if is_prompt_told else asked.sampling.prompt_logprobs,
        )
        requests[answer] = asked._replace(
            tokens=[*asked.tokens, *tokens], sampling=sampling, options=options, is_known=True
        )
    return requests
