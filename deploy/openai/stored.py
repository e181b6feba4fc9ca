"""Responses and conversations that are kept on disk, so that a later request goes on from one, or asks for it again.

    a request ─► ResponseStore (the event loop) ─► one thread ─► Database (SQLite, one file for each server)

A tenant has so many of both, so many bytes and so much time (`Limits`); beyond that its oldest ones are forgotten.
Every question names the tenant, and finds nothing of another's.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...errors import InvalidRequest, InvalidSetting
from ..settings.limits import Limits
from .answers import as_json
from .stored_conversations import TABLES, Conversations, Item, StoredConversation, texts_of

Result = TypeVar("Result")

SWEEP_S = 3600.0
"""From one look for responses that are too old to the next."""

RUNNING = ("queued", "in_progress")
"""How a response is called that is still being made."""

TABLE = """
PRAGMA auto_vacuum = FULL;
PRAGMA secure_delete = ON;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    created_s REAL NOT NULL,
    previous TEXT,
    status TEXT NOT NULL,
    body TEXT NOT NULL,
    items TEXT NOT NULL,
    events BLOB,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS by_age ON responses (tenant, created_s);
CREATE TABLE IF NOT EXISTS items (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    response TEXT NOT NULL,
    PRIMARY KEY (tenant, id, response),
    FOREIGN KEY (tenant, response) REFERENCES responses ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_response ON items (tenant, response);
"""
"""What is deleted is overwritten, and its place given back."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Whether responses are kept, and where."""

    store_responses: bool = True
    folder: str | None = None  # None: of this user's state

    def path(self, port: int) -> Path | None:
        """The file of the server at that port; None where it is to be forgotten with a server that takes any port.
        Raises `InvalidSetting`."""
        if port == 0 and self.folder is None:
            return None
        folder = Path(self.folder) if self.folder is not None else _state() / "intarsia" / "responses"
        return folder / f"port-{port}.sqlite3"


class Stored(NamedTuple):
    """A response, and what it was asked."""

    id: str
    status: str
    previous: str | None  # the response that it goes on from
    body: dict[str, Any]  # as it is told
    items: Sequence[Mapping[str, Any]]  # of its own input
    events: list[str] | None = None  # of its stream, where that can be taken up again


class Database:
    """The responses in one file. Single-threaded; one process at a time."""

    def __init__(self, path: Path, limits: Limits):
        """Raises `InvalidSetting` for a file that is none of ours, cannot be written, or is another server's."""
        self._limits = limits
        with contextlib.ExitStack() as opened:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = opened.enter_context(open(path.with_suffix(".lock"), "w"))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
                opened.callback(self._connection.close)
                self._connection.executescript(TABLE + TABLES)
            except BlockingIOError:
                raise InvalidSetting(
                    f"another server keeps its responses in {path}; name another folder (--response-folder), or keep "
                    "none (--no-store-responses)",
                    field="response_folder",
                ) from None
            except (OSError, sqlite3.Error) as error:
                raise InvalidSetting(
                    f"responses cannot be kept in {path}: {error}; name another folder (--response-folder), or keep "
                    "none (--no-store-responses)",
                    field="response_folder",
                ) from None
            opened.pop_all()
        self.conversations = Conversations(self._connection, limits)

    def close(self) -> None:
        self._connection.close()
        self._lock.close()

    def end_those_that_ran(self, error: dict[str, str]) -> None:
        """Responses that were being made when their server ended have failed."""
        rows = self._connection.execute("SELECT tenant, id, body FROM responses WHERE status IN (?, ?)", RUNNING)
        for tenant, name, text in rows.fetchall():
            body = json.loads(text) | {"status": "failed", "error": error}
            self._connection.execute(
                "UPDATE responses SET status = 'failed', body = ? WHERE tenant = ? AND id = ?",
                (as_json(body), tenant, name),
            )

    def put(self, tenant: str, stored: Stored) -> None:
        """Keep it, in place of one of the same id. The oldest of the tenant make room; this one stays."""
        body, items = as_json(stored.body), as_json(stored.items)
        size = len(body.encode()) + len(items.encode())
        ids = {item["id"] for item in _all_items(stored)}
        with self._transaction() as connection:
            self.delete(tenant, stored.id)
            connection.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?)",
                (tenant, stored.id, time.time(), stored.previous, stored.status, body, items, size),
            )
            connection.executemany("INSERT INTO items VALUES (?, ?, ?)", [(tenant, each, stored.id) for each in ids])
            self._make_room(tenant, stored.id)

    def put_events(self, tenant: str, name: str, events: list[str]) -> None:
        """Keep the stream of a response that is kept."""
        packed = zlib.compress(as_json(events).encode(), 1)
        with self._transaction() as connection:
            connection.execute(
                "UPDATE responses SET events = ?, bytes = bytes + ? WHERE tenant = ? AND id = ?",
                (packed, len(packed), tenant, name),
            )
            self._make_room(tenant, name)

    def begin_conversation(
        self, tenant: str, name: str, metadata: Mapping[str, str], items: Sequence[Item]
    ) -> StoredConversation:
        """Raises `InvalidRequest` for more items than one may have."""
        texts = texts_of(items)
        self.conversations.check_room(tenant, name, texts)
        with self._transaction():
            made = self.conversations.create(tenant, name, metadata, texts)
            self._make_room(tenant, name)
        return made

    def add_to_conversation(self, tenant: str, name: str, items: Sequence[Item], *, is_answer: bool = False) -> bool:
        """Whether it is there. is_answer: nothing is refused, since the model has said it; the next request is. Raises
        `InvalidRequest`."""
        if self.conversations.get(tenant, name) is None:
            return False
        texts = texts_of(items)
        if not is_answer:
            self.conversations.check_room(tenant, name, texts)
        with self._transaction():
            self.conversations.append(tenant, name, texts)
            self._make_room(tenant, name)
        return True

    def _make_room(self, tenant: str, kept: str) -> None:
        limits = self._limits
        count, size = self.totals(tenant)
        if count <= limits.max_stored_responses and size <= limits.max_stored_bytes:
            return
        rows = self._connection.execute(
            "SELECT kind, id, bytes FROM (SELECT 'responses' AS kind, id, bytes, created_s AS used_s FROM responses "
            "WHERE tenant = ? UNION ALL SELECT 'conversations', id, bytes, used_s FROM conversations "
            "WHERE tenant = ?) ORDER BY id = ? DESC, used_s DESC",
            (tenant, tenant, kept),
        )
        total = 0
        for number, (table, name, size) in enumerate(rows.fetchall()):
            total += size
            if number and (number >= limits.max_stored_responses or total > limits.max_stored_bytes):
                self._connection.execute(f"DELETE FROM {table} WHERE tenant = ? AND id = ?", (tenant, name))

    def get(self, tenant: str, name: str) -> Stored | None:
        row = self._connection.execute(
            "SELECT id, status, previous, body, items, events FROM responses "
            "WHERE tenant = ? AND id = ? AND created_s >= ?",
            (tenant, name, self._oldest_s()),
        ).fetchone()
        if row is None:
            return None
        name, status, previous, body, items, events = row
        told = None if events is None else json.loads(zlib.decompress(events))
        return Stored(name, status, previous, json.loads(body), json.loads(items), told)

    def chain(self, tenant: str, name: str) -> list[dict[str, Any]] | None:
        """All items of a conversation up to and with this response, its beginning first; None where a response of it is
        not there. Raises `InvalidRequest` for more of them than a request may bring."""
        parts: list[list[dict[str, Any]]] = []
        link: str | None = name
        limits, count, size, seen = self._limits, 0, 0, set[str]()
        while link is not None:
            size += self._size(tenant, link)
            if size > limits.max_body_bytes:
                raise _too_long(f"{size} bytes", limits.max_body_bytes, "max_body_bytes", "previous_response_id")
            found = self.get(tenant, link) if link not in seen else None
            if found is None:
                return None
            if found.status in RUNNING:
                raise InvalidRequest(
                    f"response {link[:100]!r} is still being made; go on from it when it is whole",
                    field="previous_response_id",
                )
            if (conversation := found.body.get("conversation")) is not None:
                raise InvalidRequest(
                    f"response {link[:100]!r} went on with the conversation {conversation['id']!r}; name that one",
                    field="previous_response_id",
                )
            seen.add(link)
            parts.append(_all_items(found))
            count += len(parts[-1])
            if count > limits.max_messages:
                raise _too_long(f"{count} items", limits.max_messages, "max_messages", "previous_response_id")
            link = found.previous
        return [item for part in reversed(parts) for item in part]

    def items(self, tenant: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The items of these ids that are kept, as the latest response has them. Raises `InvalidRequest` for more of
        them than a request may bring."""
        found: dict[str, dict[str, Any]] = {}
        wanted, size, limit = dict.fromkeys(ids), 0, self._limits.max_body_bytes
        for each in wanted:
            if each in found:
                continue
            row = self._connection.execute(
                "SELECT response FROM items JOIN responses ON responses.tenant = items.tenant AND "
                "responses.id = response WHERE items.tenant = ? AND items.id = ? ORDER BY created_s DESC LIMIT 1",
                (tenant, each),
            ).fetchone()
            alone = self.conversations.text_of_item(tenant, each) if row is None else None
            size += self._size(tenant, row[0]) if row is not None else len(alone or "")
            if size > limit:
                raise _too_long(f"{size} bytes", limit, "max_body_bytes", "input")
            if alone is not None:
                found[each] = json.loads(alone)
            stored = self.get(tenant, row[0]) if row is not None else None
            if stored is not None:
                found |= {item["id"]: item for item in _all_items(stored) if item["id"] in wanted}
        return found

    def _size(self, tenant: str, name: str) -> int:
        row = self._connection.execute("SELECT bytes FROM responses WHERE tenant = ? AND id = ?", (tenant, name))
        return next(iter(row.fetchone() or ()), 0)

    def delete(self, tenant: str, name: str) -> bool:
        """Whether it was there."""
        done = self._connection.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, name))
        return done.rowcount > 0

    def forget_old(self) -> None:
        self._connection.execute("DELETE FROM responses WHERE created_s < ?", (self._oldest_s(),))
        self._connection.execute("DELETE FROM conversations WHERE used_s < ?", (self._oldest_s(),))

    def totals(self, tenant: str | None) -> tuple[int, int]:
        """How many are kept, and their bytes. tenant: None: of all."""
        return self._connection.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM (SELECT tenant, bytes FROM responses UNION ALL "
            "SELECT tenant, bytes FROM conversations) WHERE ? IS NULL OR tenant = ?",
            (tenant, tenant),
        ).fetchone()

    def _oldest_s(self) -> float:
        return time.time() - self._limits.max_stored_age_s

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


class ResponseStore:
    """The same for an event loop: the work is done in one thread, in the order in which it is asked."""

    def __init__(self, settings: StoreSettings, port: int, limits: Limits):
        """Raises `InvalidSetting`, as `Database` does."""
        self._temporary = None
        path = settings.path(port)
        if path is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="intarsia-responses-")
            path = Path(self._temporary.name) / "responses.sqlite3"
        self._database = Database(path, limits)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._sweeping: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Forget what is too old, now and from time to time; call it once, on the loop."""
        error = {"code": "server_error", "message": "the server ended before the answer was whole"}
        await self.ask(lambda database: database.end_those_that_ran(error))
        self._sweeping = asyncio.ensure_future(self._sweep())

    async def ask(self, question: Callable[[Database], Result]) -> Result:
        """What the database says. A caller that gives up leaves the work to be done."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, question, self._database)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.ask(Database.close)
        self._thread.shutdown()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _sweep(self) -> None:
        while True:
            await self.ask(Database.forget_old)
            await asyncio.sleep(SWEEP_S)


def _state() -> Path:
    """Where programs of this user keep what is to last. Raises `InvalidSetting` for a user without a home."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    raise InvalidSetting("this user has no home folder; name a folder (--response-folder)", field="response_folder")


def _all_items(stored: Stored) -> list[dict[str, Any]]:
    """Of its input and its output."""
    return [*map(dict, stored.items), *stored.body["output"]]


def _too_long(what: str, limit: int, name: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"the responses that {field} names have {what}, and at most {limit} may be ({name}); begin anew",
        field=field,
        limit=limit,
    )
