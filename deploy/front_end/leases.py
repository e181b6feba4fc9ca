"""Leases that clients hold, and what became of the wish for one, in words for those who asked and for operators."""

from collections.abc import Callable, Mapping
from typing import Any

from ...proto import leases as reasons
from ...proto.leases import Lease, LeaseReceipt
from ...proto.request import MAX_LEASE_CHARS
from .access import VIEWER
from .engine_client import EngineClient


class Leases:
    """Of what the caller may see: a tenant's own, at whichever engine they are. Raises `EngineUnavailable`."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineClient]]):
        """engines: all that requests are sent to."""
        self._engines = engines

    async def held(self) -> list[Lease]:
        found = [await engine.questions.leases(VIEWER.get()) for engine in self._engines().values()]
        return [lease for each in found for lease in each]

    async def release(self, lease: str) -> bool:
        """End one before its time. False if there is none of that id."""
        for engine in self._engines().values():
            if await engine.questions.release_lease(lease[:MAX_LEASE_CHARS], VIEWER.get()):
                return True
        return False


def why_refused(receipt: LeaseReceipt) -> str:
    """A sentence with the numbers: what was asked, what there is, what to do."""
    asked = f"{receipt.tokens} tokens lie in {receipt.pages} large pages"
    left = f"{receipt.left_pages} of {receipt.limit_pages} that the tenant may lease are left"
    return {
        reasons.OFF: "leases are off here; the server gives them memory with --lease-share",
        reasons.NOTHING: "nothing of the conversation is cached; it must have a block of tokens at least",
        reasons.TOO_LONG: f"a lease lasts {receipt.longest_s:g} s at most here (--max-lease-s); ask for less",
        reasons.NO_ROOM: f"{asked}; {left}, beside the leases of others. Release one, or ask again later",
        reasons.OVER_SHARE: f"{asked}; {left}. Release one, or wait until one ends",
        reasons.TOO_MANY: "as many conversations are leased as may be; release one, or wait until one ends",
    }[receipt.refused]


def told(receipt: LeaseReceipt) -> dict[str, Any]:
    """As an answer's usage has it. Shares are of the whole pool."""
    pool = max(1, receipt.pool_pages)
    about = {
        "tokens": receipt.tokens,
        "pages": receipt.pages,
        "bytes": receipt.bytes,
        "layers": [layers._asdict() for layers in receipt.layers],
        "share": {
            "used": round(receipt.used_pages / pool, 6),
            "left": round(receipt.left_pages / pool, 6),
            "limit": round(receipt.limit_pages / pool, 6),
            "left_pages": receipt.left_pages,
        },
    }
    if receipt.id:
        return {"granted": True, "id": receipt.id, "until": round(receipt.until_s, 3), **about}
    return {"granted": False, "reason": receipt.refused, "message": why_refused(receipt), **about}


def brief(receipt: LeaseReceipt) -> str:
    """As the request log has it."""
    return f"{receipt.tokens}:{receipt.pages}" if receipt.id else receipt.refused
