"""One line for each request: who asked what, how long it took, how it ended. Written where an operator asks for it; it
holds no texts and no keys.

    a server ─► `one`: a record for each call ─┬─ the front end: tokens, waiting, how its answers ended
                                               └─► at its end a line ─► a bounded queue ─► a thread ─► standard error

The event loop never waits for who reads the lines. Where they are not taken, they are dropped and counted.
"""

import contextlib
import json
import queue
import re
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

from ...errors import IntarsiaError
from ...kvcache.misses import Miss, merged
from ...proto.leases import LeaseReceipt
from ...proto.reply import Delta
from ...proto.status import PreparedPrompt
from .access import TENANT
from .leases import brief

FORMS = ("line", "json")

MOST_WAITING = 10_000
"""Lines, of about 300 bytes, that wait for the thread."""

MOST_AT_ONCE = 256
"""Lines in one write."""

LONGEST_WORD_CHARS = 256
"""The most characters of a word that a client chose: its id, its tenant, a path."""

PLAIN = re.compile(r"[\w./:@+,-]+", re.ASCII)
"""What stands in a line as it is. Anything else is quoted as JSON has it, so that a line is one request."""

LOGGED = ("/intarsia.v1.Inference/Generate", "/intarsia.v1.Inference/GenerateBatch")
"""The methods of gRPC that have a line. A batch is one request."""

CLIENT_CLOSED = 499
"""nginx's status for a client that has left."""

CLOSE_WITHIN_S = 1.0


@dataclass(slots=True)
class Record:
    """What is known of one request by now. Times are seconds since it came."""

    endpoint: str
    began_s: float = field(default_factory=time.monotonic)
    request_id: str = ""
    tenant: str = ""
    model: str = ""
    status: int | None = None  # of HTTP
    prompt_tokens: int = 0
    cached_tokens: int = 0
    misses: tuple[Miss, ...] = ()
    lease: LeaseReceipt | None = None
    generated_tokens: int = 0
    queue_s: float | None = None  # until its turn came
    first_token_s: float | None = None
    ends: set[str] = field(default_factory=set)  # of its answers, or an error's name
    write: Callable[[dict[str, Any]], None] | None = None  # a line

    def asked(self, request_id: str, tenant: str, model: str, prompt_tokens: int) -> None:
        """The model is asked, for one of perhaps several prompts."""
        self.request_id, self.tenant, self.model = self.request_id or request_id, tenant, model
        self.prompt_tokens += prompt_tokens

    async def watch(self, pieces: AsyncGenerator[tuple[Delta, str], None]) -> AsyncGenerator[tuple[Delta, str], None]:
        """Pass one prompt's answers on, and count them."""
        cached_tokens, misses = 0, tuple[Miss, ...]()
        try:
            async with contextlib.aclosing(pieces):
                async for delta, text in pieces:
                    if self.first_token_s is None:
                        self.first_token_s = time.monotonic() - self.began_s
                    self.generated_tokens += len(delta.token_ids)
                    self.queue_s = max(self.queue_s or 0.0, delta.queue_s)
                    self.cached_tokens += max(0, delta.num_cached_tokens - cached_tokens)
                    cached_tokens = max(cached_tokens, delta.num_cached_tokens)
                    if delta.misses and not misses:
                        misses = delta.misses
                        self.misses = merged((*self.misses, *misses))
                    self.lease = delta.lease or self.lease
                    if delta.finish_reason is not None:
                        self.ends.add(delta.finish_reason)
                    yield delta, text
        except IntarsiaError as error:
            self.failed(error)
            raise

    def log_prepared(self, request_id: str, tokens: int, prepared: PreparedPrompt, total_s: float) -> None:
        """A line of its own for what was prepared after this request."""
        if self.write is not None:
            about = {
                "id": request_id,
                "tenant": self.tenant or TENANT.get(),
                "endpoint": "prepare",
                "model": self.model,
            }
            about |= {"tokens_in": tokens, "tokens_found": prepared.found_tokens}
            about |= {"tokens_computed": prepared.computed_tokens, "total_s": _rounded(total_s), "end": prepared.end}
            self.write({"time": _now()} | about)

    def failed(self, error: IntarsiaError) -> None:
        self.ends.add(type(error).__name__)

    def fields(self) -> dict[str, Any]:
        """The fields of a line, in their order."""
        return {
            "id": self.request_id[:LONGEST_WORD_CHARS],
            "tenant": (self.tenant or TENANT.get())[:LONGEST_WORD_CHARS],
            "endpoint": self.endpoint[:LONGEST_WORD_CHARS],
            "model": self.model,
            "status": self.status,
            "tokens_in": self.prompt_tokens,
            "tokens_found": self.cached_tokens,
            **({"not_found": ",".join(map(_miss, self.misses))} if self.misses else {}),
            "tokens_out": self.generated_tokens,
            **({"leased": brief(self.lease)} if self.lease is not None else {}),
            "queue_s": _rounded(self.queue_s),
            "first_token_s": _rounded(self.first_token_s),
            "total_s": _rounded(time.monotonic() - self.began_s),
            "end": ",".join(sorted(self.ends)) or self._end(),
        }

    def _end(self) -> str:
        """How a request ended whose answers did not say so."""
        if self.status is not None and self.status >= 400 and self.status != CLIENT_CLOSED:
            return "refused" if self.status < 500 else "error"
        return "left" if self.prompt_tokens or self.status in (None, CLIENT_CLOSED) else "done"


RECORD: ContextVar[Record | None] = ContextVar("request record", default=None)
"""The record of the call that is being answered, where it is logged. Each call has a task of its own."""


def logged(log: "RequestLog | None", endpoint: str) -> contextlib.AbstractContextManager[Any]:
    """A request from its beginning to its end, if there is a log."""
    return contextlib.nullcontext() if log is None else log.one(endpoint)


def note_error(error: IntarsiaError) -> None:
    """Keep the error that a call is refused with."""
    if (record := RECORD.get()) is not None:
        record.failed(error)


class RequestLog:
    """Writes them, from any thread. `close` writes what waits."""

    def __init__(self, form: str, output: TextIO | None = None):
        """form: one of `FORMS`. output: None: standard error."""
        self._written = _as_line if form == "line" else json.dumps
        self._output = output
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="request log", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def one(self, endpoint: str) -> Iterator[Record]:
        """A request from its beginning to its end. What happens to it within this task finds its record."""
        record = Record(endpoint, write=self._put)
        RECORD.set(record)
        try:
            yield record
        except IntarsiaError as error:
            record.failed(error)
            raise
        finally:
            self._put({"time": _now()} | record.fields())

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_WITHIN_S)
            self._thread.join(CLOSE_WITHIN_S)

    def _put(self, fields: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(fields)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (first := self._waiting.get()) is not None:
            lines = [first]
            while len(lines) < MOST_AT_ONCE and not self._waiting.empty():
                lines.append(self._waiting.get())  # type: ignore[arg-type]
            is_over = None in lines
            text = "".join(f"{self._written(each)}\n" for each in lines if each is not None)
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text += f"{self._written({'time': _now(), 'dropped_requests': dropped})}\n"
            with contextlib.suppress(OSError, ValueError):  # the reader is gone
                output = self._output or sys.stderr
                output.write(text)
                output.flush()
            if is_over:
                return


def _as_line(fields: dict[str, Any]) -> str:
    time_s, *others = fields.items()
    words = " ".join(f"{name}={_word(value)}" for name, value in others if value is not None)
    return f"{time_s[1]} request {words}"


def _word(value: Any) -> str:
    text = str(value)
    return text if PLAIN.fullmatch(text) else "-" if not text else json.dumps(text)


def _miss(miss: Miss) -> str:
    return f"{miss.tokens}:{miss.cause}{':' + miss.layers if miss.layers else ''}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
