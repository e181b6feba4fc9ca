"""An `LLM` that is never closed, in programs of their own: they end quietly, and leave no process behind."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

GONE_WITHIN_S = 25.0
"""Of all processes: less than the fork server lingers where it is not told to go."""

BEGIN = """
import sys, threading
from intarsia import LLM, SamplingParams
llm = LLM("demo", kv_cache_memory="8MiB", name="left-open")
answer = llm.generate("A program that", SamplingParams(max_tokens=4))[0]
print(len(answer.token_ids), flush=True)
"""
ENDS = {
    "the end of the script": ("", 0, ""),
    "an exception": ("raise ValueError('mine')", 1, "ValueError: mine"),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "a thread that still asks": (
        "asked = lambda: print(len(llm.generate('x', SamplingParams(max_tokens=4))[0].token_ids))\n"
        "threading.Timer(0.5, asked).start()",
        0,
        "",
    ),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == "an exception" else pytest.mark.slow) for how in ENDS]
)
def test_an_llm_that_is_never_closed_ends_quietly(how: str, tmp_path: Path):
    last, status, said = ENDS[how]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short
        marked = environment | {"RAY_TMPDIR": folder, "INTARSIA_TEST_MARK": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", BEGIN + last], env=marked, capture_output=True, text=True, timeout=200, cwd=tmp_path
        )
    assert done.returncode == status, done.stderr
    assert set(done.stdout.split()) == {"4"}
    lines = [line for line in done.stderr.splitlines() if line]
    assert lines == (words_of_python(last) if said else [])
    assert lines[-1:] == ([said] if said else [])
    deadline = time.monotonic() + GONE_WITHIN_S  # the fork server looks every now and then whether its user is there
    while (left := left_behind(f"INTARSIA_TEST_MARK={tmp_path}".encode())) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def words_of_python(last: str) -> list[str]:
    """What it says of an exception in that line of the program; some versions show the line."""
    code = "\n" * BEGIN.count("\n") + last
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stderr.splitlines()


def left_behind(mark: bytes) -> list[str]:
    """Processes whose environment has the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


CLOSED_LAST = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
from intarsia.deploy.start.at_exit import closed_at_exit, is_closed

class Open:
    def __init__(self, name, error=None):
        self.name, self.error = name, error
    def shutdown(self):
        print("closed", self.name)
        if self.error:
            raise self.error

first, second, third = Open("first"), Open("second", ValueError("it does not close")), Open("third")
for each in (first, second, third):
    closed_at_exit(each)
is_closed(third)
atexit.register(print, "atexit")
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.3), print("work of a pool")))
threading.Timer(0.6, print, ["work of a thread"]).start()
raise SystemExit(4)
"""


def test_what_is_open_is_closed_after_all_threads_and_before_atexit_the_latest_first(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", CLOSED_LAST], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 4
    wanted = ["work of a pool", "work of a thread", "closed second", "closed first", "atexit"]
    assert done.stdout.splitlines() == wanted
    assert done.stderr == "Open could not be shut down at the end: it does not close\n"


def test_a_forked_child_closes_nothing_of_its_parent(tmp_path: Path):
    code = CLOSED_LAST.split("atexit.register")[0] + (
        "import os\nif os.fork() == 0:\n    fourth = Open('child')\n    closed_at_exit(fourth)\n"
        "else:\n    os.wait(); print('parent')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.splitlines() == ["closed child", "parent", "closed second", "closed first"]
