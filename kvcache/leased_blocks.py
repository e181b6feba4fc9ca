"""Blocks that are held for a conversation while no request uses them.

A lease holds what it takes to go on at one length or several: all blocks before where layers see all, those of the
windows before it, the state just there. It holds the very blocks, each once, so that neither an eviction nor another
request can take them. What it costs are the large pages that have one of them:

    large page      1                2                3
    full            [ 5 ][ 6 ][ 7 ][ 8 ]              leased: 5 to 8, two large pages
    sliding                          .. [  3  ]       leased: 3, which lies in the third

Pages are counted once, however many leases hold blocks in them. Leases may hold as many of an arena as its plan sets
aside for them (`Arena.leasable`); no request counts on these. So a lease makes no request wait for good.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .encoder_table import EncoderTable
from .eviction import Tier
from .hints import Hints
from .ids import NULL_BLOCK, BlockId
from .plan import MemoryPlan
from .points import Point, PointTree
from .pool import BlockPool
from .prefix import Chain, Encoder
from .retention import Retention
from .tables import Tables

Page = tuple[int, int]
"""An arena, and the number of a large page in it."""


class Prefix(NamedTuple):
    """What it takes to go on at some lengths of a sequence, as it is cached now."""

    lengths: tuple[int, ...]  # in tokens, the longest last; empty: nothing is cached
    blocks: tuple[tuple[BlockId, ...], ...]  # [group][block]
    pages: frozenset[Page]

    def __or__(self, other: "Prefix") -> "Prefix":
        """Both, what they have in common once."""
        blocks = (tuple(dict.fromkeys((*one, *more))) for one, more in zip(self.blocks, other.blocks, strict=True))
        lengths = sorted({*self.lengths, *other.lengths})
        return Prefix(tuple(lengths), tuple(blocks), self.pages | other.pages)


class Holding(NamedTuple):
    """A prefix that is held."""

    prefix: Prefix
    tree: PointTree | None  # of retention, when it was held
    points: tuple[Point, ...]  # which are not given up meanwhile


class PageCount:
    """How many large pages of each arena are held, each counted once. Invariant: `used` counts the keys of `_holders`
    by arena."""

    def __init__(self, num_arenas: int):
        self.used = [0] * num_arenas
        self._holders: Counter[Page] = Counter()

    def lacking(self, pages: Iterable[Page]) -> list[int]:
        """Of these, those that are not held yet, by arena."""
        counts = [0] * len(self.used)
        for page in pages:
            counts[page[0]] += page not in self._holders
        return counts

    def add(self, pages: Iterable[Page]) -> None:
        for page in pages:
            self.used[page[0]] += page not in self._holders
            self._holders[page] += 1

    def remove(self, pages: Iterable[Page]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self.used[page[0]] -= 1
        assert min(self.used) >= 0, "less than no large pages are held"

    @property
    def is_empty(self) -> bool:
        return not self._holders


class LeasedBlocks:
    """The holdings of one pool. Single-threaded.

    Invariant: each block of a holding is held once for it.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        pool: BlockPool,
        tables: Tables,
        hints: Hints,
        retention: Retention | None,
        *,
        caching: bool,
    ):
        self._plan, self._pool, self._hints = plan, pool, hints
        self._caching = caching
        self._groups = pool.groups
        self._tables = tables.each
        self._indices = [
            group.index
            for group, table in zip(self._groups, self._tables, strict=True)
            if not isinstance(table, EncoderTable)
        ]  # of blocks of text
        self._retention = retention
        self._holdings: dict[int, Holding] = {}  # by identity
        self.resets = 0  # times that all of them were lost
        self.keeper: Any = None  # who decides what is leased; None: nothing is

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> list[tuple[int, BlockId]]:
        """(group, block) of each."""
        return [
            (g, block)
            for holding in self._holdings.values()
            for g, blocks in enumerate(holding.prefix.blocks)
            for block in blocks
        ]

    def find(self, chain: Chain, lengths: Sequence[int], encoder: Encoder | None = None) -> Prefix:
        """What of the cache it takes to go on at the first of `lengths` at which all groups can, and beside it at those
        of the others at which they can. Of the first, if it is none, the longest before.

        lengths: in tokens, the longest first. encoder: what the text is read beside.
        """
        chain.grow()
        longest = self._reached(chain, lengths[0]) if self._caching else 0
        others = [length for length in lengths[1:] if 0 < length < longest and self._reached(chain, length) == length]
        found = (*sorted(others), longest) if longest else ()
        blocks = tuple(self._needed(g, chain, found, encoder) for g in range(len(self._tables)))
        return Prefix(found, blocks, self._pages(blocks))

    def _reached(self, chain: Chain, length: int) -> int:
        """The longest up to `length` at which all groups can go on, with something that they read, whatever comes next:
        within a block only where each has its end. A full block that begins so has one text alone."""
        size = self._plan.block_tokens
        while length > 0:
            if length % size and not all(chain.end(length) in index for index in self._indices):
                length -= length % size
                continue
            shorter = min(table.reaches(chain, length) for table in self._tables)
            if shorter == length and any(table.needed(chain, length) for table in self._tables):
                break
            length = min(shorter, length - 1)
        return length

    def _needed(self, g: int, chain: Chain, lengths: Sequence[int], encoder: Encoder | None) -> tuple[BlockId, ...]:
        table = self._tables[g]
        needed = dict.fromkeys(block for length in lengths for block in table.needed(chain, length))
        if lengths and isinstance(table, EncoderTable) and encoder is not None and table.encoder_tokens(encoder):
            needed |= dict.fromkeys(self._groups[g].index[name] for name in table.parts(encoder))
        return tuple(map(BlockId, needed))

    def _pages(self, blocks: Sequence[Sequence[BlockId]]) -> frozenset[Page]:
        """The large pages that these lie in. What lies beside the null blocks costs none."""
        groups = self._plan.groups
        return frozenset(
            (group.arena, page)
            for group, each in zip(groups, blocks, strict=True)
            for block in each
            if (page := block // group.pages_per_large) != NULL_BLOCK
        )

    # -- acting ------------------------------------------------------------------------------------------------------

    def hold(self, chain: Chain, prefix: Prefix) -> Holding:
        """Hold what `find` has just found."""
        for group, blocks in zip(self._groups, prefix.blocks, strict=True):
            group.share(blocks)
        tree, points = None, tuple[Point, ...]()
        if self._retention is not None:
            size = self._plan.block_tokens
            tree = self._retention.tree
            points = tuple(self._retention.hold([chain.names[: length // size] for length in prefix.lengths]))
        holding = Holding(prefix, tree, points)
        self._holdings[id(holding)] = holding
        return holding

    def let_go(self, holding: Holding) -> None:
        """Its blocks are cached like any others."""
        if self._holdings.pop(id(holding), None) is None:
            return  # it was lost with all that was known
        retention, points = self._retention, holding.points
        is_current = retention is not None and retention.tree is holding.tree
        # What retention does not know of would never be given up: it goes first.
        is_known = retention is None or (is_current and any(point.is_kept for point in points))
        for group, blocks in zip(self._groups, holding.prefix.blocks, strict=True):
            group.give_back(reversed(blocks), Tier.USUAL if is_known else Tier.LOW)
        if retention is not None and is_current:
            retention.let_go(points)

    def evict_others(self) -> int:
        """Evict all that is cached or pinned and not leased. Returns how many blocks that are."""
        self._hints.forget_all()
        if self._retention is not None:
            self._retention.forget_all()
        return self._pool.evict_all()

    def forget_all(self) -> None:
        """Everything cached is forgotten, and so are all holdings."""
        for holding in list(self._holdings.values()):
            self.let_go(holding)
        self.resets += 1
