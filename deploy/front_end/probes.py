"""What a request would meet at each engine, for routers that stand before several servers.

    router ──► probe of a prompt ──► each engine: tokens found in its cache, who runs and waits, how full its pool is

Asking acts on nothing: no block becomes newer, and no prompt becomes known. What the cache holds is told for one salt
alone, since a tenant must not learn what others ask.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...controller.admission.validation import check_tokens
from ...errors import IntarsiaError, InvalidRequest
from ...proto.request import RequestOptions
from ...proto.status import EngineInfo, Probe
from ..settings.limits import Limits
from .access import TENANT, VIEWER
from .counted import Counted
from .engine_client import EngineClient

ANSWER_WITHIN_S = 2.0
"""An engine that takes longer is told of without figures."""


class Probed(NamedTuple):
    """One engine's answer."""

    engine: str
    probe: Probe | None  # None: it did not answer in time


class Probes:
    """Asks all engines of a front end side by side."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineClient]], info: EngineInfo, limits: Limits):
        """engines: those there are, by name. info: of the model that all of them serve."""
        self._engines = engines
        self._info = info
        self._under_way = Counted("probes under way", limits.max_probes, limits.max_key_probes)

    async def ask(self, prompt: Sequence[int], cache_salt: str = "") -> list[Probed]:
        """Each engine's answer, in their order. cache_salt: whose prompts are looked for; empty: the caller's own.

        Raises `InvalidRequest` for what is no prompt, or for another tenant's salt; `Overloaded` when as many ask as
        may.
        """
        salt, viewer = salt_of(cache_salt), VIEWER.get()
        check_tokens(prompt, self._info)

        async def one(name: str, engine: EngineClient) -> Probed:
            try:
                asking = engine.questions.probe(prompt, salt, viewer)
                return Probed(name, await asyncio.wait_for(asking, ANSWER_WITHIN_S))
            except (IntarsiaError, TimeoutError):
                return Probed(name, None)

        with self._under_way.one():
            return await asyncio.gather(*(one(name, engine) for name, engine in self._engines().items()))


def salt_of(cache_salt: str) -> str:
    """Whose prompts a caller may look for. cache_salt: as it asks; empty: its own. Raises `InvalidRequest`."""
    own = TENANT.get()
    if not cache_salt or cache_salt == own:
        return own
    if VIEWER.get() is not None:
        raise InvalidRequest(
            "cache_salt names another tenant than the key's; leave it out, or ask with the admin key",
            field="cache_salt",
        )
    return RequestOptions(salt=cache_salt).salt  # which bounds it
