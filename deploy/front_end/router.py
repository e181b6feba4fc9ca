"""Engines that serve the same model, as one front end sees them: its own, and those of other replicas.

    replica 1:  front end ──► engine          a front end asks every engine what it has of a prompt, and how much it
                        ╲ ╱                   has to do, and sends the request to where its first token comes soonest
                         ╳
                        ╱ ╲
    replica 2:  front end ──► engine

Whether a prefix can be reused is for each engine to say, since no list of its blocks tells what a hybrid model needs
of them. Asking takes a fraction of a millisecond, a prompt that is computed anew a thousand times that. Tokens come
back over the connection that every front end has with its own engine too: one message per step and front end.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from ...errors import IntarsiaError
from ...proto.channel import Address
from ...proto.request import USUAL_OPTIONS, RequestOptions
from ...proto.status import Probe
from .engine_client import EngineClient

logger = logging.getLogger(__name__)

LOOK_AROUND_EVERY_S = 2.0
"""How soon an engine that has come is asked, too."""

ANSWER_WITHIN_S = 0.1
"""An engine that takes longer is left out this once."""

DECODING_TOKENS = 64
"""A request that is being answered slows others down like so many tokens of a prompt."""

MOVE_TOKENS = 32
"""What another engine must save at least: every front end leans to its own."""

Discover = Callable[[Collection[str]], Awaitable[Mapping[str, Address]]]
"""Finds the engines that there are now, by name, beside those whose names it is given."""


def burden(probe: Probe, prompt_tokens: int) -> int:
    """Tokens to compute before the first token of a request, and beside it."""
    return prompt_tokens - probe.cached_tokens + probe.queued_tokens + DECODING_TOKENS * probe.running


def choose(probes: Mapping[str, Probe], own: str, prompt_tokens: int) -> str:
    """The engine that has least to do. `own` is taken where no other is better by much, or none answered."""

    def cost(name: str) -> int:
        return burden(probes[name], prompt_tokens) + (0 if name == own else MOVE_TOKENS)

    staying = [name for name in probes if not probes[name].is_leaving]
    return min(staying, key=lambda name: (cost(name), name != own), default=own)


class Router:
    """Lives on the event loop of its own engine's connection."""

    def __init__(self, own: EngineClient, name: str, discover: Discover):
        """name: of the own engine, as `discover` has it."""
        self._own = name
        self._engines = {name: own}
        self._discover = discover
        self._looking = asyncio.ensure_future(self._look_around())

    @property
    def engines(self) -> Mapping[str, EngineClient]:
        """All engines by name, the own one first."""
        return dict(self._engines)

    async def choose(
        self, prompt: Sequence[int], options: RequestOptions = USUAL_OPTIONS, full: Collection[EngineClient] = ()
    ) -> EngineClient | None:
        """The engine that answers a request with this prompt soonest. full: those that have refused it; None if all
        have."""
        engines = {name: engine for name, engine in self._engines.items() if engine not in full}
        # Those that would refuse others of its tenant at this moment only where there is none else.
        engines = {
            name: each for name, each in engines.items() if not each.connection.refusals.is_full(options.tenant)
        } or engines
        first = next(iter(engines.values()), None)
        if first is None or len(engines) == 1 or len(prompt) >= first.info.max_model_len:  # too long, wherever it goes
            return first
        probes = await asyncio.gather(*[self._probe(engine, prompt, options.salt) for engine in engines.values()])
        answered = {name: probe for name, probe in zip(engines, probes, strict=True) if probe is not None}
        return engines.get(choose(answered, self._own, len(prompt)), first)

    async def instead(self, gone: EngineClient) -> EngineClient | None:
        """An engine for the answers of one that is gone: the own one, or else any. None when there is none."""
        own = self._engines[self._own]
        others = [own, *self._engines.values()]
        return next((each for each in others if each is not gone and each.connection.is_there), None)

    async def close(self) -> None:
        """Close all connections but the own engine's: its maker closes that one."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        for name in set(self._engines) - {self._own}:
            await self._engines.pop(name).close()

    async def _probe(self, engine: EngineClient, prompt: Sequence[int], salt: str) -> Probe | None:
        try:
            return await asyncio.wait_for(engine.questions.probe(prompt, salt), ANSWER_WITHIN_S)
        except (IntarsiaError, TimeoutError):
            return None

    async def _look_around(self) -> None:
        while True:
            try:
                await self._forget_gone()
                await self._meet(await self._discover(self._engines.keys()))
            except Exception:  # the next time may be better; requests go to those we know
                logger.warning("other engines could not be looked for", exc_info=True)
            await asyncio.sleep(LOOK_AROUND_EVERY_S)

    async def _forget_gone(self) -> None:
        for name in set(self._engines) - {self._own}:
            if self._engines[name].connection.failure is not None:
                await self._engines.pop(name).close()

    async def _meet(self, found: Mapping[str, Address]) -> None:
        for name in set(found) - set(self._engines):
            with contextlib.suppress(IntarsiaError):  # it has gone meanwhile
                self._engines[name] = await EngineClient.connect(found[name])
