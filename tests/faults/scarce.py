"""A server on a machine that is short of something: address space, /dev/shm, or the disk of temporary files.

    python -m intarsia.tests.faults.scarce            as root, who may mount file systems that only the server sees

For each: does it start, or say why it does not; does it answer; does it answer when all is full; and after its worker
was killed then; does it end in time. Prints JSON; exits with 1 if something failed but by a sentence.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intarsia import SamplingParams
from intarsia.deploy.client import Client
from intarsia.errors import IntarsiaError

from .program import program
from .served import Gone, Served, served

END_WITHIN_S = 5.0
RECOVER_WITHIN_S = 60.0

PROMPT, SAMPLING = "A bug is", SamplingParams(max_tokens=8, temperature=0)


def address_space(kilobytes: int) -> list[str]:
    return ["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "bash"]


def small(folder: str, megabytes: int) -> list[str]:
    """A file system of that size in place of a folder, for one process and its children."""
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {folder}"
    return ["unshare", "--mount", "bash", "-c", f'{mount} && exec "$@"', "bash"]


WAYS: dict[str, tuple[Sequence[str], str | None]] = {
    "address space of 2 GB": (address_space(2_000_000), None),
    "address space of 3 GB": (address_space(3_000_000), None),
    "address space of 8 GB": (address_space(8_000_000), None),
    "/dev/shm of 1 MB, full": (small("/dev/shm", 1), "/dev/shm"),
    "/dev/shm of 64 MB, full": (small("/dev/shm", 64), "/dev/shm"),
    "/tmp of 1 MB, full": (small("/tmp", 1), "/tmp"),
    "/tmp of 20 MB, full": (small("/tmp", 20), "/tmp"),
}
"""How the server is started, and what is filled to the last byte once it serves."""


async def run(python: str, workers: int, seed: int) -> dict[str, Any]:
    ways = {}
    for name, (within, folder) in WAYS.items():
        ways[name] = tried(python, within, folder, workers)
        print(f"{name}: {ways[name]}", file=sys.stderr, flush=True)
    return {"seed": seed, "workers": workers, "ways": ways}


def tried(python: str, within: Sequence[str], folder: str | None, workers: int) -> dict[str, Any]:
    started_s = time.monotonic()
    try:
        with served(python, within, tensor_parallel_size=workers) as server:
            found = {"ready_after_s": round(time.monotonic() - started_s, 1)} | _used(server, folder)
            ending_s = time.monotonic()
        found["ended_after_s"] = round(time.monotonic() - ending_s, 1)
        found["is_fine"] = found["is_fine"] and found["ended_after_s"] < END_WITHIN_S
    except Gone as gone:
        said = str(gone).rpartition("not ready: ")[2].strip()
        is_sentence = said.startswith("error: ") and "\n" not in said
        return {"refused_after_s": round(time.monotonic() - started_s, 1), "said": said[:500], "is_fine": is_sentence}
    return found


def _used(server: Served, folder: str | None) -> dict[str, Any]:
    with Client(server.target.grpc, api_key=server.target.keys["bob"]) as client:
        answer = client.complete(PROMPT, SAMPLING).text
        if folder is not None:
            _fill(Path(f"/proc/{server.pid}/root{folder}/fill"))
        full = client.complete(PROMPT, SAMPLING).text
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        recovered = _after_a_while(client)
    is_fine = answer == full == recovered and not server.tracebacks()
    return {"answers": [answer, full, recovered], "tracebacks": server.tracebacks(), "is_fine": is_fine}


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


def _after_a_while(client: Client) -> str:
    until_s = time.monotonic() + RECOVER_WITHIN_S
    while True:
        try:
            return client.complete(PROMPT, SAMPLING).text
        except IntarsiaError as error:
            if time.monotonic() > until_s:
                return f"{type(error).__name__}: {error}"
            time.sleep(0.2)


def is_fine(found: dict[str, Any]) -> bool:
    return all(way["is_fine"] for way in found["ways"].values())


if __name__ == "__main__":
    program(__doc__, run, is_fine, python=sys.executable, workers=1)
