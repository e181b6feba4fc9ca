"""The need of requests and the need of pools, whichever is greater."""

from types import SimpleNamespace
from typing import Any

import pytest

from intarsia.deploy.start.autoscaling import POOL_USE, wanted_replicas


def situation(requests: float, *pools: float, target: float = 32.0) -> Any:
    return SimpleNamespace(
        current_num_replicas=max(1, len(pools)),
        target_num_replicas=1,
        total_num_requests=requests,
        aggregated_metrics={POOL_USE: dict(enumerate(pools))} if pools else {},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: target),
    )


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (situation(64, 0.1, 0.1), 2),  # as many requests as two replicas take
        (situation(96, 0.1, 0.1), 3),
        (situation(1, 1.0), 1.25),  # one long request fills the pool
        (situation(2, 0.8, 0.8), 2),
        (situation(200, 1.0, 1.0, 1.0), 6.25),
        (situation(0, 0.0, 0.0), 0),
        (situation(16), 0.5),  # nothing was reported yet
    ],
)
def test_replicas_follow_the_greater_need(found: Any, wanted: float):
    assert wanted_replicas(found) == (pytest.approx(wanted), {})


def test_nothing_runs_and_nothing_is_known_so_the_target_stays():
    found = situation(5)
    found.current_num_replicas, found.target_num_replicas = 0, 3
    assert wanted_replicas(found) == (3, {})
