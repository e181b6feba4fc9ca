"""Ctrl-C and SIGTERM at random moments, from the first ones of start-up to a server that serves.

    python -m intarsia.tests.faults.endings --tries 20 --command /path/to/bin/intarsia

For each try a server (one or two workers) is started, and gets one signal: it must say "stopping" at once, end within
two seconds, and leave nothing behind: no process, no file in /dev/shm. With its GCS killed before, five seconds. Prints
JSON; exits with 1 if anything was too late, or is left. `--command` names another installation: an older one, say.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from intarsia.deploy.client import AsyncClient
from intarsia.errors import IntarsiaError

from .program import program

END_WITHIN_S, WITHOUT_GCS_S = 2.0, 5.0

GONE_WITHIN_S = 2.0
"""For processes that live on for a moment: their parent's end has to be noticed."""

LONGEST_S = 90.0
"""For a server that does not end."""

NAME = "INTARSIA_ENDINGS"
"""Environment variable that all processes of a try have, in whatever session they are."""


class Server:
    """One try: a server, what it says, and whatever it started."""

    def __init__(self, command: str, workers: int, mark: str):
        self._mark = f"{NAME}={mark}".encode()
        self._shm = set(os.listdir("/dev/shm"))
        self._command = [command, "serve", "demo", "--port", "0", "--grpc-port", "0"]
        self._command += ["--tensor-parallel-size", str(workers)]
        self._environment = os.environ | {NAME: mark, "PYTHONUNBUFFERED": "1"}
        self.said: list[tuple[float, str]] = []
        self.ready = asyncio.Event()

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            cwd="/",
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout
        async for line in self.process.stdout:
            self.said.append((time.monotonic(), line.decode(errors="replace").rstrip()))
            if line.startswith(b"ready"):
                self.ready.set()

    async def end(self, number: signal.Signals, limit_s: float) -> dict[str, Any]:
        """Send the signal, and see what comes of it."""
        sent_s = time.monotonic()
        self.process.send_signal(number)
        try:
            await asyncio.wait_for(self.process.wait(), LONGEST_S)
        except TimeoutError:
            self.process.kill()
        took_s = time.monotonic() - sent_s
        await asyncio.wait({self._reading}, timeout=5)
        left = await self._left()
        stopping = [at - sent_s for at, line in self.said if line.startswith("stopping")]
        tracebacks = sum(line.startswith("Traceback") for _, line in self.said)
        for pid in self._processes():
            os.kill(pid, signal.SIGKILL)
        return {
            "said_after_s": round(stopping[0], 2) if stopping else None,
            "ended_after_s": round(took_s, 2),
            "status": self.process.returncode,
            "tracebacks": tracebacks,
            "left": left,
            "left_in_shm": sorted(set(os.listdir("/dev/shm")) - self._shm) if left else [],
            "in_time": took_s <= limit_s,
        }

    async def _left(self) -> list[str]:
        """Processes that are there still."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while (pids := self._processes()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return [_command_of(pid) for pid in pids]

    def _processes(self) -> list[int]:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._is_ours(entry)]

    def _is_ours(self, entry: Path) -> bool:
        try:
            return self._mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def at(self, what: str) -> tuple[str, int]:
        """Where it listens. what: "HTTP" or "gRPC" """
        [line] = [line for _, line in self.said if line.startswith(what)]
        found = re.search(r"([\d.]+):(\d+)", line)
        assert found
        return found[1], int(found[2])

    def kill_gcs(self) -> None:
        [pid] = [pid for pid in self._processes() if "gcs_server" in _command_of(pid)[:200]]
        os.kill(pid, signal.SIGKILL)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160]
    except OSError:
        return ""


@contextlib.asynccontextmanager
async def _idlers(server: Server) -> AsyncIterator[None]:
    """Clients who ask nothing, and stay: connections, half a head, half a body, a watcher of the cache."""
    begun = (
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost:",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{",
    )
    host, port = server.at("HTTP")
    opened = [await asyncio.open_connection(host, port) for _ in begun]
    for (_, writer), head in zip(opened, begun, strict=True):
        writer.write(head)

    async def watch(client: AsyncClient) -> None:
        with contextlib.suppress(IntarsiaError):
            async for _ in client.watch_cache():
                pass

    async with AsyncClient("{}:{}".format(*server.at("gRPC"))) as client:
        watching = asyncio.create_task(watch(client))
        try:
            yield
        finally:
            watching.cancel()
            for _, writer in opened:
                writer.close()


async def _one(server: Server, number: signal.Signals, after_s: float, *, is_served: bool, gcs: bool) -> dict[str, Any]:
    """after_s: from its start; or, where it is to serve first, from then on."""
    await server.start()
    if is_served:
        await asyncio.wait_for(server.ready.wait(), LONGEST_S)
        if not gcs:
            server.kill_gcs()
    async with _idlers(server) if is_served and gcs else contextlib.nullcontext():
        await asyncio.sleep(after_s)
        found = await server.end(number, END_WITHIN_S if gcs else WITHOUT_GCS_S)
    return {"signal": number.name, "after_s": round(after_s, 2), "was_ready": server.ready.is_set(), **found}


async def run(command: str, tries: int, served: int, without_gcs: int, longest_s: float, seed: int) -> dict[str, Any]:
    """tries: at moments of start-up up to `longest_s`
    served: once it serves, to clients who ask nothing and stay
    without_gcs: once it serves, its GCS killed"""
    rng = random.Random(seed)
    command = command or str(Path(sys.executable).with_name("intarsia"))
    draw: Callable[[], tuple[int, signal.Signals]] = lambda: (  # noqa: E731
        rng.choice((1, 2)),
        rng.choice((signal.SIGINT, signal.SIGTERM)),
    )
    kinds = [("starting", False, True)] * tries + [("serving", True, True)] * served
    kinds += [("without GCS", True, False)] * without_gcs
    found: dict[str, list[dict[str, Any]]] = {}
    for n, (kind, is_served, gcs) in enumerate(kinds):
        workers, number = draw()
        after_s = rng.uniform(0.2, 2.0) if is_served else rng.uniform(0.05, longest_s)
        server = Server(command, workers, f"{seed}.{n}")
        seen = {"workers": workers, **await _one(server, number, after_s, is_served=is_served, gcs=gcs)}
        found.setdefault(kind, []).append(seen)
        print(f"{kind}: {seen}", file=sys.stderr, flush=True)
    return {"seed": seed, "summary": {kind: _summary(seen) for kind, seen in found.items()}}


def _summary(seen: list[dict[str, Any]]) -> dict[str, Any]:
    said = [each["said_after_s"] for each in seen if each["said_after_s"] is not None]
    return {
        "tries": len(seen),
        "in_time": sum(each["in_time"] for each in seen),
        "said_stopping": len(said),
        "said_after_max_s": max(said, default=None),
        "ended_after_max_s": max(each["ended_after_s"] for each in seen),
        "with_traceback": sum(bool(each["tracebacks"]) for each in seen),
        "left_processes": sum(len(each["left"]) for each in seen),
        "left_in_shm": sum(len(each["left_in_shm"]) for each in seen),
        "statuses": sorted({each["status"] for each in seen}),
    }


def is_fine(found: dict[str, Any]) -> bool:
    return all(
        each["in_time"] == each["tries"] and not each["left_processes"] and not each["left_in_shm"]
        for each in found["summary"].values()
    )


if __name__ == "__main__":
    program(__doc__, run, is_fine, command="", tries=20, served=6, without_gcs=3, longest_s=14.0)
