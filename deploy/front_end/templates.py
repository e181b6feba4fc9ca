"""Chat templates rendered in processes of their own, which end when one takes too much. See `template_child.py`."""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest, RequestTooLarge
from ..settings.limits import Limits
from .json_pieces import json_pieces
from .template_child import LONGEST_COMPLAINT_CHARS as LONGEST_COMPLAINT_CHARS

CHILDREN = 4
"""The most child processes at once. Each begins when all others are busy."""

PATIENCE_S = 5.0
"""Time beyond a template's own, in which its child ends itself. Later the child is killed."""

CHILD = Path(__file__).with_name("template_child.py")


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation, and what it is rendered with. All in it is as JSON has it."""

    template: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]  # of the template: the tokenizer's special tokens, and the request's own
    add_generation_prompt: bool
    continue_final_message: bool

    def to_json(self) -> bytes:
        """Raises `InvalidRequest` for what JSON does not have."""
        given = {name: getattr(self, name) for name in self.__slots__}
        try:
            pieces = json_pieces(given | {"messages": [dict(each) for each in self.messages]})
            return b"".join(piece.encode("utf-8", "surrogatepass") for piece in pieces)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the messages are not as JSON has them: {error}", field="messages") from None


class Templates:
    """Renders. Its children begin when they are needed, and end with it; any thread may ask."""

    def __init__(self, children: int = CHILDREN) -> None:
        self._room = threading.Semaphore(children)
        self._free: list[_Child] = []

    def render(self, question: Question, limits: Limits, max_bytes: int) -> str:
        """max_bytes: of the text. Raises `InvalidRequest` when the template refuses or takes too much,
        `RequestTooLarge` when the text is longer."""
        asked = question.to_json()
        with self._room:
            child = self._child()
            head, text = child.ask(asked, limits, max_bytes)
            if child.is_there:
                self._free.append(child)
        if "bytes" in head:
            return text.decode("utf-8", "surrogatepass")
        raise _complaint(head, limits)

    def close(self) -> None:
        """End the children that are not at work."""
        while self._free:
            self._free.pop().end()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the very end of a program all may be gone
            self.close()

    def _child(self) -> "_Child":
        while True:
            try:
                child = self._free.pop()
            except IndexError:
                return _Child()
            if child.is_there:  # it may have been killed since
                return child
            child.end()


def _complaint(head: Mapping[str, Any], limits: Limits) -> InvalidRequest:
    if "refused" in head:
        return InvalidRequest(f"the chat template refuses these messages: {head['refused']}", field="messages")
    if "too_long" in head:
        return RequestTooLarge(
            f"the chat template makes a text of more than {head['too_long']} bytes of these messages, which is more "
            "than the model takes; send less",
            field="messages",
            limit=head["too_long"],
        )
    return InvalidRequest(
        f"the chat template cannot render these messages within {limits.template_timeout_s:g} s and "
        f"{limits.max_template_memory >> 20} MiB; send fewer or simpler ones",
        field="messages",
    )


class _Child:
    """A process that renders for one at a time."""

    def __init__(self) -> None:
        # Without what `site` does, it is there in half the time. Its time zone is ours; of the rest of our environment,
        # which may hold keys, it needs nothing.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_path({str(CHILD)!r}, None, '__main__')"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PYTHONUTF8": "1"} | {name: os.environ[name] for name in ("TZ",) if name in os.environ},
        )

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes, limits: Limits, max_bytes: int) -> tuple[dict[str, Any], bytes]:
        """(head, text) of its answer; `too_large` if it ends over it, which it has then done."""
        about = {
            "bytes": len(question),
            "timeout_s": limits.template_timeout_s,
            "memory_bytes": limits.max_template_memory,
            "max_bytes": max_bytes,
        }
        reading, writing = self._process.stdout, self._process.stdin
        assert reading is not None and writing is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                writing.write(json.dumps(about).encode() + b"\n")
                writing.write(question)
                writing.flush()
            line = reading.readline() if self._is_answering(limits.template_timeout_s + PATIENCE_S) else b""
            head = json.loads(line) if line.endswith(b"\n") else {}
            text = reading.read(head.get("bytes", 0))
        except BaseException:
            self.end()
            raise
        if not head or len(text) < head.get("bytes", 0) or "too_large" in head:
            self.end()
            return {"too_large": True}, b""
        return head, text

    def _is_answering(self, within_s: float) -> bool:
        poll = select.poll()  # a server has more files open than `select.select` takes
        poll.register(self._process.stdout, select.POLLIN)  # type: ignore[arg-type]
        return bool(poll.poll(within_s * 1000))

    def end(self) -> None:
        """End the child process at once."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()
