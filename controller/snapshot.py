"""What a running engine shows of itself to a person who watches: the console, and `intarsia top`.

A view is of one moment between two steps: requests, pool and recount agree. Taking one costs a few milliseconds at
most (`bench/console.py`), and between two looks only one short tuple a step is collected for it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..kvcache.check import Recount, recount
from ..kvcache.manager import CacheManager
from ..kvcache.misses import Miss
from ..kvcache.pool_map import PoolMap
from ..kvcache.sampled_worth import Forecast
from ..proto.leases import NO_LEASES, LeaseCounts
from ..proto.status import CacheState, EngineLoad
from ..proto.worker import WorkerStatus
from .latencies import Latencies
from .request import Request

MOST_REQUESTS = 500
"""Running and waiting ones in a view. All are counted; more could not be read anyway."""

MOST_TEXT_TOKENS = 256
"""Of a prompt and of its answer, where they are asked for."""


class RequestSnapshot(NamedTuple):
    """One answer."""

    id: int
    state: str  # as `_state` has it, or why it ended
    prompt_tokens: int
    cached_tokens: int | None  # of the prompt, found in the cache; None: not looked up yet
    misses: tuple[Miss, ...]  # its other tokens, by cause
    computed_tokens: int
    generated_tokens: int
    max_tokens: int  # that can be generated
    age_s: float
    waited_s: float  # for its first admission
    slot: int | None
    priority: int
    tenant: str
    preemptions: int
    blocks: tuple[bytes, ...] = ()  # [group], int32 each: what it holds
    tokens: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # the end of its prompt, and of its answer


class StepSnapshot(NamedTuple):
    """One step. Times are in microseconds, of the controller but for `run_us`."""

    number: int
    ended_s: float  # on the engine's clock
    plan_us: int
    wait_us: int
    commit_us: int
    run_us: int  # on rank 0
    decoding: int  # requests that got a further token
    prompt_tokens: int  # of prompts, computed
    began: int  # requests that got their first token
    ended: int
    running: int
    waiting: int
    preempted: int  # requests, since the step before


class EngineSnapshot(NamedTuple):
    """All of it, of one moment."""

    clock_s: float  # the engine's, which all ages and times are of
    load: EngineLoad
    cache: CacheState
    requests: tuple[RequestSnapshot, ...]  # running ones first
    ended: tuple[RequestSnapshot, ...]  # latest last
    steps: tuple[StepSnapshot, ...]  # since the number asked for
    workers: tuple[WorkerStatus, ...]  # in the order of ranks; empty when they are lost
    pool: PoolMap | None
    recount: Recount | None  # None: not asked for
    faults: str = ""  # what the recount found to be wrong
    latencies: Latencies = Latencies()
    forecasts: tuple[Forecast, ...] = ()  # what other sizes of each kind of memory would find
    leases: LeaseCounts = NO_LEASES


def request_snapshots(
    requests: Iterable[Request], manager: CacheManager, now_s: float, *, with_blocks: bool, with_tokens: bool
) -> tuple[RequestSnapshot, ...]:
    """Of those that go on: the running ones by their slots, then the waiting ones by their arrival."""
    ordered = sorted(requests, key=lambda r: (r.slot is None, r.slot if r.slot is not None else r.arrival_s))
    return tuple(
        request_snapshot(
            request,
            _state(request),
            now_s,
            manager.held_blocks(request.id) if with_blocks and request.slot is not None else (),
            with_tokens=with_tokens,
        )
        for request in ordered[:MOST_REQUESTS]
    )


def counted(manager: CacheManager) -> tuple[Recount | None, str]:
    """The recount, or what it found to be wrong."""
    try:
        return recount(manager), ""
    except AssertionError as error:
        return None, str(error)


def _state(request: Request) -> str:
    if request.slot is not None:
        return "running"
    if request.parent is not None:
        return "forked"
    if request.swapped is not None:
        return "swapped"
    return "preempted" if request.preemptions else "waiting"


def request_snapshot(
    request: Request, state: str, now_s: float, blocks: tuple[bytes, ...], *, with_tokens: bool
) -> RequestSnapshot:
    was_admitted = request.seniority is not None
    cached, misses = request.cached_tokens, request.misses
    if not was_admitted:  # what it would find, if it was looked up already
        cached, misses = (request.hit.tokens, request.hit.misses) if request.hit is not None else (None, ())
    prompt = request.prompt_tokens
    return RequestSnapshot(
        request.id,
        state,
        prompt,
        cached,
        misses,
        request.computed_tokens,
        len(request.tokens) - prompt,
        request.max_total_tokens - prompt,
        now_s - request.arrival_s,
        (request.admitted_s if was_admitted else now_s) - request.arrival_s,
        request.slot,
        request.options.priority,
        request.options.tenant,
        request.preemptions,
        blocks,
        (_end_of(request.tokens, 0, prompt), _end_of(request.tokens, prompt, len(request.tokens)))
        if with_tokens
        else None,
    )


def _end_of(tokens: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Of what lies between, the end; a long prompt is not copied for it."""
    return tuple(tokens[max(start, stop - MOST_TEXT_TOKENS) : stop])
