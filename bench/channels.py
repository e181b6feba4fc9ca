"""What a step costs before a worker computes: a buffer to all workers, a small answer from the first one back.

    python bench/channels.py [--workers 2] [--bytes 2048,204800] [--steps 2000]

Prints one JSON object: microseconds per round trip (p50 and p99), for each way there is between Ray actors, all from a
controller actor to worker actors that answer at once; and how long the controller takes to notice a killed worker that
owes it nothing.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import statistics
import sys
import time
from typing import Any

import ray


@ray.remote(num_cpus=0)
class Echo:
    """A worker that answers a step with eight bytes."""

    def pid(self) -> int:
        return os.getpid()

    def answer(self, payload: bytes) -> bytes:
        return payload[:8]

    def listen(self) -> Any:
        """As `workers.worker` does it."""
        import threading

        from intarsia.proto.channel import BlockingServer

        server = BlockingServer("127.0.0.1")
        threading.Thread(target=server.serve, args=(self.answer,), daemon=True).start()
        return server.address

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def open_channel(self, reader: Any, node: str) -> Any:
        """A channel belongs to the process that makes it."""
        from ray.experimental.channel.shared_memory_channel import Channel

        return Channel(ray.get_runtime_context().current_actor, [(reader, node)], 4096)

    def serve_channel(self, inbox: Any, outbox: Any) -> None:
        """Answer over Ray's shared memory until the channel is closed."""
        inbox.ensure_registered_as_reader()
        outbox.ensure_registered_as_writer()
        while True:
            try:
                payload = inbox.read()
                outbox.write(payload[:8])
            except Exception:  # noqa: BLE001  closed
                return


@ray.remote(num_cpus=0)
class Controller:
    """Measures, as an asyncio actor: what the engine's controller is."""

    async def streams(self, workers: list[Any], size: int, steps: int) -> list[float]:
        from intarsia.proto.channel import Stream

        streams = [await Stream.connect(await worker.listen.remote()) for worker in workers]
        payload = bytes(size)

        async def once() -> None:
            for stream in streams:
                stream.send(payload)
            for stream in streams:
                await stream.receive()

        found = await _timed(once, steps)
        for stream in streams:
            await stream.close()
        return found

    async def actor_calls(self, workers: list[Any], size: int, steps: int) -> list[float]:
        payload = bytes(size)

        async def once() -> None:
            await asyncio.gather(*(worker.answer.remote(payload) for worker in workers))

        return await _timed(once, steps)

    async def notice(self, worker: Any) -> float:
        """Milliseconds from the kill of a worker that owes us nothing to our knowing of it."""
        from intarsia.proto.channel import Stream

        stream = await Stream.connect(await worker.listen.remote())
        pid = await worker.pid.remote()
        await asyncio.sleep(0.2)
        started = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        await stream.wait_gone()
        return (time.perf_counter() - started) * 1e3


@ray.remote(num_cpus=0)
class Proxy:
    """Stands for this process where Ray wants an actor that reads a channel."""


async def _timed(once: Any, steps: int) -> list[float]:
    for _ in range(100):
        await once()
    found = []
    for _ in range(steps):
        started = time.perf_counter()
        await once()
        found.append((time.perf_counter() - started) * 1e6)
    return found


def _compiled_graph(workers: list[Any], size: int, steps: int) -> list[float]:
    from ray.dag import InputNode, MultiOutputNode

    payload = bytes(size)
    with InputNode() as given:
        graph = MultiOutputNode([worker.answer.bind(given) for worker in workers])
    compiled: Any = graph.experimental_compile(_buffer_size_bytes=size + 4096)
    try:

        def once() -> None:
            ray.get(compiled.execute(payload))

        return _timed_blocking(once, steps)
    finally:
        compiled.teardown()


def _timed_blocking(once: Any, steps: int) -> list[float]:
    for _ in range(100):
        once()
    found = []
    for _ in range(steps):
        started = time.perf_counter()
        once()
        found.append((time.perf_counter() - started) * 1e6)
    return found


def main() -> None:
    args = _arguments()
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    rows = []
    try:
        make: Any = Echo
        workers = [make.options(max_concurrency=4).remote() for _ in range(args.workers)]
        controller: Any = Controller.remote()
        for size in args.bytes:
            ways = {
                "streams": lambda size=size: ray.get(controller.streams.remote(workers, size, args.steps)),
                "actor calls": lambda size=size: ray.get(
                    controller.actor_calls.remote(workers, size, max(200, args.steps // 10))
                ),
                "compiled graph": lambda size=size: _compiled_graph(workers, size, args.steps),
                "shared-memory channel": lambda size=size: _shared_memory(workers, size, args.steps),
            }
            for way, measure in ways.items():
                found = sorted(measure())
                rows.append(
                    {
                        "way": way,
                        "bytes": size,
                        "p50_us": round(statistics.median(found), 1),
                        "p99_us": round(found[int(len(found) * 0.99)], 1),
                    }
                )
                print(rows[-1], file=sys.stderr)
        noticed: list[float] = [ray.get(controller.notice.remote(make.remote())) for _ in range(5)]
    finally:
        ray.shutdown()
    json.dump(
        {
            "benchmark": "channels",
            "workers": args.workers,
            "steps": args.steps,
            "rows": rows,
            "killed_worker_noticed_ms": round(statistics.median(noticed), 2),
        },
        sys.stdout,
        indent=2,
    )
    print()


def _shared_memory(workers: list[Any], size: int, steps: int) -> list[float]:
    from ray.experimental.channel.shared_memory_channel import Channel

    payload = bytes(size)
    nodes = ray.get([worker.node.remote() for worker in workers])
    outbox = Channel(None, list(zip(workers, nodes, strict=True)), size + 4096)
    proxy: Any = Proxy.remote()
    here = ray.get_runtime_context().get_node_id()
    inboxes: list[Any] = [ray.get(worker.open_channel.remote(proxy, here)) for worker in workers]
    for worker, inbox in zip(workers, inboxes, strict=True):
        worker.serve_channel.remote(outbox, inbox)
    outbox.ensure_registered_as_writer()
    for inbox in inboxes:
        inbox.ensure_registered_as_reader()

    def once() -> None:
        outbox.write(payload)
        for inbox in inboxes:
            inbox.read()

    try:
        return _timed_blocking(once, steps)
    finally:
        outbox.close()
        for inbox in inboxes:
            inbox.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bytes", type=lambda text: [int(n) for n in text.split(",")], default=[2048, 204800])
    parser.add_argument("--steps", type=int, default=2000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
