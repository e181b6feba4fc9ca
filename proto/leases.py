"""What is told of a lease: that a conversation's cache is kept for some time after an answer."""

from typing import NamedTuple

OFF = "off"  # the operator gives leases no share of the cache
NOTHING = "nothing"  # is cached: no prefix caching, or less than a block
TOO_LONG = "too_long"  # more seconds than the operator allows
NO_ROOM = "no_room"  # beside the leases of all tenants
OVER_SHARE = "over_share"  # of the tenant
TOO_MANY = "too_many"  # leases, of all tenants

REFUSALS = (OFF, NOTHING, TOO_LONG, NO_ROOM, OVER_SHARE, TOO_MANY)
"""Why a lease is refused."""


class LeasedLayers(NamedTuple):
    """What is held of one group of layers."""

    kind: str  # as in `GroupInfo`
    blocks: int
    bytes: int  # on each worker


class LeaseReceipt(NamedTuple):
    """What became of the wish to keep a conversation's cache. Pages are large pages of the pool."""

    id: str = ""  # empty: it is refused
    refused: str = ""  # why, one of `REFUSALS`
    tokens: int = 0  # of the conversation, that are held or were to be
    until_s: float = 0.0  # seconds of Unix time; of a refusal 0
    pages: int = 0  # that it lies in, or would
    bytes: int = 0  # of them, on each worker
    layers: tuple[LeasedLayers, ...] = ()
    used_pages: int = 0  # by all leases of the tenant, this one among them if it is granted
    left_pages: int = 0  # of the tenant's share; where there is no room beside the leases of others, of that
    limit_pages: int = 0  # of the tenant's leases
    pool_pages: int = 0  # all of the pool
    longest_s: float = 0.0  # that a lease may last


class Lease(NamedTuple):
    """One that is held now."""

    receipt: LeaseReceipt
    tenant: str
    is_awaited: bool  # a request is here that goes on with the conversation: it lasts until that has its answer


class LeaseCounts(NamedTuple):
    """Leases since the start, by what became of them, and what is held."""

    granted: int = 0
    refused: int = 0
    taken_over: int = 0  # by the next turn
    expired: int = 0
    released: int = 0  # by hand
    lost: int = 0  # with all that was cached
    held: int = 0  # now
    held_pages: int = 0
    limit_pages: int = 0  # of all tenants


NO_LEASES = LeaseCounts()
