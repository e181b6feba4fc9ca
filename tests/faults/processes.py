"""What the processes of a service hold, and a process for its clients."""

import asyncio
import multiprocessing
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from intarsia.environment import freeze_startup_objects

from .service import Service

Answer = TypeVar("Answer")
Sample = TypeVar("Sample")


async def watched(served: Service) -> dict[str, int]:
    """The process ids of all parts, by name. This process is the front end, and of some programs the clients."""
    workers = await served.engine.worker_process_ids()
    named = {f"worker {rank}": pid for rank, pid in enumerate(workers)}
    return {"front end": os.getpid(), "controller": served.engine.controller_process_id, **named}


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def threads_by_name(pid: int) -> Counter[str]:
    return Counter(task.read_text().strip() for task in Path(f"/proc/{pid}/task").glob("*/comm"))


def clients_apart() -> ProcessPoolExecutor:
    """A process for clients: what they hold, and when they pause, is not the front end's."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


async def watch(
    clients: Executor,
    call: Callable[..., Coroutine[Any, Any, Answer]],
    *about: Any,
    sample: Callable[[], Awaitable[Sample]],
    every_s: float,
) -> tuple[Answer, list[Sample]]:
    """Run `call(*about)` in the process of the clients, and take a sample every so often until it ends."""
    running = asyncio.get_running_loop().run_in_executor(clients, _run, call, *about)
    samples = []
    while not running.done():
        samples.append(await sample())
        await asyncio.wait((running,), timeout=every_s)
    return await running, samples


def _run(call: Callable[..., Coroutine[Any, Any, Answer]], *about: Any) -> Answer:
    freeze_startup_objects()  # what is measured is the service, and no pause of this process
    return asyncio.run(call(*about))
