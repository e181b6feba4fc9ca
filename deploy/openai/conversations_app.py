"""The routes of `/v1/conversations`, where responses are kept."""

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import FastAPI, Query
from fastapi.responses import Response

from ..front_end.front_end import FrontEnd
from .answering import ERRORS
from .answers import json_response
from .conversation_bodies import (
    ConversationBody,
    ConversationChange,
    ConversationDeleted,
    NewConversation,
    NewItems,
)
from .kept_conversations import KeptConversations
from .pages import MOST_ITEMS, page_of
from .protocol import ResponseItems
from .stored_conversations import StoredConversation

PATH = "/v1/conversations/{conversation_id}"


def add_conversations(app: FastAPI, front_end: Callable[[], FrontEnd], kept: KeptConversations) -> None:
    @app.post(
        "/v1/conversations", response_model=ConversationBody, responses=ERRORS, operation_id="create_conversation"
    )
    async def create_conversation(body: NewConversation) -> ConversationBody:
        return _shown(await kept.create(body.items or (), body.metadata or {}))

    @app.get(PATH, response_model=ConversationBody, responses=ERRORS, operation_id="get_conversation")
    async def get_conversation(conversation_id: str) -> ConversationBody:
        return _shown(await kept.get(conversation_id))

    @app.post(PATH, response_model=ConversationBody, responses=ERRORS, operation_id="update_conversation")
    async def update_conversation(conversation_id: str, body: ConversationChange) -> ConversationBody:
        return _shown(await kept.change(conversation_id, body.metadata or {}))

    @app.delete(PATH, response_model=ConversationDeleted, responses=ERRORS, operation_id="delete_conversation")
    async def delete_conversation(conversation_id: str) -> ConversationDeleted:
        await kept.delete(conversation_id)
        return ConversationDeleted(id=conversation_id)

    @app.post(f"{PATH}/items", response_model=ResponseItems, responses=ERRORS, operation_id="create_conversation_items")
    async def create_items(conversation_id: str, body: NewItems) -> Response:
        items = await kept.add(conversation_id, body.items)
        return await json_response(front_end(), page_of(items, None, len(items)))

    @app.get(f"{PATH}/items", response_model=ResponseItems, responses=ERRORS, operation_id="list_conversation_items")
    async def list_items(
        conversation_id: str,
        after: Annotated[str | None, Query(description="The id of the item before.")] = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        items = await kept.items(conversation_id)
        return await json_response(front_end(), page_of(items if order == "asc" else items[::-1], after, limit))

    @app.get(f"{PATH}/items/{{item_id}}", responses=ERRORS, operation_id="get_conversation_item")
    async def get_item(conversation_id: str, item_id: str) -> Response:
        return await json_response(front_end(), await kept.item(conversation_id, item_id))

    @app.delete(
        f"{PATH}/items/{{item_id}}",
        response_model=ConversationBody,
        responses=ERRORS,
        operation_id="delete_conversation_item",
    )
    async def delete_item(conversation_id: str, item_id: str) -> ConversationBody:
        return _shown(await kept.delete_item(conversation_id, item_id))


def _shown(conversation: StoredConversation) -> ConversationBody:
    return ConversationBody(id=conversation.id, created_at=int(conversation.created_s), metadata=conversation.metadata)
