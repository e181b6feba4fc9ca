"""What the probes of each client share. Runs in the client's environment, which has no `intarsia`.

A probe is a function that says what came back. It fails by raising.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

URL = os.environ["BASE_URL"]  # ends in /v1
ROOT_URL = URL.removesuffix("/v1")
MODEL = os.environ["MODEL"]
KEY = os.environ["API_KEY"]
ANSWERS = os.environ.get("ANSWERS")  # a file for what the probes answered: a client may print what it likes
TOKENIZER = os.environ["TOKENIZER"]  # the folder of the checkpoint

ONLY_C = {"66": 100}
"""A `logit_bias` under which the model says the letter c alone, a token each. Of what it says else, some bytes are no
text by themselves and come in one piece, so that neither the words nor the number of pieces could be told."""

LONGEST_ANSWER = 400

_probes: list[tuple[str, Callable[[], Any]]] = []


def probe(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Take a function, plain or async, as a probe."""

    def take(function: Callable[[], Any]) -> Callable[[], Any]:
        _probes.append((name, function))
        return function

    return take


def run() -> None:
    """All probes in their order, a line of JSON each: into the file of answers, else printed."""
    chosen = sys.argv[1:]
    with asyncio.Runner() as loop:  # one for all, as connections belong to it; none runs around a plain function
        for name, function in _probes:
            if not chosen or name in chosen:
                _tell(json.dumps({"probe": name} | _found(loop, function)))


def _tell(line: str) -> None:
    if not ANSWERS:
        print(line, flush=True)
        return
    with open(ANSWERS, "a", encoding="utf-8") as answers:
        print(line, file=answers)


def _found(loop: asyncio.Runner, function: Callable[[], Any]) -> dict[str, Any]:
    try:
        said = loop.run(function()) if inspect.iscoroutinefunction(function) else function()
        return {"ok": True, "answered": str(said)}
    except (Exception, SystemExit) as error:  # a client may end the program: that is a failure like any other
        if os.environ.get("TRACE"):
            raise
        return {"ok": False, "answered": f"{type(error).__name__}: {error}"[:LONGEST_ANSWER]}


def expect(is_so: Any, *about: Any) -> None:
    """Raise if that is not so, and tell what was found instead."""
    if not is_so:
        raise AssertionError(" ".join(map(repr, about)))


def raises(kind: type[BaseException], function: Callable[[], Any], *words: str) -> str:
    """The name of the error that comes, with these words in it."""
    try:
        got = function()
    except kind as error:
        expect(all(word in str(error) for word in words), words, str(error))
        return type(error).__name__
    raise AssertionError(f"no {kind.__name__}, but {got!r}"[:LONGEST_ANSWER])
