"""Which prefix of a prompt is in the cache: block hashes, and the longest length from which every group can go on."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from .plan import Group

HASH_BYTES = 16


def chain_hashes(
    tokens: Sequence[int], block_tokens: int, *, key: bytes, known: Sequence[bytes] = (), salt: bytes = b""
) -> list[bytes]:
    """One hash per full block of `tokens`, each of the block and of all before it.

    key    secret of the cluster, so that nobody outside can craft a collision
    known  hashes of the first blocks, which are then not computed again
    salt   of the caller: prompts of different salts never share a block
    """
    hashes = list(known)
    keyed = blake2b(digest_size=HASH_BYTES, key=key)  # copying it is cheaper than keying anew for every block
    # The chain starts from a hash of the salt, so that every link has the same size and none can pose as another.
    parent = hashes[-1] if hashes else blake2b(salt, digest_size=HASH_BYTES, key=key).digest()
    first, end = len(hashes) * block_tokens, len(tokens) // block_tokens * block_tokens
    packed = array("i", tokens[first:end]).tobytes()
    block_bytes = block_tokens * array("i").itemsize
    for start in range(0, len(packed), block_bytes):
        link = keyed.copy()
        link.update(parent + packed[start : start + block_bytes])
        parent = link.digest()
        hashes.append(parent)
    return hashes


def longest_hit(groups: Sequence[Group], cached: Sequence[Sequence[bool]], block_tokens: int) -> int:
    """Longest prefix, in blocks, from which every group can continue.

    `cached[g][n]`: is block n of the prefix cached for group g? At a prefix of n blocks a group reads, at most, the
    blocks from that of its oldest needed token on; those before may be gone.

        blocks of 4, window 8:    . . # # | ?      a hit: the next token sees 7 earlier ones, all in the last two
        full attention:           . . # # | ?      no hit: everything is needed
    """
    runs = [_run_lengths(row) for row in cached]
    n = len(cached[0])
    while n > 0:
        # A group that lacks a block it reads at n can not go on at any length from there down to that block: shorter
        # prefixes of that range still read it, since the oldest needed token never moves forward as they shrink.
        oldest = [group.reach.oldest_needed(n * block_tokens) // block_tokens for group in groups]
        lacking = [n - 1 - run[n] for run in runs]  # the last block before n that is not cached; -1: none
        shorter = min((m for m, first in zip(lacking, oldest, strict=True) if m >= first), default=n)
        if shorter == n:
            return n
        n = shorter
    return 0


def _run_lengths(cached: Sequence[bool]) -> list[int]:
    """`run[n]`: how many cached blocks in a row end at block n (exclusive)."""
    run = [0]
    for is_cached in cached:
        run.append(run[-1] + 1 if is_cached else 0)
    return run
