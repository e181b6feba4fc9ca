"""The textbook rule to compare with: one LRU cache of blocks under full attention, tail of a request evicted first."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from .traces import TraceRequest


class LruResult(NamedTuple):
    hit_blocks: int
    evictions: int


def replay_lru(requests: Iterable[TraceRequest], blocks: int | None, *, full_blocks_only: bool) -> LruResult:
    """Hits and evictions of `blocks` blocks (None: any number) over requests with block ids.

    full_blocks_only: what an engine can do: a partly filled block is not cached, and the last token is computed anew.

    A hit is the longest cached prefix. Then all cached blocks of the request are touched, and from tail to head each is
    moved to the end or inserted there; a request longer than the cache keeps its first blocks.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = evictions = 0
    for request in requests:
        ids, limit = request.ids, len(request.ids)
        # An engine caches full blocks only, and computes the last token anew.
        if full_blocks_only:
            ids = ids[: request.length // request.block_tokens]
            limit = min(len(ids), (request.length - 1) // request.block_tokens)
        # The hit is the longest cached prefix.
        hit = 0
        while hit < limit and ids[hit] in cache:
            hit += 1
        hits += hit
        # Cached blocks of the request are touched before anything is evicted.
        for block in ids:
            if block in cache:
                cache.move_to_end(block)
        # Blocks enter from tail to head, so that the head is evicted last.
        for block in reversed(ids if blocks is None else ids[:blocks]):
            if block in cache:
                cache.move_to_end(block)
                continue
            if blocks is not None and len(cache) >= blocks:
                cache.popitem(last=False)
                evictions += 1
            cache[block] = None
    return LruResult(hits, evictions)
