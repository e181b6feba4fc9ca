"""How far a batch has come, on a terminal and elsewhere."""

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from intarsia.deploy.batch import run


class Growing:
    count = 10


def drawn(*, is_terminal: bool) -> str:
    """What is written while 400 results come."""
    file = io.StringIO()
    journal: Any = Growing()

    async def work() -> None:
        with run._progress(Console(file=file, force_terminal=is_terminal, width=80), journal, 400):
            for _ in range(6):
                await asyncio.sleep(0.15)
                journal.count += 65

    asyncio.run(work())
    return file.getvalue()


def test_a_terminal_shows_a_bar_with_the_rate_and_the_time_that_is_left():
    text = drawn(is_terminal=True)
    assert "400/400" in text and "/s" in text and "0:00:0" in text


def test_elsewhere_a_line_is_written_now_and_then(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "TELL_EVERY_S", 0.1)
    lines = drawn(is_terminal=False).splitlines()
    assert len(lines) >= 2 and all("of 400" in line and "s left" in line for line in lines[1:])
