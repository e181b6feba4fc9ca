"""An engine, and replicas of it, across several Ray nodes; and what becomes of them when a node is lost."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest


def play(scenario: str, model: str) -> dict[str, Any]:
    """Run a scenario of `nodes.py` in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        own = {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_worker_niceness": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "intarsia.tests.deploy.nodes", scenario, model],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
            env=os.environ | own,
        )
        try:
            out, said = process.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):  # else: what is left of the cluster
                os.killpg(process.pid, signal.SIGKILL)
    found = [line for line in out.splitlines() if line.startswith("{")]
    assert process.returncode == 0 and found, said[-3000:]
    return json.loads(found[-1])


def test_tensor_parallel_workers_on_two_nodes_move_when_one_is_lost_and_streams_go_on(tiny: Callable):
    found = play("lose_node", str(tiny("llama").path))
    assert found["controller_is_here"], "beside its front end, whatever room others have"
    assert found["nodes_before"] == found["nodes_after"] == 2
    assert found["same"] and found["rebuilds"] == 1 and found["all_free"]


@pytest.mark.slow
def test_streams_wait_for_a_node_when_none_is_left_to_move_to(tiny: Callable):
    assert play("lose_node_and_get_another", str(tiny("llama").path)) == {"same": True, "rebuilds": 1}


@pytest.mark.slow
def test_of_two_replicas_on_two_nodes_one_goes_on_when_the_other_s_node_is_lost(tiny: Callable):
    found = play("two_replicas", str(tiny("llama").path))
    assert found["nodes_before"] == 2 and found["status"] == [200]
    assert found["wrong"] == 0 and found["waves_as_before"] == 5
    assert found["failed"] <= 8  # of those that the lost replica's front end was answering
