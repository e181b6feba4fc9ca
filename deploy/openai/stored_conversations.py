"""Conversations that are kept on disk: items in their order, to which responses add their own.

They lie in the file of the responses, and share their tenant's room with them: see `stored.py`.
"""

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import InvalidRequest
from ..settings.limits import Limits
from .answers import as_json

TABLES = """
CREATE TABLE IF NOT EXISTS conversations (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    created_s REAL NOT NULL,
    used_s REAL NOT NULL,
    metadata TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conversation_items (
    tenant TEXT NOT NULL,
    conversation TEXT NOT NULL,
    place INTEGER NOT NULL,
    id TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (tenant, conversation, place),
    FOREIGN KEY (tenant, conversation) REFERENCES conversations ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS conversation_items_by_id ON conversation_items (tenant, id);
"""

Item = Mapping[str, Any]

Texts = Sequence[tuple[str, str]]
"""Items as they are kept: the id and the JSON of each."""


def texts_of(items: Sequence[Item]) -> Texts:
    return [(item["id"], as_json(item)) for item in items]


class StoredConversation(NamedTuple):
    """One without its items."""

    id: str
    created_s: float
    metadata: dict[str, str]


class Conversations:
    """Those in one file. Each question names the tenant, and finds nothing of another's."""

    def __init__(self, connection: sqlite3.Connection, limits: Limits):
        self._connection = connection
        self._limits = limits

    def create(self, tenant: str, name: str, metadata: Mapping[str, str], items: Texts) -> StoredConversation:
        now_s, text = time.time(), as_json(metadata)
        self._connection.execute(
            "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)",
            (tenant, name, now_s, now_s, text, len(text.encode())),
        )
        self.append(tenant, name, items)
        return StoredConversation(name, now_s, dict(metadata))

    def get(self, tenant: str, name: str) -> StoredConversation | None:
        row = self._connection.execute(
            "SELECT created_s, metadata FROM conversations WHERE tenant = ? AND id = ? AND used_s >= ?",
            (tenant, name, time.time() - self._limits.max_stored_age_s),
        ).fetchone()
        return None if row is None else StoredConversation(name, row[0], json.loads(row[1]))

    def set_metadata(self, tenant: str, name: str, metadata: Mapping[str, str]) -> None:
        text = as_json(metadata)
        self._connection.execute(
            "UPDATE conversations SET bytes = bytes + ? - length(CAST(metadata AS BLOB)), metadata = ? "
            "WHERE tenant = ? AND id = ?",
            (len(text.encode()), text, tenant, name),
        )

    def append(self, tenant: str, name: str, items: Texts) -> None:
        """At its end. It is the latest that was used."""
        [(last,)] = self._connection.execute(
            "SELECT coalesce(max(place), -1) FROM conversation_items WHERE tenant = ? AND conversation = ?",
            (tenant, name),
        )
        self._connection.execute(
            "UPDATE conversations SET used_s = ?, bytes = bytes + ? WHERE tenant = ? AND id = ?",
            (time.time(), sum(len(text.encode()) for _, text in items), tenant, name),
        )
        self._connection.executemany(
            "INSERT INTO conversation_items VALUES (?, ?, ?, ?, ?)",
            [(tenant, name, place, each, text) for place, (each, text) in enumerate(items, last + 1)],
        )

    def items(self, tenant: str, name: str) -> list[dict[str, Any]] | None:
        """All of them, in their order; None where there is no such conversation."""
        if self.get(tenant, name) is None:
            return None
        rows = self._connection.execute(
            "SELECT body FROM conversation_items WHERE tenant = ? AND conversation = ? ORDER BY place", (tenant, name)
        )
        return [json.loads(body) for (body,) in rows.fetchall()]

    def check_room(self, tenant: str, name: str, more: Texts = ()) -> None:
        """Raises `InvalidRequest` for more than a request may bring. more: what is to be added"""
        row = self._connection.execute(
            "SELECT bytes, (SELECT count(*) FROM conversation_items WHERE tenant = ? AND conversation = ?) "
            "FROM conversations WHERE tenant = ? AND id = ?",
            (tenant, name, tenant, name),
        ).fetchone()
        size, count = row or (0, 0)
        size += sum(len(text.encode()) for _, text in more)
        for what, found, limit, setting in (
            ("items", count + len(more), self._limits.max_messages, "max_messages"),
            ("bytes", size, self._limits.max_body_bytes, "max_body_bytes"),
        ):
            if found > limit:
                raise InvalidRequest(
                    f"the conversation has {found} {what}, and at most {limit} may be ({setting}); begin a new one",
                    field="conversation",
                    limit=limit,
                )

    def text_of_item(self, tenant: str, id_: str) -> str | None:
        """JSON of an item of any conversation."""
        rows = self._connection.execute(
            "SELECT conversation, body FROM conversation_items WHERE tenant = ? AND id = ?", (tenant, id_)
        )
        return next((body for name, body in rows if self.get(tenant, name) is not None), None)

    def delete_item(self, tenant: str, name: str, item: str) -> bool:
        """Whether it was there."""
        where = "WHERE tenant = ? AND conversation = ? AND id = ?", (tenant, name, item)
        [(size,)] = self._connection.execute(
            f"SELECT sum(length(CAST(body AS BLOB))) FROM conversation_items {where[0]}", where[1]
        )
        if size is None:
            return False
        self._connection.execute(f"DELETE FROM conversation_items {where[0]}", where[1])
        self._connection.execute(
            "UPDATE conversations SET bytes = bytes - ? WHERE tenant = ? AND id = ?", (size, tenant, name)
        )
        return True

    def delete(self, tenant: str, name: str) -> bool:
        """Whether it was there."""
        done = self._connection.execute("DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, name))
        return done.rowcount > 0
