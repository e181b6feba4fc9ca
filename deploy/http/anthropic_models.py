"""Lists of models in Anthropic's shape."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def card_of(model: str, created_s: int, max_model_len: int) -> dict[str, Any]:
    """created_s: when it was first served, in seconds since 1970."""
    created_at = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": model,
        "display_name": model,
        "created_at": created_at,
        "max_input_tokens": max_model_len - 1,
        "max_tokens": max_model_len - 1,
    }


def list_of(cards: Sequence[dict[str, Any]], limit: int, after: str | None, before: str | None) -> dict[str, Any]:
    """A page: of at most `limit` cards, those after the one of this id, or just before another."""
    ids = [card["id"] for card in cards]
    first = ids.index(after) + 1 if after is not None else 0
    end = ids.index(before) if before is not None else len(ids)
    if before is not None and after is None:
        first = max(0, end - limit)
    page = list(cards[first : min(end, first + limit)])
    has_more = first > 0 if before is not None and after is None else first + len(page) < end
    return {
        "data": page,
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
