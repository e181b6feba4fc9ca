"""Leases as answers of all interfaces over HTTP show them: our own words, since no other interface has such."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class LeasedLayersBody(BaseModel):
    """What is held of one kind of layers."""

    kind: str
    blocks: int
    bytes: int


class LeaseShare(BaseModel):
    """Of the whole cache: what the tenant's leases hold, what it could still lease, and what it may in all."""

    used: float
    left: float
    limit: float
    left_pages: int


class LeaseBody(BaseModel):
    """What became of `keep_s`: what is held until when, or why nothing is, with what was asked and what is left."""

    granted: bool
    id: str | None = Field(None, description="By which it is released; none if it is refused.")
    until: float | None = Field(None, description="Seconds of Unix time.")
    reason: str | None = Field(None, description="Why it is refused, in a word.")
    message: str | None = Field(None, description="The same for people.")
    tokens: int = Field(description="Of the conversation, which the next turn finds.")
    pages: int = Field(description="Large pages of the cache that they lie in.")
    bytes: int = Field(description="Of these, on each worker.")
    layers: list[LeasedLayersBody]
    share: LeaseShare


OfLease = Annotated[
    LeaseBody | None, Field(description="What became of `keep_s`.", exclude_if=lambda lease: lease is None)
]
"""In the usage of an answer; it is not there where none was asked for."""


class HeldLease(LeaseBody):
    object: Literal["lease"] = "lease"
    tenant: str
    is_awaited: bool = Field(description="Its next turn is here: it lasts until that has its answer.")


class LeaseList(BaseModel):
    object: Literal["list"] = "list"
    data: list[HeldLease]


class LeaseReleased(BaseModel):
    object: Literal["lease.released"] = "lease.released"
    id: str
    released: bool = True
