"""Makes `sync_client.py` of `async_client.py`, so that both clients have one source.

    python deploy/client/unasync.py    writes it; tests/deploy/client/test_unasync.py fails until it was run

The way is httpcore's (scripts/unasync.py).
"""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE, MADE = HERE / "async_client.py", HERE / "sync_client.py"

HEADER = "# Made of async_client.py by unasync.py: change that file, and make this one anew.\n"

REPLACED = (
    (r"with an event loop\. The other one is made of this file: unasync\.py", "without an event loop"),
    (r"on an event loop", "that threads may share"),
    (r"async (def|for|with) ", r"\1 "),
    (r"await ", ""),
    (r"AsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
    (r"AsyncGenerator", "Generator"),
    (r"AsyncClient", "Client"),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"grpc\.aio", "grpc"),
)
"""Patterns, applied in this order, and what replaces them."""


def without_async(program: str) -> str:
    """Turn a program for asyncio into one whose callers wait."""
    for found, instead in REPLACED:
        program = re.sub(found, instead, program)
    return HEADER + program


if __name__ == "__main__":
    MADE.write_text(without_async(SOURCE.read_text()))
