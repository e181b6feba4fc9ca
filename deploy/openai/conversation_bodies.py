"""What requests and answers of `/v1/conversations` look like. Names and ranges are OpenAI's."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from .protocol import InputItem, Tolerant

MOST_ITEMS_AT_ONCE = 20

Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]


class NewConversation(Tolerant):
    items: Annotated[list[InputItem], Field(fail_fast=True, max_length=MOST_ITEMS_AT_ONCE)] | None = None
    metadata: Metadata | None = None


class ConversationChange(Tolerant):
    metadata: Metadata | None


class NewItems(Tolerant):
    items: Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MOST_ITEMS_AT_ONCE)]


class ConversationBody(BaseModel):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, Any]


class ConversationDeleted(BaseModel):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
