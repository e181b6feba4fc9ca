"""The block pool: who holds which block, and which free blocks still carry a known prefix."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, NewType

from ..errors import PoolExhausted
from .plan import NULL_BLOCK

BlockId = NewType("BlockId", int)


class BlockKey(NamedTuple):
    """What a full block holds: the tokens behind `prefix_hash`, as the layers of one group see them."""

    group: int
    prefix_hash: bytes


class BlockPool:
    """All blocks of one engine. Single-threaded.

    Every block but the null block is in exactly one of three states:

        blank      free, nothing worth keeping in it
        kept       free, but its tokens are known by key: a later request may take it up again
        held       in use by `holders(block)` requests, with or without a key

    Blank blocks are dealt out first, then kept ones, least recently released first; only then is a key forgotten.
    """

    def __init__(self, num_blocks: int):
        """num_blocks: the null block included."""
        self.num_blocks = num_blocks
        self._blank: list[BlockId] = [BlockId(b) for b in range(num_blocks - 1, NULL_BLOCK, -1)]
        self._kept: OrderedDict[BlockId, None] = OrderedDict()
        self._holders: list[int] = [0] * num_blocks
        self._key_of: dict[BlockId, BlockKey] = {}
        self._block_of: dict[BlockKey, BlockId] = {}
        self.evictions = 0

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def holders(self, block: BlockId) -> int:
        return self._holders[block]

    def find(self, key: BlockKey) -> BlockId | None:
        """The block that holds these tokens, free or not."""
        return self._block_of.get(key)

    # -- acting ------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[BlockId]:
        """`count` free blocks, each held once. All or nothing: raises `PoolExhausted` and takes none."""
        if count > self.num_free:
            raise PoolExhausted(
                f"{count} blocks are wanted; the pool has {len(self._blank)} blank + {len(self._kept)} kept free ones "
                f"of {self.num_blocks - 1}. Preempt a request, lower max_num_seqs, or give the pool more memory.",
                asked=count,
                free=self.num_free,
                total=self.num_blocks - 1,
            )
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more holder for each of `blocks`, which are held or kept."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._kept[block]
            self._holders[block] += 1

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        """One holder less for each of `blocks`. Those given back last are evicted last."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} was given back twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def name(self, block: BlockId, key: BlockKey) -> None:
        """Remember what a held block holds. The first block of a key stays the known one."""
        assert self._holders[block] > 0, f"block {block} is free and can not be named"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget_all(self) -> None:
        """Drop every key: kept blocks become blank, held ones lose their name."""
        self._blank.extend(self._kept)
        self._kept.clear()
        self._key_of.clear()
        self._block_of.clear()

    def _evict(self) -> BlockId:
        block, _ = self._kept.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self.evictions += 1
        return block

    # -- for check.py ------------------------------------------------------------------------------------------------

    def faults(self, held: Counter[BlockId]) -> list[str]:
        """What contradicts the invariant above, given how often the tables name each block. Empty: all is well."""
        found = []
        for block in map(BlockId, range(1, self.num_blocks)):
            if self._holders[block] != held[block]:
                found.append(f"block {block} counts {self._holders[block]} holders, the tables name it {held[block]}x")
        free = Counter([*self._blank, *self._kept])
        for block in map(BlockId, range(1, self.num_blocks)):
            if free[block] != (self._holders[block] == 0):
                found.append(
                    f"block {block} has {self._holders[block]} holders and is {free[block]}x in the free lists"
                )
        if NULL_BLOCK in held or NULL_BLOCK in free:
            found.append("the null block is held or free")
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            found.append("keys and blocks do not name each other")
        found += [f"blank block {block} has a key" for block in self._blank if block in self._key_of]
        found += [f"kept block {block} has no key" for block in self._kept if block not in self._key_of]
        return found
