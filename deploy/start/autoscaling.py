"""How many replicas a model needs: as many as its requests ask for, and as many as its block pools do.

Requests alone do not tell: one of a hundred thousand tokens may fill a pool that a hundred short ones would not. So
each replica reports which share of its pool is held, and the greater of both needs counts.
"""

from collections.abc import Mapping
from typing import Any, Protocol

POOL_USE = "pool_use"
"""What replicas report: the share of the pool that requests hold, from 0 to 1."""

TARGET_POOL_USE = 0.8
"""Above it requests of a replica begin to wait for blocks, or to lose theirs to others."""


class Situation(Protocol):
    """The part of Ray Serve's `AutoscalingContext` that decides here."""

    @property
    def current_num_replicas(self) -> int: ...

    @property
    def target_num_replicas(self) -> int: ...

    @property
    def total_num_requests(self) -> float: ...

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...

    @property
    def config(self) -> Any: ...


def wanted_replicas(situation: Situation) -> tuple[float, dict[str, Any]]:
    """Ray Serve's autoscaling policy. It rounds up, and waits before it follows, by itself."""
    if situation.current_num_replicas == 0:
        return situation.target_num_replicas, {}
    pools = (situation.aggregated_metrics or {}).get(POOL_USE, {})
    by_requests = situation.total_num_requests / situation.config.get_target_ongoing_requests()
    by_pools = sum(pools.values()) / TARGET_POOL_USE
    return max(by_requests, by_pools), {}
