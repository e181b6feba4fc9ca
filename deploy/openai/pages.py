"""Lists of items, a page at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequest
from .protocol import ResponseItems

MOST_ITEMS = 100
"""Of one page."""


def page_of(items: Sequence[Mapping[str, Any]], after: str | None, limit: int) -> ResponseItems:
    """Those behind the item of the id `after`. Raises `InvalidRequest` where there is none."""
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"no item has the id '{after[:100]}'", field="after")
        start = places[0] + 1
    data = [dict(item) for item in items[start : start + limit]]
    return ResponseItems(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=start + limit < len(items),
    )
