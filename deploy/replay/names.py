"""Names of the blocks of a trace's prompts."""

import itertools

from .traces import TraceRequest


def block_names(request: TraceRequest, size: int) -> list[bytes]:
    """Names of the full blocks: an id fixes all tokens up to the end of its block, so it names every part of it."""
    parts = request.block_tokens // size if size < request.block_tokens else 1
    joined = size // request.block_tokens if size > request.block_tokens else 1
    full = request.length // size
    if parts > 1:
        pairs = ((block, part) for block in request.ids for part in range(parts))
        return [_name(block, part) for block, part in itertools.islice(pairs, full)]
    return [_name(block, 0) for block in request.ids[joined - 1 :: joined][:full]]


def _name(block: int, part: int) -> bytes:
    return block.to_bytes(16, "big", signed=True) + part.to_bytes(4, "big")
