"""Conversations that are kept: a response goes on with the items of one, and adds what it was asked and answered."""

import logging
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from ...errors import InvalidRequest, UnknownResponse
from ..front_end.access import TENANT
from ..front_end.front_end import FEW_VALUES, FrontEnd
from ..front_end.json_pieces import size_of
from .protocol import InputItem, ItemReference
from .responses import kept_items
from .stored import ResponseStore
from .stored_conversations import StoredConversation

logger = logging.getLogger(__name__)

ITEMS = TypeAdapter(list[InputItem])

Item = Mapping[str, Any]


class KeptConversations:
    """Of one server. A tenant finds its own ones alone; whatever names another raises `UnknownResponse`."""

    def __init__(self, store: ResponseStore):
        self._store = store

    async def create(self, items: Sequence[InputItem], metadata: Mapping[str, str]) -> StoredConversation:
        """Raises `InvalidRequest` for more items than a request may bring."""
        tenant, name, kept = TENANT.get(), f"conv_{uuid.uuid4().hex}", _own(items)
        return await self._store.ask(lambda database: database.begin_conversation(tenant, name, metadata, kept))

    async def get(self, name: str) -> StoredConversation:
        tenant = TENANT.get()
        found = await self._store.ask(lambda database: database.conversations.get(tenant, name))
        if found is None:
            raise _unknown(name)
        return found

    async def change(self, name: str, metadata: Mapping[str, str]) -> StoredConversation:
        tenant, found = TENANT.get(), await self.get(name)
        await self._store.ask(lambda database: database.conversations.set_metadata(tenant, name, metadata))
        return found._replace(metadata=dict(metadata))

    async def delete(self, name: str) -> None:
        tenant = TENANT.get()
        if not await self._store.ask(lambda database: database.conversations.delete(tenant, name)):
            raise _unknown(name)

    # -- items ---------------------------------------------------------------------------------------------------------

    async def add(self, name: str, items: Sequence[InputItem]) -> Sequence[Item]:
        """As they are kept. Raises `InvalidRequest` for more of them than one may have."""
        tenant, kept = TENANT.get(), _own(items)
        if not await self._store.ask(lambda database: database.add_to_conversation(tenant, name, kept)):
            raise _unknown(name)
        return kept

    async def items(self, name: str) -> list[dict[str, Any]]:
        tenant = TENANT.get()
        found = await self._store.ask(lambda database: database.conversations.items(tenant, name))
        if found is None:
            raise _unknown(name)
        return found

    async def item(self, name: str, id_: str) -> dict[str, Any]:
        found = next((item for item in await self.items(name) if item["id"] == id_), None)
        if found is None:
            raise _unknown_item(id_)
        return found

    async def delete_item(self, name: str, id_: str) -> StoredConversation:
        tenant, found = TENANT.get(), await self.get(name)
        if not await self._store.ask(lambda database: database.conversations.delete_item(tenant, name, id_)):
            raise _unknown_item(id_)
        return found

    # -- a response ----------------------------------------------------------------------------------------------------

    async def history(self, front_end: FrontEnd, name: str) -> list[InputItem]:
        """What a response goes on from. Raises `InvalidRequest` for more of it than a request may bring."""
        tenant = TENANT.get()
        await self._store.ask(lambda database: database.conversations.check_room(tenant, name))
        items = await self.items(name)
        return await front_end.aside(size_of(items, FEW_VALUES), lambda: ITEMS.validate_python(items))

    async def answered(self, tenant: str, name: str, items: Sequence[Item]) -> None:
        """What was asked, and what came of it. Of a conversation that was deleted meanwhile, nothing is kept. A disk
        that is full is no reason to lose an answer."""
        try:
            await self._store.ask(lambda database: database.add_to_conversation(tenant, name, items, is_answer=True))
        except sqlite3.Error as error:
            logger.warning("an answer could not be added to its conversation: %s", error)


def _own(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """As they are kept. Raises `InvalidRequest` for references, which belong to requests."""
    if any(isinstance(item, ItemReference) for item in items):
        raise InvalidRequest("a conversation has items of its own; send the item itself", field="items")
    return kept_items(items)


def _unknown(name: str) -> UnknownResponse:
    return UnknownResponse(f"Conversation with id '{name[:100]}' not found.", field="conversation_id")


def _unknown_item(id_: str) -> UnknownResponse:
    return UnknownResponse(f"Item with id '{id_[:100]}' not found.", field="item_id")
