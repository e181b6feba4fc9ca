"""Several Ray nodes on one machine, in a process of its own: a test's own cluster is left alone.

    RAY_TMPDIR=FOLDER python -m intarsia.tests.deploy.nodes SCENARIO CHECKPOINT

prints one JSON object; a folder of its own keeps programs that look for a cluster in the usual one from finding these.
Nodes come and go as they do in a real cluster: each has a raylet of its own, and the death of one takes its workers
with it.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.deploy.start.own_ray import NAMESPACE
from intarsia.errors import IntarsiaError
from intarsia.proto.request import SamplingParams

CLUSTERS: list[Cluster] = []

STREAMS = 6

TOKENS = 300


def cluster_of(*cpus: int) -> tuple[Cluster, list[Any]]:
    """A cluster, and its nodes beside the head, which has no room for workers. This process belongs to one of them."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    CLUSTERS.append(cluster)
    nodes = [cluster.add_node(num_cpus=count) for count in cpus]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
    return cluster, nodes


def other_node(nodes: list[Any], placed: dict[str, int]) -> Any:
    """One that has workers, and is not this process's own: the controller is there."""
    own = ray.get_runtime_context().get_node_id()
    return next(node for node in nodes if placed[node.node_id] and node.node_id != own)


async def streams(client: EngineClient, at: int = 0, then: Callable[[], Awaitable[Any]] | None = None) -> list[Any]:
    """Tokens of several requests side by side, or the error of each. `then` happens when the first has so many."""

    async def one(n: int) -> list[int] | str:
        sampling = SamplingParams(max_tokens=TOKENS, seed=n, temperature=float(n % 2))
        said: list[int] = []
        try:
            async for delta in client.generate([1, 2, 3 + n], sampling):
                said += delta.token_ids
                if n == 0 and then is not None and len(said) == at:
                    await then()
        except IntarsiaError as error:
            return f"{type(error).__name__}: {error}"
        return said

    return await asyncio.gather(*(one(n) for n in range(STREAMS)))


async def engine_across(model: str) -> RunningEngine:
    return await start_engine(engine_settings(model, tensor_parallel_size=2, kv_cache_memory="1MiB"))


async def lose_node(model: str) -> dict[str, Any]:
    """TP 2 across two nodes; one of them goes, and there is a third."""
    cluster, nodes = cluster_of(1, 1, 1)
    engine = await engine_across(model)
    before = workers_by_node(nodes)
    where: Any = engine._controller.__ray_call__
    controller_node = await where.remote(lambda _: ray.get_runtime_context().get_node_id())
    undisturbed = await streams(engine.client)
    started = time.monotonic()

    async def lose() -> None:
        await asyncio.to_thread(cluster.remove_node, other_node(nodes, before), allow_graceful=False)

    disturbed = await streams(engine.client, 20, lose)
    return {
        "controller_is_here": controller_node == ray.get_runtime_context().get_node_id(),
        "nodes_before": sum(map(bool, before.values())),
        "nodes_after": sum(map(bool, workers_by_node(nodes).values())),
        "same": disturbed == undisturbed,
        "rebuilds": (await engine.stats())["rebuilds"],
        "all_free": (await engine.recount()).all_free,
        "took_s": time.monotonic() - started,
    }


async def lose_node_and_get_another(model: str) -> dict[str, Any]:
    """As above without a third node: one comes later, and the streams wait for it."""
    cluster, nodes = cluster_of(1, 1)
    engine = await engine_across(model)
    before = workers_by_node(nodes)
    undisturbed = await streams(engine.client)

    async def lose() -> None:
        await asyncio.to_thread(cluster.remove_node, other_node(nodes, before), allow_graceful=False)
        asyncio.get_running_loop().call_later(4, lambda: cluster.add_node(num_cpus=1))

    disturbed = await streams(engine.client, 20, lose)
    return {"same": disturbed == undisturbed, "rebuilds": (await engine.stats())["rebuilds"]}


async def two_replicas(model: str) -> dict[str, Any]:
    """Two Serve replicas on two nodes; one node goes under requests to both."""
    import httpx

    from intarsia.deploy.serve_app import app

    cluster, nodes = cluster_of(2, 2)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    serve.run(app({"model": model, "num_replicas": "2", "kv_cache_memory": "1MiB", "served_model_name": "m"}))
    before = workers_by_node(nodes)
    url = f"http://127.0.0.1:{port}/v1/completions"

    async def ask(client: httpx.AsyncClient, n: int) -> tuple[int, str]:
        body = {"prompt": [1, 2, 3 + n], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        try:
            answer = await client.post(url, json=body)
        except httpx.HTTPError as error:
            return 0, repr(error)
        return answer.status_code, json.dumps(answer.json()["choices"][0]) if answer.is_success else answer.text

    async with httpx.AsyncClient(timeout=120) as client:
        undisturbed = dict(enumerate(await asyncio.gather(*(ask(client, n) for n in range(8)))))
        asking = asyncio.gather(*(ask(client, n) for n in range(8)))  # while it happens
        await asyncio.to_thread(cluster.remove_node, other_node(nodes, before), allow_graceful=False)
        waves = [await asking]
        in_a_row = 0
        deadline = time.monotonic() + 60
        while in_a_row < 5 and time.monotonic() < deadline:  # waves in a row that are as they were
            waves.append(await asyncio.gather(*(ask(client, n) for n in range(8))))
            in_a_row = in_a_row + 1 if dict(enumerate(waves[-1])) == undisturbed else 0
    told = [(n, answer) for wave in waves for n, answer in enumerate(wave)]
    return {
        "nodes_before": sum(map(bool, before.values())),
        "status": sorted({status for status, _ in undisturbed.values()}),
        "failed": sum(answer[0] != 200 for _, answer in told),
        "wrong": sum(answer[0] == 200 and answer != undisturbed[n] for n, answer in told),
        "waves_as_before": in_a_row,
    }


def workers_by_node(nodes: list[Any]) -> dict[str, int]:
    """How many workers are placed on each node."""
    placed = [table for table in ray.util.placement_group_table().values() if table["state"] == "CREATED"]
    homes = [home for table in placed for home in table["bundles_to_node_id"].values()]
    return {node.node_id: homes.count(node.node_id) for node in nodes}


def free_port() -> int:
    from intarsia.tests.conftest import free_port as find

    return find()


SCENARIOS = {each.__name__: each for each in (lose_node, lose_node_and_get_another, two_replicas)}


def main() -> None:
    found = asyncio.run(SCENARIOS[sys.argv[1]](sys.argv[2]))
    print(json.dumps(found), flush=True)
    ray.shutdown()
    CLUSTERS.pop().shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
