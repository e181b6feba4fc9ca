"""Clients that ask for much and read nothing, beside 16 ordinary streams; and a front end that stands still.

    python -m intarsia.tests.faults.unread
    python -m intarsia.tests.faults.unread --python OTHER/.venv/bin/python    against another checkout's server

It starts `intarsia serve demo` and learns what the ordinary streams answer. For `--seconds` each, without and then with
the attackers, it measures the longest silence of a stream and the slowest answer of /health. An attacker has a receive
buffer of 2 KiB and asks for 16 answers of 400 tokens with 20 log-probabilities each; one that is shut out comes again.
In the end the front end is stopped for `--stop-s` in the midst of the streams. Prints JSON; exits with 0 if

    silences are at most 0.25 s more than without the attack; the front end holds at most 64 MB more after it
    all ordinary answers are complete and equal, also those that the stop struck; the controller is the same process
"""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from intarsia.deploy.start.processes import descendants

from .program import program

STREAMS = 16
BODY = {"model": "demo", "prompt": "A bug is", "ignore_eos": True}
FIRST = {"priority": -1}
"""Of ordinary users, who would wait behind the attackers' hundreds of answers else, as behind anybody's."""

ATTACK = BODY | {"stream": True, "n": 16, "logprobs": 20, "max_tokens": 400}
START_S, SETTLE_S = 180.0, 5.0
MOST_SILENCE_MORE_S, MOST_MEMORY_MORE_BYTES = 0.25, 64 * 10**6

Found = dict[str, Any]


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    port: int
    model: str
    log: Path

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def controllers(self) -> list[int]:
        return [pid for pid in descendants(of=self.process.pid) if _command(pid).startswith("ray::ControllerActor")]


@contextlib.contextmanager
def serving(python: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(Path(python).parent / "intarsia"), "serve", "demo", "--port", "0", "--grpc-port", "0"],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd="/",
            )
        try:
            until_s = time.monotonic() + START_S
            while "\nready" not in (said := log.read_text(errors="replace")):
                assert process.poll() is None and time.monotonic() < until_s, said[-2000:]
                time.sleep(0.1)
            port = int(re.findall(r"HTTP +http://[\d.]+:(\d+)", said)[0])
            yield Server(process, port, re.findall(r"model +(\S+)", said)[0], log)
        finally:
            process.send_signal(signal.SIGCONT)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                    break


class Seen:
    """What the ordinary users saw."""

    def __init__(self) -> None:
        self.longest_silence_s = 0.0
        self.slowest_health_s = 0.0
        self.answers = self.wrong = self.refused = 0
        self.failed: list[str] = []

    def found(self) -> Found:
        return {
            "longest silence of a stream, s": round(self.longest_silence_s, 3),
            "slowest /health, s": round(self.slowest_health_s, 3),
            "answers": self.answers,
            "refused": self.refused,
            "wrong": self.wrong,
            "failed": self.failed[:5],
        }


def _request(body: Found) -> bytes:
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1", "Host: a", "Connection: close", "Content-Type: application/json"
    return "\r\n".join((*head, f"Content-Length: {len(payload)}", "", "")).encode() + payload


async def _events(port: int, body: Found) -> AsyncGenerator[Found, None]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request(body))
        status = await reader.readline()
        if b"200" not in status:
            raise ConnectionError(f"{status!r}: {(await reader.read(3000))[-300:]!r}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                return
        raise ConnectionError("the stream ended early")
    finally:
        writer.close()


async def _text(port: int, body: Found, seen: Seen) -> str:
    text, last_s = "", math.inf  # the first token's time is a matter of who waits for a place
    async with contextlib.aclosing(_events(port, body)) as events:
        async for event in events:
            now_s = time.monotonic()
            seen.longest_silence_s, last_s = max(seen.longest_silence_s, now_s - last_s), now_s
            if "error" in event:
                raise ConnectionError(str(event["error"]))
            text += event["choices"][0]["text"]
    return text


async def _ordinary(server: Server, number: int, expected: list[str], until_s: float, seen: Seen) -> None:
    while time.monotonic() < until_s:
        try:
            text = await _text(server.port, _asked(server, number), seen)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            if " 429 " in str(error):  # more is asked than can be served: anybody may be told so
                seen.refused += 1
            else:
                seen.failed.append(str(error)[:200])
            await asyncio.sleep(0.2)
            continue
        seen.answers += 1
        seen.wrong += text != expected[number]


def _asked(server: Server, number: int, tokens: int = 120) -> Found:
    temperature = 0.0 if number % 2 else 0.8
    return BODY | {
        "model": server.model,
        "stream": True,
        "max_tokens": tokens,
        "seed": number,
        "temperature": temperature,
    }


async def _probe(server: Server, until_s: float, seen: Seen) -> None:
    while time.monotonic() < until_s:
        begun_s = time.monotonic()
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await reader.read()
            writer.close()
        seen.slowest_health_s = max(seen.slowest_health_s, time.monotonic() - begun_s)
        await asyncio.sleep(0.05)


async def _attack(server: Server, until_s: float, ended: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while time.monotonic() < until_s:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            begun_s = time.monotonic()
            with contextlib.suppress(OSError):
                await loop.sock_connect(client, ("127.0.0.1", server.port))
                await loop.sock_sendall(client, _request(ATTACK | {"model": server.model}))
                while time.monotonic() < until_s:
                    await asyncio.sleep(0.5)
                    client.send(b"")  # raises when it is closed
                    if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        break
        if time.monotonic() < until_s:
            ended.append(round(time.monotonic() - begun_s, 1))
            await asyncio.sleep(0.2)


async def _beside(server: Server, expected: list[str], seconds: float, *others: Any) -> tuple[Seen, int]:
    """Ordinary streams and probes, with others at it; and the most that the front end held meanwhile."""
    seen, most, until_s = Seen(), 0, time.monotonic() + seconds
    users = [_ordinary(server, number, expected, until_s, seen) for number in range(STREAMS)]
    going = asyncio.gather(_probe(server, until_s, seen), *users, *others)
    while not going.done():
        most = max(most, server.rss_bytes())
        await asyncio.wait({going}, timeout=0.2)
    await going
    return seen, most


async def _stop(server: Server, stop_s: float) -> Found:
    """Stop the front end in the midst of 8 streams: all must go on."""
    numbers = range(8)
    expected = await asyncio.gather(*(_text(server.port, _asked(server, n, 800), Seen()) for n in numbers))
    seen = Seen()
    running = [asyncio.ensure_future(_text(server.port, _asked(server, n, 800), seen)) for n in numbers]
    await asyncio.sleep(0.7)
    server.process.send_signal(signal.SIGSTOP)
    struck = sum(not task.done() for task in running)
    await asyncio.sleep(stop_s)
    server.process.send_signal(signal.SIGCONT)
    found = await asyncio.gather(*running, return_exceptions=True)
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    errors = [str(one)[:200] for one in found if isinstance(one, BaseException)]
    return {"stopped, s": stop_s, "streams that it struck": struck, "equal": equal, "errors": errors}


async def run(python: str, seconds: float, attackers: int, stop_s: float, seed: int) -> Found:
    with serving(python) as server:
        controllers = server.controllers()
        expected = [await _text(server.port, _asked(server, number), Seen()) for number in range(STREAMS)]
        before, _ = await _beside(server, expected, seconds / 3)
        rss_before = server.rss_bytes()
        ended: list[float] = []
        until_s = time.monotonic() + seconds
        attacks = [_attack(server, until_s, ended) for _ in range(attackers)]
        during, most = await _beside(server, expected, seconds, *attacks)
        await asyncio.sleep(SETTLE_S)
        rss_after = server.rss_bytes()
        stopped = await _stop(server, stop_s) if stop_s else {}
        await asyncio.sleep(1)
        log = server.log.read_text(errors="replace").partition("\nready")[2]
        return {
            "seed": seed,
            "without": before.found(),
            "with": during.found(),
            "attackers that were shut out, after s": sorted(ended)[:5] + sorted(ended)[-5:],
            "front end before, at most, after, MB": [round(n / 1e6, 1) for n in (rss_before, most, rss_after)],
            "front end stopped": stopped,
            "controllers before": controllers,
            "controllers after": server.controllers(),
            "tracebacks": log.count("Traceback"),
            "log": [line for line in log.splitlines() if line and "has not read" not in line][:5],
        }


def is_fine(found: Found) -> bool:
    before, during, stopped = found["without"], found["with"], found["front end stopped"]
    silences = "longest silence of a stream, s", "slowest /health, s"
    rss_before, _, rss_after = found["front end before, at most, after, MB"]
    return (
        all(during[name] <= before[name] + MOST_SILENCE_MORE_S for name in silences)
        and (rss_after - rss_before) * 1e6 <= MOST_MEMORY_MORE_BYTES
        and not (during["wrong"] or during["failed"] or found["tracebacks"])
        and found["controllers before"] == found["controllers after"] != []
        and (not stopped or stopped["equal"] == 8)
    )


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 1))
    program(__doc__, run, is_fine, python=sys.executable, seconds=150.0, attackers=40, stop_s=15.0)
