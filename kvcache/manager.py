"""Which blocks each request holds, for all groups of layers at once.

The life of a request here, in five verbs:

    hit = manager.lookup(tokens)                 # ask: how much of this prompt is cached?
    manager.open(request, hit)                   # take those blocks up
    manager.extend(request, length)              # before a step: blocks for all tokens up to `length`
    manager.commit(request, tokens, length)      # after it: tokens up to `length` are in the cache; name, give back
    manager.release(request)                     # finished or preempted: give everything back

Asking changes nothing. `extend` is all or nothing. No torch, no Ray: a test, a simulator and the engine call the same
class.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, NewType

from .plan import NULL_BLOCK, MemoryPlan
from .pool import BlockId, BlockKey, BlockPool
from .prefix import chain_hashes, longest_hit
from .reach import NEVER

RequestId = NewType("RequestId", int)

NULL = BlockId(NULL_BLOCK)


class Hit(NamedTuple):
    """A cached prefix. Good until the pool changes, so `open` it at once."""

    tokens: int
    blocks: tuple[tuple[BlockId, ...], ...]  # [group][block of the prefix]; null where the group needs none
    hashes: tuple[bytes, ...]  # of every full block of the prompt, so that they are computed once
    salt: bytes


class _Row:
    """What one request holds. Invariant: in each group, the blocks from `first` on are held, those before are null.

    Below `quiet_until` tokens nothing happens to the row: no group needs a block, none can give one back, and no block
    becomes full. A decode step below it costs one comparison.
    """

    __slots__ = ("blocks", "first", "hashes", "named_blocks", "quiet_until", "salt")

    def __init__(self, hit: Hit, groups: int):
        self.blocks: list[list[BlockId]] = (
            [list(row) for row in hit.blocks] if hit.tokens else [[] for _ in range(groups)]
        )
        self.first: list[int] = [sum(block == NULL for block in row) for row in self.blocks]
        self.hashes: list[bytes] = list(hit.hashes)
        self.named_blocks = min((len(row) for row in self.blocks), default=0)
        self.salt = hit.salt
        self.quiet_until = 0


class CacheManager:
    """The block tables of all open requests, over one `BlockPool`. Single-threaded."""

    def __init__(self, plan: MemoryPlan, *, prefix_caching: bool = True, hash_key: bytes | None = None):
        """hash_key: secret that keys the prefix hashes; drawn when None."""
        self.plan = plan
        self.pool = BlockPool(plan.num_blocks)
        self._groups = plan.groups
        self._block_tokens = plan.block_tokens
        self._prefix_caching = prefix_caching
        self._hash_key = hash_key or secrets.token_bytes(32)
        self._rows: dict[RequestId, _Row] = {}
        self._nothing: list[list[BlockId]] = [[] for _ in plan.groups]

    # -- asking ------------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Sequence[int], salt: bytes = b"") -> Hit:
        """The longest cached prefix of `tokens` from which every group can continue.

        At least the last token is left to compute: its logits are what the caller is after.
        """
        if not self._prefix_caching:
            return Hit(0, (), (), salt)
        size = self._block_tokens
        hashes = tuple(chain_hashes(tokens, size, key=self._hash_key, salt=salt))
        limit_blocks = (len(tokens) - 1) // size
        found = [
            [self.pool.find(BlockKey(g, prefix_hash)) for prefix_hash in hashes[:limit_blocks]]
            for g in range(len(self._groups))
        ]
        hit_blocks = longest_hit(self._groups, [[block is not None for block in row] for row in found], size)
        rows = []
        for group, row in zip(self._groups, found, strict=True):
            first = min(group.reach.oldest_needed(hit_blocks * size) // size, hit_blocks)
            rows.append(tuple(NULL if n < first else row[n] or NULL for n in range(hit_blocks)))
        return Hit(hit_blocks * size, tuple(rows), hashes, salt)

    def fits(self, length: int) -> bool:
        """Could a request grow to `length` tokens if it had the pool to itself?"""
        return self.plan.blocks_alone(length) <= self.plan.usable_blocks

    def table(self, request: RequestId) -> list[list[BlockId]]:
        """The blocks of a request, [group][block of the sequence]; null where they were given back."""
        return [list(row) for row in self._rows[request].blocks]

    @property
    def num_open(self) -> int:
        return len(self._rows)

    # -- acting ------------------------------------------------------------------------------------------------------

    def open(self, request: RequestId, hit: Hit) -> None:
        """Begin a request that holds the blocks of `hit`."""
        assert request not in self._rows, f"request {request} is open already"
        for row in hit.blocks:
            self.pool.share(block for block in row if block != NULL)
        self._rows[request] = _Row(hit, len(self._groups))

    def extend(self, request: RequestId, length: int) -> list[list[BlockId]]:
        """Blocks for all tokens up to `length`: the new ones per group.

        Raises `PoolExhausted`, with nothing taken, when the pool has too few.
        """
        row = self._rows[request]
        if length < row.quiet_until:
            return self._nothing
        rows = row.blocks
        wanted_blocks = -(-length // self._block_tokens)
        missing = [max(0, wanted_blocks - len(row)) for row in rows]
        taken = iter(self.pool.take(sum(missing)))
        new = [[next(taken) for _ in range(count)] for count in missing]
        for held, blocks in zip(rows, new, strict=True):
            held.extend(blocks)
        return new

    def commit(self, request: RequestId, tokens: Sequence[int], length: int) -> None:
        """A step has run: keys and values of `tokens[:length]` are written.

        Full blocks get their name in the prefix cache; blocks that no later token reads go back to the pool.
        """
        row = self._rows[request]
        if length < row.quiet_until:
            return
        if self._prefix_caching:
            self._name_full_blocks(row, tokens, length)
        for g, group in enumerate(self._groups):
            first = min(group.reach.oldest_needed(length) // self._block_tokens, len(row.blocks[g]))
            assert first >= row.first[g], f"request {request}: the window of group {g} moved back at length {length}"
            self.pool.give_back(row.blocks[g][row.first[g] : first])
            row.blocks[g][row.first[g] : first] = [NULL] * (first - row.first[g])
            row.first[g] = first
        row.quiet_until = self._next_event(row)

    def release(self, request: RequestId) -> None:
        """Give back all blocks. The front of a sequence outlives its tail in the cache: it is the likelier prefix."""
        row = self._rows.pop(request)
        for blocks, first in zip(row.blocks, row.first, strict=True):
            self.pool.give_back(reversed(blocks[first:]))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Open requests keep their blocks."""
        self.pool.forget_all()

    def _next_event(self, row: _Row) -> int:
        """The length at which a row next needs a block, can give one back, or has a full block to name."""
        size = self._block_tokens
        next_full = (row.named_blocks + 1) * size if self._prefix_caching else NEVER
        next_missing = len(row.blocks[0]) * size + 1
        next_passed = min(
            group.reach.passed_at((first + 1) * size - 1) for group, first in zip(self._groups, row.first, strict=True)
        )
        return min(next_full, next_missing, next_passed)

    def _name_full_blocks(self, row: _Row, tokens: Sequence[int], length: int) -> None:
        full_blocks = length // self._block_tokens
        if full_blocks <= row.named_blocks:
            return
        if full_blocks > len(row.hashes):
            row.hashes = chain_hashes(
                tokens[: full_blocks * self._block_tokens],
                self._block_tokens,
                key=self._hash_key,
                known=row.hashes,
                salt=row.salt,
            )
        for g, blocks in enumerate(row.blocks):
            for n in range(max(row.named_blocks, row.first[g]), full_blocks):
                self.pool.name(blocks[n], BlockKey(g, row.hashes[n]))
        row.named_blocks = full_blocks

    # -- for check.py ------------------------------------------------------------------------------------------------

    def held(self) -> Counter[BlockId]:
        """How often the tables name each block."""
        return Counter(
            block for row in self._rows.values() for blocks in row.blocks for block in blocks if block != NULL
        )
