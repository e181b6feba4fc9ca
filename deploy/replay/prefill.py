"""A chunk of prefill, as long as it can be."""

from ...errors import PoolExhausted
from ...kvcache.ids import RequestId
from ...kvcache.manager import CacheManager


def extend_by_chunk(manager: CacheManager, request: RequestId, length: int, written: int) -> int:
    """Blocks for a chunk that ends at `length`, or earlier: where that is wise, or where room ends.

    Returns the length reached. Raises `PoolExhausted`, with nothing taken, when there is no room for one token.
    """
    length = manager.chunk_end(request, length)
    try:
        manager.extend(request, length, written)
    except PoolExhausted:
        length = manager.room_to_grow(request, length)
        if length <= written:
            raise
        manager.extend(request, length, written)
    return length
