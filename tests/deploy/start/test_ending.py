"""Ctrl-C and SIGTERM while a server starts and while it serves. More of it: `tests/faults/endings.py`."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from intarsia.deploy.start.ending import TIDY
from intarsia.deploy.start.processes import descendants
from intarsia.tests.faults.endings import WITHOUT_GCS_S, Server, _idlers

COMMAND = str(Path(sys.executable).with_name("intarsia"))

SLOW_S = 20.0
"""For what takes a moment: other tests may have the cores."""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_that_starts_ends_at_the_first_signal_and_says_so(number: signal.Signals, status: int):
    async def scenario() -> None:
        server = Server(COMMAND, 1, f"test-{time.monotonic_ns()}")
        await server.start()
        await asyncio.sleep(1.5)  # it imports, or starts Ray
        found = await server.end(number, SLOW_S)
        assert found["status"] == status and found["in_time"], (found, server.said)
        assert found["said_after_s"] is not None and not found["tracebacks"], server.said
        assert not found["left"] and not found["left_in_shm"]

    asyncio.run(scenario())


STUCK = """
import ctypes
from intarsia.deploy.start.ending import ended_by_signals
with ended_by_signals():
    print("begun", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for ever, and keeps the interpreter
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_whose_interpreter_is_kept_by_a_library_ends_all_the_same(number: signal.Signals):
    with subprocess.Popen([sys.executable, "-c", STUCK], cwd="/", stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None and stuck.stdout.readline() == "begun\n"
        [guard] = descendants(of=stuck.pid)
        stuck.send_signal(number)
        try:
            assert stuck.wait(SLOW_S) in (-signal.SIGKILL, 128 + number)  # the latter, if it was heard just before
        finally:
            stuck.kill()
        assert set(stuck.stdout.read().splitlines()) == {"stopping ..."}
    until_s = time.monotonic() + SLOW_S
    while Path(f"/proc/{guard}").exists():
        assert time.monotonic() < until_s, "the guard is left"
        time.sleep(0.05)


WITH_A_BAR = """
import ctypes, sys, time
from intarsia.deploy.start.ending import ended_by_signals
from intarsia.deploy.terminal.loading_bar import loading_bar
with ended_by_signals(), loading_bar():
    time.sleep(0.3)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2 if sys.argv[1] == "stuck" else 0):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["waits", "stuck"])
def test_a_terminal_with_a_bar_has_its_cursor_back_and_an_empty_line(how: str):
    ours, its = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", WITH_A_BAR, how], cwd="/", stdout=its, stderr=its) as waiting:
        os.close(its)
        shown = b""
        while b"starting Ray" not in shown:
            shown += os.read(ours, 4096)
        time.sleep(0.5)
        waiting.send_signal(signal.SIGINT)
        shown += _rest_of(ours)
        status = waiting.wait(SLOW_S)
        # The kernel may say that the other side is closed before it hands over what that side wrote last.
        shown += _rest_of(ours)
    os.close(ours)
    assert status in (130, -signal.SIGKILL)
    assert shown.endswith(TIDY), (status, shown)
    assert re.search(rb"(\r|\n|\x1b\[2?K|\x1b\[\?25h)stopping \.\.\.(\x1b\[0m)?\r\n", shown), shown[-400:]


def _rest_of(terminal: int) -> bytes:
    rest = b""
    with contextlib.suppress(OSError):  # how a terminal says that its other side is closed
        while piece := os.read(terminal, 4096):
            rest += piece
    return rest


@pytest.mark.slow
@pytest.mark.parametrize("gcs", [True, False])
def test_a_server_that_serves_ends_in_time_with_clients_connected_or_without_its_gcs(gcs: bool):
    async def scenario() -> None:
        server = Server(COMMAND, 2, f"test-{time.monotonic_ns()}")
        await server.start()
        await asyncio.wait_for(server.ready.wait(), 120)
        async with _idlers(server):
            if not gcs:
                server.kill_gcs()
            await asyncio.sleep(1)
            found = await server.end(signal.SIGINT, WITHOUT_GCS_S)
        assert found["status"] == 0 and found["in_time"] and not found["tracebacks"], (found, server.said)
        assert not found["left"] and not found["left_in_shm"]

    asyncio.run(scenario())
