"""What an engine answers when it is asked about itself: how busy it is, what it holds, what a request would meet.

Asking changes nothing, and every answer is of one moment between two steps. The counts of the whole engine would tell
one tenant about the prompts of others. So a caller with a tenant's key is told about that tenant's requests only. A
tenant is known by the salt of its requests, which comes from its key and from nowhere else.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import IntarsiaError
from ..kvcache.ids import RequestId
from ..kvcache.manager import CacheManager
from ..kvcache.sampled_worth import Forecast, follow
from ..proto.leases import NO_LEASES, Lease, LeaseCounts
from ..proto.status import CacheState, EngineInfo, EngineLoad, GroupState, Probe, SnapshotQuery
from .leases.leases import leases_of
from .metrics import Metrics
from .request import Request
from .scheduling.scheduler import Scheduler
from .snapshot import EngineSnapshot, counted, request_snapshots
from .step_runner import StepRunner
from .telemetry import Telemetry


class Status:
    """Reads what the engine and its parts know. viewer, in its methods: the salt of the tenant who asks; None: the
    caller may see all."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        manager: CacheManager,
        workers: StepRunner,
        telemetry: Telemetry,
        live: Mapping[RequestId, Request],
    ):
        """live: the requests that have not left"""
        self.is_leaving = False  # the engine ends when its requests have: routers are told to choose another
        self._info = info
        self._scheduler = scheduler
        self._manager = manager
        self._workers = workers
        self._telemetry = telemetry
        self._live = live
        self._worth = follow(manager.retention, manager.plan) if manager.retention is not None else None

    def load(self, viewer: str | None = None) -> EngineLoad:
        if viewer is not None:
            return self._load_of(viewer)
        return EngineLoad(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            free_blocks=self._manager.pool.num_available_pages,
            kept_blocks=self._manager.pool.num_cached_pages,
            num_blocks=self._info.num_blocks,
            **self._telemetry.counts(),
        )

    def cache_state(self, viewer: str | None = None) -> CacheState:
        if viewer is not None:
            return self._cache_state_of(viewer)
        pool = self._manager.pool
        return CacheState(
            held_pages=self._info.num_blocks - pool.num_available_pages,
            kept_pages=pool.num_cached_pages,
            blank_pages=pool.num_free_pages,
            requests=self._manager.num_open,
            groups=self._groups(lambda group: pool.groups[group].num_held, lambda group: len(pool.groups[group].index)),
        )

    def probe(self, tokens: Sequence[int], salt: str = "", viewer: str | None = None) -> Probe:
        """What a request with this prompt would meet. Nothing becomes newer, older or known by it."""
        cached_tokens = self._manager.lookup(tokens, salt.encode()).tokens if tokens else 0
        load = self.load(viewer)
        if viewer is None:
            queued_tokens, tokens_per_s = self._scheduler.queued_tokens, self._telemetry.tokens_per_s(time.monotonic())
        else:
            own = [each for each in self._live.values() if each.options.salt == viewer and each.slot is None]
            queued_tokens, tokens_per_s = sum(len(request.tokens) for request in own), None
        return Probe(
            cached_tokens=cached_tokens,
            queued_tokens=queued_tokens,
            running=load.running,
            is_leaving=self.is_leaving,
            waiting=load.waiting,
            pool_use=load.pool_use,
            tokens_per_s=tokens_per_s,
        )

    def leases(self, viewer: str | None = None) -> tuple[Lease, ...]:
        """Conversations whose cache is held."""
        leases = leases_of(self._manager)
        return leases.held(viewer) if leases is not None else ()

    def release_lease(self, lease: str, viewer: str | None = None) -> bool:
        """End one, which is the one thing here that changes something. False: the viewer has none of that id."""
        leases = leases_of(self._manager)
        return leases is not None and leases.release(lease, viewer)

    def metrics(self) -> Metrics:
        return self._telemetry.meter.read(self._manager)._replace(
            forecasts=self.forecasts(),
            prepared=self._scheduler.preparation.measured(),
            leases=self._lease_counts(),
        )

    def forecasts(self) -> tuple[Forecast, ...]:
        """What other sizes of each kind of memory would find of late. Empty until requests have left."""
        forecast = self._worth.forecast() if self._worth is not None else None
        return (forecast,) if forecast is not None else ()

    async def snapshot(self, query: SnapshotQuery) -> EngineSnapshot:
        """All there is to see."""
        try:
            workers = tuple(await self._workers.status())
        except IntarsiaError:  # they are lost, and the engine's loop deals with it
            workers = ()
        # From here on nothing is awaited, so that all parts are of one moment.
        now_s = time.monotonic()
        recount, faults = counted(self._manager) if query.with_recount else (None, "")
        return EngineSnapshot(
            clock_s=now_s,
            load=self.load(),
            cache=self.cache_state(),
            requests=request_snapshots(
                self._live.values(), self._manager, now_s, with_blocks=query.with_pool, with_tokens=query.with_tokens
            ),
            ended=self._telemetry.journal.all_ended(query.with_tokens),
            steps=self._telemetry.journal.steps(query.since_step),
            workers=workers,
            pool=self._manager.pool.map() if query.with_pool else None,
            recount=recount,
            faults=faults,
            latencies=self._telemetry.meter.latencies(now_s),
            forecasts=self.forecasts(),
            leases=self._lease_counts(),
        )

    def _lease_counts(self) -> LeaseCounts:
        leases = leases_of(self._manager)
        return leases.counts if leases is not None else NO_LEASES

    # -- of one tenant -----------------------------------------------------------------------------------------------

    def _load_of(self, viewer: str) -> EngineLoad:
        """Of the pool: how full it would be with the tenant's own running requests alone."""
        own = [request for request in self._live.values() if request.options.salt == viewer]
        running = [request for request in own if request.slot is not None]
        pages = sum(self._manager.plan.blocks_alone(len(request.tokens)) for request in running)
        # What requests have done is counted when they leave; those that have not left are asked.
        counts = self._telemetry.counts(viewer)
        for request in own:
            counts["generated_tokens"] += len(request.tokens) - request.prompt_tokens
            counts["preemptions"] += request.preemptions
        return EngineLoad(
            running=len(running),
            waiting=len(own) - len(running),
            free_blocks=max(0, self._info.num_blocks - pages),
            kept_blocks=0,
            num_blocks=self._info.num_blocks,
            **counts,
        )

    def _cache_state_of(self, viewer: str) -> CacheState:
        """What the tenant's own running requests hold. Nothing of the pool's pages, nor of what is known."""
        running = [each for each in self._live.values() if each.options.salt == viewer and each.slot is not None]
        held = [0] * len(self._info.groups)
        for request in running:
            for group, blocks in enumerate(self._manager.held_blocks(request.id)[: len(held)]):
                held[group] += len(blocks) // 4  # an int32 each
        return CacheState(
            held_pages=0,
            kept_pages=0,
            blank_pages=0,
            requests=len(running),
            groups=self._groups(held.__getitem__, lambda group: 0),
        )

    def _groups(self, held: Callable[[int], int], known: Callable[[int], int]) -> tuple[GroupState, ...]:
        """held, known: blocks of the group of this number."""
        return tuple(
            GroupState(
                kind=group.kind, block_tokens=group.block_tokens, held_blocks=held(number), known_blocks=known(number)
            )
            for number, group in enumerate(self._info.groups)
        )
