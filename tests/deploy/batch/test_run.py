"""`intarsia batch` as a command: killed at any moment and run again, it ends with the same bytes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

COMMAND = Path(sys.executable).with_name("intarsia")

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "OMP_NUM_THREADS")}

LINES = 260


def write_batch(path: Path, count: int, no_request: int = 11) -> None:
    """Completions and chats, drawn and greedy, with a beginning in common and without; some that are refused, and one
    line, `no_request`, that is none."""
    rng = random.Random(3)
    with path.open("w") as file:
        for n in range(count):
            body: dict[str, Any] = {"max_tokens": rng.randrange(2, 40), "temperature": rng.choice([0, 0.8])}
            text = "The inlay of many woods. " * (n % 3) + f"Panel {n}"
            if n % 5 == 0:
                url, body = "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
            else:
                url, body = "/v1/completions", body | {"prompt": text}
            if n % 41 == 7:
                body["temperature"] = -1
            asked = {"custom_id": f"row-{n}", "method": "POST", "url": url, "body": body}
            file.write("no JSON\n" if n == no_request else json.dumps(asked) + "\n")


def start(source: Path, out: Path, model: Path, *more: str) -> subprocess.Popen[str]:
    arguments = ["batch", str(source), "-o", str(out), "--model", str(model), "--kv-cache-memory", "1MiB", *more]
    return subprocess.Popen(
        [COMMAND, *arguments], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(source: Path, out: Path, model: Path, *more: str) -> str:
    """Run it to its end, which is told as a failure, since a line is no request. Returns what it says."""
    process = start(source, out, model, *more)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 3, said
    return said


def results(path: Path) -> int:
    """Whole lines after the first."""
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    write_batch(path, LINES)
    return path


@pytest.fixture(scope="module")
def undisturbed(source: Path, talker: Path) -> bytes:
    """The results of one run."""
    out = source.with_name("undisturbed.jsonl")
    said = finish(source, out, talker)
    assert f"{LINES} lines in" in said and "out of the prefix cache" in said
    refused = 1 + len(range(7, LINES, 41))
    for told in (said, finish(source, out, talker)):  # the second time nothing is left to do
        told = " ".join(told.split())  # as wide as whatever shows it
        assert f"{LINES - refused} answered, {refused} refused (400 x{refused - 1}, line x1): first at line 8: " in told
    assert "already" in told
    return out.read_bytes()


def test_every_line_has_its_result_in_its_place(undisturbed: bytes):
    rows = [json.loads(line) for line in undisturbed.splitlines()]
    assert [row["custom_id"] for row in rows] == [None if n == 11 else f"row-{n}" for n in range(LINES)]
    assert "no JSON" in rows[11]["error"]["message"]
    assert rows[7]["response"]["status_code"] == 400
    assert "temperature" in rows[7]["response"]["body"]["error"]["message"]
    answered = [row["response"] for row in rows if row["response"] and row["response"]["status_code"] == 200]
    assert len(answered) == LINES - 1 - len(range(7, LINES, 41))
    assert all(answer["body"]["choices"] for answer in answered)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_random_points_it_completes_with_the_same_bytes(
    undisturbed: bytes, source: Path, talker: Path, tmp_path: Path, kills: int
):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, out = random.Random(seed), tmp_path / "out.jsonl"
    journal = out.with_name("out.jsonl.partial")
    in_the_middle = 0
    for kill in range(kills):
        before = results(journal)
        process = start(source, out, talker)
        until = before + rng.randrange(0, max(1, (LINES - before) // 2))
        # Some are killed before the first result; not the first one, or none might be at work.
        deadline = time.monotonic() + (rng.uniform(3, 40) if kill else 240)
        while process.poll() is None and results(journal) <= until and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        if process.poll() is None:  # else it had so few lines left that it came to its end
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        in_the_middle += before < results(journal) < LINES
    finish(source, out, talker)
    assert out.read_bytes() == undisturbed
    assert not journal.exists()
    assert in_the_middle > 0, "no kill met it at work"


@pytest.mark.slow
def test_stopped_it_says_how_to_go_on(undisturbed: bytes, source: Path, talker: Path, tmp_path: Path):
    out = tmp_path / "out.jsonl"
    process = start(source, out, talker)
    while results(out.with_name("out.jsonl.partial")) < 5:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on from there" in said
    assert not out.exists()
    said = finish(source, out, talker, "--num-engines", "2")  # more engines, the same bytes
    assert "results are there already" in said
    assert out.read_bytes() == undisturbed
