"""What an engine does for each tenant: all that a tenant may know of it.

The counts of a whole engine move with everybody's prompts. Who asks with a tenant's key is told of their own requests.
A tenant is known by the salt of its requests, which comes from its key and from nowhere else.
"""

from collections import Counter
from collections.abc import Iterable

from ..kvcache.manager import CacheManager
from ..proto.status import CacheState, EngineInfo, EngineLoad, GroupState
from .request import Request

MOST_TENANTS = 4096
"""That are counted. A server has as many as its keys name; a program of its own may salt as it likes."""


class Accounts:
    """By salt. Counts of requests that have left; those that go on are asked."""

    def __init__(self, info: EngineInfo, manager: CacheManager):
        self._info = info
        self._manager = manager
        self._of: dict[str, Counter[str]] = {}

    def add(self, salt: str, **counts: int) -> None:
        """counts: by the names of `EngineLoad`."""
        account = self._of.get(salt)
        if account is None:
            if len(self._of) >= MOST_TENANTS:
                del self._of[next(iter(self._of))]
            account = self._of[salt] = Counter()
        for name, count in counts.items():
            account[name] += count

    def left(self, request: Request) -> None:
        """However that came."""
        generated = len(request.tokens) - request.prompt_tokens
        self.add(request.terms.salt, generated_tokens=generated, preemptions=request.preemptions)

    def load(self, salt: str, live: Iterable[Request], rebuilds: int) -> EngineLoad:
        """live: requests of all. Of the pool: how full it would be with the tenant's own running requests alone."""
        own = [request for request in live if request.terms.salt == salt]
        running = [request for request in own if request.slot is not None]
        pages = sum(self._manager.plan.blocks_alone(len(request.tokens)) for request in running)
        account = self._of.get(salt, Counter())
        counts = {name: account[name] for name in EngineLoad._fields}
        for request in own:
            counts["generated_tokens"] += len(request.tokens) - request.prompt_tokens
            counts["preemptions"] += request.preemptions
        total = self._info.num_blocks
        return EngineLoad(**counts)._replace(
            running=len(running),
            waiting=len(own) - len(running),
            free_blocks=max(0, total - pages),
            num_blocks=total,
            rebuilds=rebuilds,
        )

    def cache_state(self, salt: str, live: Iterable[Request]) -> CacheState:
        """What the tenant's own running requests hold. Nothing of the pool's pages, nor of what is known."""
        running = [request for request in live if request.terms.salt == salt and request.slot is not None]
        held = [0] * len(self._info.groups)
        for request in running:
            for group, blocks in enumerate(self._manager.held_blocks(request.id)[: len(held)]):
                held[group] += len(blocks) // 4
        groups = zip(self._info.groups, held, strict=True)
        return CacheState(
            0,
            0,
            0,
            len(running),
            tuple(GroupState(group.kind, group.block_tokens, count, 0) for group, count in groups),
        )
