"""What the processes of a service hold."""

import os
from collections import Counter
from pathlib import Path

from .service import Service


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
