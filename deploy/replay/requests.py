"""Request traces over the cache manager of a model: how much of the prompts is found, and what is lost and why.

Requests come one at a time, in the order of the trace; what they generate is not part of it. So a figure says what
reuse the cache makes possible, not what an engine with many requests at once would reach.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import PoolExhausted
from ...kvcache.eviction import policy_named
from ...kvcache.ids import RequestId
from ...kvcache.manager import CacheManager
from ...kvcache.memory_worth import with_forecasts
from ...kvcache.plan import MemoryPlan, PlanSettings
from ...kvcache.prefix import GivenChain
from ...kvcache.strategies import plan_memory
from ..tools.model_layers import ModelLayers
from .names import block_names
from .prefill import extend_by_chunk
from .traces import TraceRequest

CHUNK_TOKENS = 8192


@dataclass(slots=True)
class TraceResult:
    """What a replay found. Rates are hit prompt tokens over all prompt tokens."""

    requests: int = 0
    refused: int = 0  # did not fit the memory alone
    tokens: int = 0
    hit_tokens: int = 0
    second_half_tokens: int = 0
    second_half_hit_tokens: int = 0
    lost_tokens: dict[str, int] = field(default_factory=dict)
    evictions: int = 0
    bytes_written: int = 0
    bytes_saved: int = 0
    seconds: float = 0.0
    forecast: dict[float, float] | None = None  # hit rate of the second half with so many times the memory

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "refused": self.refused,
            "tokens": self.tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": _rate(self.hit_tokens, self.tokens),
            "hit_rate_second_half": _rate(self.second_half_hit_tokens, self.second_half_tokens),
            "lost_tokens": self.lost_tokens,
            "evictions": self.evictions,
            "bytes_moved": {"written": self.bytes_written, "saved": self.bytes_saved},
            "seconds": round(self.seconds, 2),
            **({"forecast_second_half": self.forecast} if self.forecast is not None else {}),
        }


def replay_requests(
    requests: list[TraceRequest],
    model: ModelLayers,
    memory_bytes: int | None,
    *,
    block_tokens: int | None = None,
    strategy: str = "auto",
    policy: str = "worth",
    expected_average_seq_len: int | None = None,
    forecast: bool = False,
    progress: Callable[[Iterable[TraceRequest]], Iterable[TraceRequest]] = iter,
) -> tuple[TraceResult, CacheManager]:
    """Run all requests through a manager.

    memory_bytes  None: enough that nothing is ever evicted
    block_tokens  None: those of the trace
    forecast      say also what half, twice and four times the memory would find
    progress      wraps the requests, to show how far it is

    Raises `InvalidSetting` when the model does not fit the memory.
    """
    plan = plan_for(requests, model, memory_bytes, block_tokens, strategy, expected_average_seq_len)
    manager, size = CacheManager(plan, policy=policy_named(policy)), plan.block_tokens
    token_bytes = sum(layer.token_bytes for layer in model.layers if layer.shares is None)
    worth = with_forecasts(manager.retention, plan) if forecast and manager.retention is not None else None
    before: dict[float, int] = {}
    result = TraceResult()
    started = time.perf_counter()
    for number, request in enumerate(progress(requests)):
        found = _run(manager, RequestId(number), request, size, result)
        result.requests += 1
        result.tokens += request.length
        result.hit_tokens += found
        if number == len(requests) // 2 - 1 and worth is not None:
            before = dict(worth.found_tokens)
        if number >= len(requests) // 2:
            result.second_half_tokens += request.length
            result.second_half_hit_tokens += found
        result.bytes_saved += found * token_bytes
        result.bytes_written += (request.length - found) * token_bytes
    result.seconds = time.perf_counter() - started
    if worth is not None and result.second_half_tokens:
        found = worth.forecast(result.second_half_hit_tokens, before)
        result.forecast = {scale: _rate(tokens, result.second_half_tokens) for scale, tokens in found.items()}
    result.evictions = manager.pool.num_evicted
    return result, manager


def plan_for(
    requests: Sequence[TraceRequest],
    model: ModelLayers,
    memory_bytes: int | None,
    block_tokens: int | None,
    strategy: str,
    expected_average_seq_len: int | None = None,
) -> MemoryPlan:
    """The arguments are those of `replay_requests`."""
    size = block_tokens or (requests[0].block_tokens if requests else 16)
    memory = memory_bytes or _enough(requests, model, size)
    settings = PlanSettings(memory, size, strategy, expected_average_seq_len)
    return plan_memory(model.layers, settings, model.max_tokens)


def _run(manager: CacheManager, number: RequestId, request: TraceRequest, size: int, result: TraceResult) -> int:
    """One request, from lookup to release. Returns the tokens found."""
    hit = manager.lookup(GivenChain(block_names(request, size), request.length))
    manager.open(number, hit)
    for cause, tokens in hit.lost.items():
        result.lost_tokens[cause] = result.lost_tokens.get(cause, 0) + tokens
    length = hit.tokens
    while length < request.length:
        try:
            length = extend_by_chunk(manager, number, min(request.length, length + CHUNK_TOKENS), length)
        except PoolExhausted:
            result.refused += 1
            break
        manager.commit(number)
    manager.release(number, length)
    return hit.tokens


def _enough(requests: Sequence[TraceRequest], model: ModelLayers, size: int) -> int:
    """Every block of every layer, once, and as much again for states and large pages."""
    distinct: set[int] = set()
    for request in requests:
        distinct.update(request.ids)
    longest = max((request.length for request in requests), default=1)
    tokens = len(distinct) * (requests[0].block_tokens if requests else 1) + 2 * longest + len(requests) * size
    token_bytes = sum(layer.token_bytes for layer in model.layers if layer.shares is None)
    state_bytes = sum(layer.state_bytes for layer in model.layers)
    return 2 * tokens * token_bytes + state_bytes * (tokens // 512 + 4 * len(requests) + 64)


def _rate(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
