"""The block tables of one group of layers, one class for each way a layer keeps things.

    TokenTable    an entry per token: blocks along the sequence; those no later token reads are given back
    StateTable    one block, overwritten by every step; snapshots of it are saved on the way
    EncoderTable  blocks for an encoder's tokens, written once, shared by all who bring the same content

All answer the same questions of the manager and none knows of the others. What a request holds is in its `Row`.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

from .plan import NULL_BLOCK, Group
from .pool import BlockId, BlockPool, RequestId
from .prefix import MARK_BYTES, Chain, Ends, marked
from .reach import NEVER, Keeps, moves_on
from .retention import Tier

NULL = BlockId(NULL_BLOCK)

EVICTED, NO_SNAPSHOT, ALIGNMENT, SALT = "evicted", "no_snapshot", "alignment", "salt"
"""Why tokens that were cached once are computed again: their blocks were evicted; no state was saved there; a prefix
ends inside a block; another salt."""


STRIDE = 512


class Encoder(NamedTuple):
    """What a request brings for layers that attend to an encoder's output."""

    content: bytes  # hash of it: the same image has the same one
    tokens: int


class Copy(NamedTuple):
    """Before a step: copy a block. What a request writes next is its own."""

    group: int
    source: BlockId
    target: BlockId


class Save(NamedTuple):
    """During a step: the state after `length` tokens also goes to `block`."""

    group: int
    length: int
    block: BlockId


class Row:
    """What one request holds. Invariant: in each group of tokens, the blocks from `first` on are held, those before
    are null.

    Below `quiet_until` tokens nothing happens to the row: no group needs a block. Blocks that became full or were
    passed meanwhile are seen to when one is needed, which is when a decode step may cost something anyway.
    """

    __slots__ = (
        "blocks", "chain", "copied", "encoder", "extent", "first", "marks", "named", "quiet_until", "request",
        "saves", "sources", "spans", "undrafted",
    )  # fmt: skip

    def __init__(self, request: RequestId, chain: Chain, groups: int, encoder: Encoder | None):
        self.request = request
        self.chain = chain
        self.encoder = encoder
        self.extent = 0  # tokens that are written, or will be by the step under way
        self.blocks: list[list[BlockId]] = [[] for _ in range(groups)]
        self.first = [0] * groups
        self.named = [0] * groups  # blocks at the front that have a name, or never will
        self.marks: list[int] = []  # lengths at which another request may want to go on
        self.spans: dict[int, list[tuple[int, int]]] = {}  # group -> blocks that those marks need, from first to end
        self.sources: list[tuple[int, BlockId]] = []  # held until they are copied
        self.copied = False  # the step that copies them has been planned
        self.saves: list[Save] = []
        self.undrafted = 0  # tokens at the end whose drafter's entries are still those of the parent
        self.quiet_until = 0


class GroupTable(Protocol):
    """One group of layers. `length` counts tokens of the sequence."""

    def reaches(self, chain: Chain, length: int) -> int:
        """Could this group go on at `length`? Then `length`; else a shorter one, and at none between it could."""
        ...

    def cause(self, chain: Chain, length: int) -> str:
        """Why it could not."""
        ...

    def leading_run(self, chain: Chain) -> int:
        """Blocks at the front of a prompt that are cached, as far as this group keeps the front."""
        ...

    def encoder_tokens(self, encoder: Encoder | None) -> int:
        """Of these, how many are cached."""
        ...

    def adopt(self, row: Row, length: int) -> None:
        """Take up the blocks of a prefix on which this group can go on."""
        ...

    def needed(self, chain: Chain, length: int) -> list[int]:
        """The cached blocks with which this group can go on at `length`, in order."""
        ...

    def missing(self, row: Row, length: int) -> int:
        """Blocks to add before `length` tokens are written."""
        ...

    def save_lengths(self, row: Row, length: int) -> list[int]:
        """Lengths on the way to `length` at which a snapshot is worth its block."""
        ...

    def split(self, row: Row) -> tuple[list[BlockId], BlockId | None]:
        """What a fork shares with its parent, and the block it needs a copy of."""
        ...

    def settle(self, row: Row) -> None:
        """`row.extent` tokens are written: name what is full, give back what no later token reads."""
        ...

    def finish(self, row: Row, tier: Tier, worth: float) -> None:
        """Give back everything."""
        ...

    def next_event(self, row: Row) -> int:
        """Shortest length beyond the present one for which something has to be done."""
        ...


def count_leading(names: Sequence[bytes], index: Container[bytes]) -> int:
    """How many names from the first one on are in the index."""
    contains = index.__contains__
    for start in range(0, len(names), STRIDE):
        part = names[start : start + STRIDE]
        if not all(map(contains, part)):  # in C, as long as all goes well
            return start + next(n for n, name in enumerate(part) if name not in index)
    return len(names)


class _Table:
    def __init__(self, g: int, group: Group, pool: BlockPool, ends: Ends, caching: bool):
        self._g = g
        self._size = group.block_tokens
        self._reach = group.reach
        self._is_draft = group.is_draft
        self._pool = pool
        self._index = pool.index(g)
        self._ends = ends
        self._caching = caching

    def _name_at(self, chain: Chain, length: int) -> bytes | None:
        """The name of the first `length` tokens."""
        blocks, tail = divmod(length, self._size)
        if tail:
            return chain.end(length)
        return chain.names[blocks - 1] if 0 < blocks <= len(chain.names) else None

    def _name_end(self, chain: Chain, length: int, block: BlockId) -> None:
        """Name a block whose content ends with the first `length` tokens, wherever that is."""
        blocks, tail = divmod(length, self._size)
        name = self._name_at(chain, length)
        if name is None or name in self._index:
            return
        self._pool.name(self._g, [block], [name])
        if tail:
            self._ends.add(name, chain.names[blocks - 1], tail)

    def _names(self, chain: Chain) -> list[bytes]:
        """The names of full blocks, as this group has them."""
        return chain.draft_names if self._is_draft else chain.names

    def save_lengths(self, row: Row, length: int) -> list[int]:
        return []

    def leading_run(self, chain: Chain) -> int:
        return 0

    def encoder_tokens(self, encoder: Encoder | None) -> int:
        return 0


class TokenTable(_Table):
    def __init__(self, g: int, group: Group, pool: BlockPool, ends: Ends, caching: bool):
        super().__init__(g, group, pool, ends, caching)
        self._moves_on = moves_on(group.reach)
        self._run: tuple[list[bytes], tuple[int, int], int] = ([], (0, 0), 0)  # of which names, when, how long

    def reaches(self, chain: Chain, length: int) -> int:
        if length == 0:
            return 0
        size, names, index = self._size, self._names(chain), self._index
        blocks, tail = divmod(length, size)
        first = self._reach.oldest_needed(length) // size
        if first == 0:
            run = self.leading_run(chain)
            if run < blocks:
                return (run + 1) * size - 1
        else:
            # The oldest lacking block is lacking for every length from here down to it.
            for n in range(first, blocks):
                if n >= len(names) or names[n] not in index:
                    return (n + 1) * size - 1
        if not tail or first > blocks:
            return length
        if blocks < len(names) and names[blocks] in index:
            return length
        return length if chain.end(length) in index else length - tail

    def cause(self, chain: Chain, length: int) -> str:
        blocks = length // self._size
        first = self._reach.oldest_needed(length) // self._size
        needed = self._names(chain)[first:blocks]
        lacking = next((name for name in needed if name not in self._index), None)
        if lacking is None or (self._is_draft and not self._pool.was_evicted(self._g, lacking)):
            return ALIGNMENT  # inside a block, or at a border after which a drafter had seen another token
        return EVICTED

    def adopt(self, row: Row, length: int) -> None:
        g, size, names, index = self._g, self._size, self._names(row.chain), self._index
        blocks, tail = divmod(length, size)
        first = min(self._reach.oldest_needed(length) // size, blocks)
        held = [index[name] for name in names[first:blocks]]
        self._pool.share(g, held, found=True)
        row.blocks[g] = [NULL] * first + held  # type: ignore[assignment]
        row.first[g], row.named[g] = first, blocks
        if tail and self._reach.oldest_needed(length) < length:
            name = names[blocks] if blocks < len(names) and names[blocks] in index else row.chain.end(length)
            assert name is not None
            source = BlockId(index[name])
            self._pool.share(g, [source], found=True)
            row.sources.append((g, source))

    def needed(self, chain: Chain, length: int) -> list[int]:
        names, index = self._names(chain), self._index
        first = self._reach.oldest_needed(length) // self._size
        found = [index[name] for name in names[first : length // self._size] if name in index]
        end = chain.end(length) if length % self._size else None
        return found if end is None or end not in index else [*found, index[end]]

    def missing(self, row: Row, length: int) -> int:
        return max(0, -(-length // self._size) - len(row.blocks[self._g]))

    def split(self, row: Row) -> tuple[list[BlockId], BlockId | None]:
        blocks = row.blocks[self._g]
        # A drafter's entry of the last token was made with the parent's next one: the child writes its own.
        full, tail = divmod(max(0, row.extent - self._is_draft), self._size)
        if not (tail or self._is_draft) or full >= len(blocks):
            return blocks[:full], None
        if blocks[full] == NULL:
            return blocks[: full + 1], None
        return blocks[:full], blocks[full]

    def settle(self, row: Row) -> None:
        g, size, extent = self._g, self._size, row.extent
        blocks = row.blocks[g]
        first = row.first[g]
        if self._caching:
            names, named = self._names(row.chain), row.named[g]
            full = min((extent - self._is_draft * row.undrafted) // size, len(names))
            if named < full:
                named = max(named, first)
                self._pool.name(g, blocks[named:full], names[named:full])
                row.named[g] = full
        if self._moves_on:
            passed = self._reach.oldest_needed(extent) // size
            if passed > first:
                self._pass(row, first, min(passed, len(blocks)))

    def _pass(self, row: Row, start: int, stop: int) -> None:
        """Give back blocks [start, stop). Those that another request could go on with at a mark are worth more."""
        g, size = self._g, self._size
        blocks = row.blocks[g]
        spans = row.spans.get(g)
        if spans is None:
            spans = row.spans[g] = [(self._reach.oldest_needed(m) // size, -(-m // size)) for m in row.marks]
        if stop - start == 1:  # as decode has it
            tier = Tier.USUAL if any([low <= start < high for low, high in spans]) else Tier.LOW
            self._pool.give_back_one(g, blocks[start], tier)
            blocks[start] = NULL
            row.first[g] = stop
            return
        at = start
        for low, high in spans:
            if low < stop and at < high:
                if at < low:
                    self._pool.give_back(g, blocks[at:low], Tier.LOW)
                self._pool.give_back(g, blocks[max(at, low) : min(stop, high)], Tier.USUAL)
                at = min(stop, high)
        if at < stop:
            self._pool.give_back(g, blocks[at:stop], Tier.LOW)
        blocks[start:stop] = [NULL] * (stop - start)
        row.first[g] = stop

    def finish(self, row: Row, tier: Tier, worth: float) -> None:
        g = self._g
        blocks, first = row.blocks[g], row.first[g]
        full, tail = divmod(row.extent, self._size)
        if self._caching and tail and not self._is_draft and full < len(blocks) and first <= full:
            self._name_end(row.chain, row.extent, blocks[full])
        # The front of a sequence outlives its tail: it is the likelier prefix.
        self._pool.give_back(g, reversed(blocks[first:]), tier, worth)

    def next_event(self, row: Row) -> int:
        return len(row.blocks[self._g]) * self._size + 1

    def leading_run(self, chain: Chain) -> int:
        """Blocks in a row that are cached from the first one on."""
        names = self._names(chain)
        at = len(names), self._pool.version
        counted, counted_at, run = self._run
        if counted is not names or counted_at != at:
            run = count_leading(names, self._index)
            self._run = names, at, run
        return run


class StateTable(_Table):
    """Snapshots are saved where the next request is likely to go on: where this prompt left a known path, at the last
    block border before its end, at its very end, and every `_every` tokens between."""

    LEAST_EVERY, MOST_EVERY = 512, 4096

    def __init__(
        self, g: int, group: Group, pool: BlockPool, ends: Ends, caching: bool, token_bytes: int, most_saved: int
    ):
        """token_bytes: what all other groups keep per token. most_saved: snapshots that may be kept at once."""
        super().__init__(g, group, pool, ends, caching)
        self._every = self.LEAST_EVERY
        while self._every < self.MOST_EVERY and self._every * token_bytes < group.block_bytes:
            self._every *= 2
        self._every = max(self._every, self._size)
        self._every -= self._every % self._size
        self._most_saved = most_saved
        self._saved: OrderedDict[BlockId, bytes] = OrderedDict()  # oldest first

    def reaches(self, chain: Chain, length: int) -> int:
        if self._name_at(chain, length) in self._index:
            return length
        size, names, index = self._size, chain.names, self._index
        for blocks in range(min((length - 1) // size, len(names)), 0, -1):
            tails = self._ends.after(names[blocks - 1])
            if tails:
                for tail in sorted(tails, reverse=True):
                    if blocks * size + tail < length and chain.end(blocks * size + tail) in index:
                        return blocks * size + tail
            if names[blocks - 1] in index:
                return blocks * size
        return 0

    def cause(self, chain: Chain, length: int) -> str:
        name = self._name_at(chain, length)
        if name is not None and self._pool.was_evicted(self._g, name):
            return EVICTED
        return NO_SNAPSHOT

    def adopt(self, row: Row, length: int) -> None:
        name = self._name_at(row.chain, length)
        assert name is not None
        source = BlockId(self._index[name])
        self._pool.share(self._g, [source], found=True)
        row.sources.append((self._g, source))

    def needed(self, chain: Chain, length: int) -> list[int]:
        name = self._name_at(chain, length)
        return [self._index[name]] if name in self._index else []

    def missing(self, row: Row, length: int) -> int:
        return 0 if row.blocks[self._g] else 1

    def save_lengths(self, row: Row, length: int) -> list[int]:
        if not self._caching:
            return []
        first = row.extent - row.extent % self._every + self._every
        lengths = {*range(first, length + 1, self._every), *(m for m in row.marks if row.extent < m <= length)}
        names, size = row.chain.names, self._size
        return sorted(m for m in lengths if m // size <= len(names) and names[m // size - 1] not in self._index)

    def split(self, row: Row) -> tuple[list[BlockId], BlockId | None]:
        return [], next(iter(row.blocks[self._g]), None)

    def settle(self, row: Row) -> None:
        due = [save for save in row.saves if save.group == self._g and save.length <= row.extent]
        if not due:
            return
        row.saves = [save for save in row.saves if save not in due]
        for save in due:
            name = self._name_at(row.chain, save.length)
            if name is not None and name not in self._index:
                self._pool.name(self._g, [save.block], [name])
                self._remember(save.block, name)
            tier = Tier.USUAL if save.length in row.marks else Tier.LOW
            self._pool.give_back(self._g, [save.block], tier)

    def finish(self, row: Row, tier: Tier, worth: float) -> None:
        g = self._g
        self._pool.give_back(g, [save.block for save in row.saves if save.group == g], tier)
        row.saves = [save for save in row.saves if save.group != g]
        for block in row.blocks[g]:
            if self._caching and row.extent:
                self._name_end(row.chain, row.extent, block)
                if (name := self._pool.name_of(g, block)) is not None:
                    self._remember(block, name)
            self._pool.give_back(g, [block], tier, worth)

    def next_event(self, row: Row) -> int:
        if not row.blocks[self._g]:
            return row.extent + 1
        return row.extent - row.extent % self._every + self._every if self._caching else NEVER

    def _remember(self, block: BlockId, name: bytes) -> None:
        """Count a snapshot. Beyond the budget the oldest is forgotten."""
        self._saved.pop(block, None)
        self._saved[block] = name
        while len(self._saved) > self._most_saved:
            oldest, its_name = self._saved.popitem(last=False)
            if self._pool.name_of(self._g, oldest) == its_name:
                self._pool.forget(self._g, oldest)


class EncoderTable(_Table):
    def reaches(self, chain: Chain, length: int) -> int:
        return length  # independent of the text

    def cause(self, chain: Chain, length: int) -> str:
        return EVICTED

    def encoder_tokens(self, encoder: Encoder | None) -> int:
        if encoder is None or not all(name in self._index for name in self._parts(encoder)):
            return 0
        return encoder.tokens

    def adopt(self, row: Row, length: int) -> None:
        if row.encoder is not None and self._caching and self.encoder_tokens(row.encoder):
            blocks = [BlockId(self._index[name]) for name in self._parts(row.encoder)]
            self._pool.share(self._g, blocks, found=True)
            row.blocks[self._g] = blocks
            row.named[self._g] = len(blocks)

    def needed(self, chain: Chain, length: int) -> list[int]:
        return []

    def missing(self, row: Row, length: int) -> int:
        wanted = -(-row.encoder.tokens // self._size) if row.encoder is not None else 0
        return wanted - len(row.blocks[self._g])

    def split(self, row: Row) -> tuple[list[BlockId], BlockId | None]:
        return list(row.blocks[self._g]), None

    def settle(self, row: Row) -> None:
        blocks = row.blocks[self._g]
        if self._caching and row.encoder is not None and row.extent and row.named[self._g] < len(blocks):
            names = self._parts(row.encoder)
            if self._index.keys().isdisjoint(names):
                self._pool.name(self._g, blocks, names)
            row.named[self._g] = len(blocks)

    def finish(self, row: Row, tier: Tier, worth: float) -> None:
        self._pool.give_back(self._g, reversed(row.blocks[self._g]), tier, worth)

    def next_event(self, row: Row) -> int:
        return NEVER if row.named[self._g] == len(row.blocks[self._g]) else row.extent + 1

    def _parts(self, encoder: Encoder) -> list[bytes]:
        count = -(-encoder.tokens // self._size)
        content, mark = encoder.content, encoder.content[-MARK_BYTES:]
        return [marked(sha256(b"%d/%d/" % (n, encoder.tokens) + content).digest(), mark) for n in range(count)]


def make_tables(
    groups: Sequence[Group], pool: BlockPool, ends: Ends, *, caching: bool, most_saved: Sequence[int]
) -> list[GroupTable]:
    """One table per group. most_saved: snapshots each group may keep."""
    token_bytes = sum(
        group.content_bytes // group.block_tokens for group in groups if group.reach.keeps is Keeps.TOKENS
    )
    tables: list[GroupTable] = []
    for g, group in enumerate(groups):
        match group.reach.keeps:
            case Keeps.TOKENS:
                tables.append(TokenTable(g, group, pool, ends, caching))
            case Keeps.STATE:
                tables.append(StateTable(g, group, pool, ends, caching, token_bytes, most_saved[g]))
            case Keeps.ENCODER:
                tables.append(EncoderTable(g, group, pool, ends, caching))
    return tables
