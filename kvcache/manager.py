"""Which blocks each request holds, for all groups of layers at once.

The life of a request here, in five verbs:

    hit = manager.lookup(chain)                  # ask: how much of this prompt is cached?
    manager.open(request, hit)                   # take those blocks up
    manager.extend(request, length)              # before a step: blocks for all tokens up to `length`
    manager.commit(request)                      # after it, if it was more than one token: name, give back
    manager.release(request)                     # finished or preempted: give everything back

Asking changes nothing. `extend` is all or nothing. A decode step below a request's watermark (`quiet_until`) touches
nothing. No torch, no Ray: a test, a simulator and the engine call the same class.
"""

import heapq
import secrets
import time
from array import array
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from ..errors import InvalidSetting, PoolExhausted
from .events import EventLog, Stored
from .plan import NULL_BLOCK, Group, MemoryPlan
from .pool import BlockId, BlockPool, RequestId
from .prefix import MARK_BYTES, Chain, Ends, TokenChain, marked, owner_mark
from .reach import Keeps, moves_on
from .retention import USUAL_RETENTION, Policy, Retain, Tier
from .tables import SALT, Copy, Encoder, GroupTable, Row, Save, make_tables

NULL = BlockId(NULL_BLOCK)

WORK_DOUBLES_AT_TOKENS = 32_768
"""Length at which attention costs as much again as everything else: how `score` weighs long prefixes."""

LEAST_CHUNK_TOKENS = 512
"""A shorter chunk of prefill makes worse use of the workers than what it saves is worth."""

NAMED_AT_ONCE = 4
"""Blocks of an answer that are named together: others find it in the cache so many blocks late, while it runs."""

SALT_MEMORY = 256
"""Latest prompts remembered to tell a prompt that another salt kept from its prefix."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How prefixes are kept."""

    prefix_caching: bool = True
    snapshot_share: float = 0.5  # of the memory, for saved states
    pinned_share: float = 0.1  # of the memory, for blocks that requests pin

    def __post_init__(self):
        for field in ("snapshot_share", "pinned_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise InvalidSetting(f"{field} must be between 0 and 1, got {getattr(self, field)}", field=field)


class Hit(NamedTuple):
    """A cached prefix. Good until the pool changes, so `open` it at once."""

    tokens: int
    chain: Chain
    lost: Mapping[str, int]  # tokens that were cached once and will be computed again, by cause
    branch: int = 0  # where this prompt leaves what is known; 0: it does not, or not beyond `tokens`
    encoder: Encoder | None = None
    encoder_tokens: int = 0  # of its encoder's output, found in the cache


class Growth(NamedTuple):
    """What a request got for a step."""

    blocks: Sequence[Sequence[BlockId]]  # [group][new block]
    copies: Sequence[Copy] = ()
    saves: Sequence[Save] = ()

    def __bool__(self) -> bool:
        return bool(self.copies or self.saves or any(self.blocks))


NO_LOSS: Mapping[str, int] = {}
NOTHING = Growth(())


class CacheManager:
    """The block tables of all open requests, over one `BlockPool`. Single-threaded."""

    def __init__(
        self,
        plan: MemoryPlan,
        settings: CacheSettings | None = None,
        *,
        policy: Policy | None = None,
        hash_key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """hash_key: secret that keys the prefix names; drawn when None. clock: seconds, for retention hints."""
        settings = settings or CacheSettings()
        self.plan = plan
        self.pool = BlockPool(plan, policy)
        self._groups = plan.groups
        self._size = plan.block_tokens
        self._caching = settings.prefix_caching
        self._hash_key = hash_key or secrets.token_bytes(32)
        self._marks: dict[bytes, bytes] = {}  # by salt
        self._clock = clock
        self._ends = Ends()
        self.pool.on_forget = self._ends.remove
        most_saved = [
            max(1, int(plan.arenas[group.arena].usable * group.pages_per_large * settings.snapshot_share))
            for group in plan.groups
        ]
        self._tables: list[GroupTable] = make_tables(
            plan.groups, self.pool, self._ends, caching=self._caching, most_saved=most_saved
        )
        self._others = self._tables if any(group.reach.keeps is not Keeps.TOKENS for group in plan.groups) else []
        self._has_states = any(group.reach.keeps is Keeps.STATE for group in plan.groups)
        self._moving = [
            table
            for table, group in zip(self._tables, plan.groups, strict=True)
            if group.reach.keeps is not Keeps.TOKENS or moves_on(group.reach)
        ]
        self._has_windows = any(moves_on(group.reach) for group in plan.groups)
        self._keeps_front = any(
            group.reach.keeps is Keeps.TOKENS and not moves_on(group.reach) for group in plan.groups
        )
        self._name_every = self._size * self._blocks_named_at_once()
        self._rows: dict[RequestId, Row] = {}
        self._most_pinned = int(plan.usable_blocks * settings.pinned_share)
        self._pins: list[_Pin] = []
        self._expiries: list[tuple[float, int, list[list[tuple[BlockId, bytes]]]]] = []
        self._recent: OrderedDict[bytes, tuple[bytes, Sequence[int]]] = OrderedDict()

    def _blocks_named_at_once(self) -> int:
        """Of those that fill up token by token. Naming some at once is cheaper; what a layer gives back must have its
        name by then."""
        reaches = [group.reach for group in self._groups]
        far = all(r.window_tokens is None or r.window_tokens > (NAMED_AT_ONCE + 1) * self._size for r in reaches)
        plain = all(r.keeps is Keeps.TOKENS and r.chunk_tokens is None for r in reaches)
        return NAMED_AT_ONCE if far and plain else 1

    # -- asking ------------------------------------------------------------------------------------------------------

    def chain(self, tokens: Sequence[int], salt: bytes = b"", encoder: Encoder | None = None) -> TokenChain:
        """The names of a sequence. Kept with a request, they are computed once. `tokens` may grow; it is not copied.

        encoder: what the text is read beside, which is part of its names.
        """
        content = sha256(self._hash_key + encoder.content).digest() if encoder is not None else b""
        return TokenChain(tokens, self._size, key=self._hash_key, salt=salt + content, mark=self.mark(salt))

    def mark(self, salt: bytes) -> bytes:
        """How the names of a salt end."""
        if salt not in self._marks:
            if len(self._marks) >= SALT_MEMORY:
                self._marks.clear()
            self._marks[salt] = owner_mark(self._hash_key, salt)
        return self._marks[salt]

    def lookup(self, prompt: Chain | Sequence[int], salt: bytes = b"", encoder: Encoder | None = None) -> Hit:
        """The longest cached prefix of a prompt from which every group can continue.

        At least the last token is left to compute: its logits are what the caller is after.
        """
        chain: Chain = self.chain(prompt, salt, encoder) if isinstance(prompt, Sequence) else prompt
        if encoder is not None:
            content = sha256(self._hash_key + salt + encoder.content).digest()
            encoder = encoder._replace(content=marked(content, getattr(chain, "mark", content[-MARK_BYTES:])))
        if not self._caching:
            return Hit(0, chain, NO_LOSS, 0, encoder)
        memo = getattr(chain, "memo", None)
        if memo is not None and memo[:2] == (self.pool.version, chain.known):
            return memo[2]
        chain.grow()
        hit = self._search(chain, chain.known - 1, encoder)
        chain.memo = self.pool.version, chain.known, hit  # type: ignore[attr-defined]
        return hit

    def fits(self, length: int) -> bool:
        """Could a request grow to `length` tokens if it had the pool to itself?"""
        return self.plan.fits(length)

    def table(self, request: RequestId) -> list[list[BlockId]]:
        """The blocks of a request, [group][block of the sequence]; null where they were given back."""
        return [list(blocks) for blocks in self._rows[request].blocks]

    def held_blocks(self, request: RequestId) -> tuple[bytes, ...]:
        """The blocks of a request in each group, those given back left out, as int32 in a row; none if it is not open.
        For looking on: nothing is copied block by block."""
        row = self._rows.get(request)
        if row is None:
            return (b"",) * len(self._tables)
        return tuple(array("i", blocks[first:]).tobytes() for blocks, first in zip(row.blocks, row.first, strict=True))

    def quiet_until(self, request: RequestId) -> int:
        """Below this length, growing token by token, a request needs no block: `extend` would do nothing."""
        return self._rows[request].quiet_until

    def room_to_grow(self, request: RequestId, length: int) -> int:
        """The longest up to `length` that the pool has blocks for now; what the request has already if none."""
        row = self._rows[request]
        low, high = row.extent, length
        while low < high:
            middle = (low + high + 1) // 2
            if self.pool.room_for(self._missing(row, middle), request):
                low = middle
            else:
                high = middle - 1
        return low

    def chunk_end(self, request: RequestId, length: int) -> int:
        """Where a chunk of prefill up to `length` had better end.

        A long chunk holds blocks of windows that it passes itself. That is worth no cached prefix: then chunks are
        shorter, but not under `LEAST_CHUNK_TOKENS`.
        """
        row = self._rows[request]
        least = row.extent + LEAST_CHUNK_TOKENS
        if length <= least or not self._has_windows:
            return length
        low, high = least, length
        if self._no_loss(row, length):
            return length
        while low < high:
            middle = (low + high + 1) // 2
            if self._no_loss(row, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _no_loss(self, row: Row, length: int) -> bool:
        return self.pool.room_at_no_loss(self._missing(row, length), row.request)

    @property
    def is_caching(self) -> bool:
        return self._caching

    @property
    def is_full(self) -> bool:
        """Every block is held or keeps a prefix: new ones are made free by eviction."""
        return self.pool.num_blank == 0

    @property
    def num_open(self) -> int:
        return len(self._rows)

    @property
    def num_pinned(self) -> int:
        """Blocks that are kept because a request pinned them."""
        return sum(pin.large_pages for pin in self._pins)

    # -- acting ------------------------------------------------------------------------------------------------------

    def open(self, request: RequestId, hit: Hit) -> None:
        """Begin a request that holds the blocks of `hit`."""
        assert request not in self._rows, f"request {request} is open already"
        row = self._add_row(request, hit.chain, hit.encoder)
        for group, table in zip(self._groups, self._tables, strict=True):
            if hit.tokens or group.reach.keeps is Keeps.ENCODER:
                table.adopt(row, hit.tokens)
        row.extent = hit.tokens
        prompt_end = (hit.chain.known - 1) // self._size * self._size
        row.marks = sorted(mark for mark in {hit.branch, prompt_end} if mark > hit.tokens)
        if self._caching:
            self._note_salt(hit)

    def extend(self, request: RequestId, length: int, written: int | None = None) -> Growth:
        """Blocks for all tokens up to `length`.

        written: tokens that are written when the coming step begins; None: those extended for before.
        Raises `PoolExhausted`, with nothing taken, when the pool has too few.
        """
        row = self._rows[request]
        row.extent = max(row.extent, written or 0)
        if length < row.quiet_until:
            row.extent = max(row.extent, length)
            return NOTHING
        if row.copied and row.sources:
            self._drop_sources(row)
        if written is None or length - written > 1 or row.chain.lag >= self._name_every:
            row.chain.grow()
            tables = self._tables
        else:
            tables = self._moving  # the others have nothing to name, and never anything to give back
        for table in tables:
            table.settle(row)
        if self._expiries or self._pins:
            self._expire()
        taken = self.pool.take(self._missing(row, length), request)
        row.undrafted = 0
        copies = self._copies(row, taken) if row.sources else ()
        for blocks, new in zip(row.blocks, taken, strict=True):
            blocks += new
        saves = self._make_saves(row, length) if self._has_states else ()
        row.extent = max(row.extent, length)
        self._note_quiet(row)
        return Growth(taken, copies, saves)

    def extend_towards(self, request: RequestId, length: int, written: int) -> tuple[int, Growth]:
        """`extend` by a chunk of prefill that ends at `length`, or earlier: where that is wise, or room ends.

        Returns the length reached. Raises `PoolExhausted`, with nothing taken, when there is no room for one token.
        """
        length = self.chunk_end(request, length)
        try:
            return length, self.extend(request, length, written)
        except PoolExhausted:
            length = self.room_to_grow(request, length)
            if length <= written:
                raise
            return length, self.extend(request, length, written)

    def expect(self, request: RequestId, length: int) -> None:
        """Another request waits to go on where `request` has computed `length` tokens: keep what it needs for that."""
        row = self._rows[request]
        if row.extent < length and length not in row.marks:
            insort(row.marks, length)
            row.spans.clear()

    def touch(self, hit: Hit) -> None:
        """Somebody waits to take this prefix up: of what is kept, let it go last."""
        if hit.tokens:
            for g, table in enumerate(self._tables):
                for block in reversed(table.needed(hit.chain, hit.tokens)):  # the front outlives the tail
                    self.pool.touch(g, block)

    def commit(self, request: RequestId) -> None:
        """The step that `extend` was for has run: its keys, values and states are written.

        Full blocks get their name in the prefix cache; blocks that no later token reads go back to the pool. A request
        that grows by single tokens can do without: `extend` sees to it when it next needs a block.
        """
        row = self._rows[request]
        row.chain.grow()
        self._drop_sources(row)
        for table in self._tables:
            table.settle(row)
        self._note_quiet(row)

    def fork(self, parent: RequestId, child: RequestId, tokens: Sequence[int] | None = None) -> Growth:
        """A second request that goes on from where `parent` is. Full blocks are shared, the rest is copied.

        The copies must be made before either writes on.

        tokens: the child's own, which begin as the parent's; kept by reference. None: it will not differ in what is
        cached.

        Raises `PoolExhausted`, with nothing taken, when the pool has too few blocks.
        """
        assert child not in self._rows, f"request {child} is open already"
        row = self._rows[parent]
        split = [table.split(row) for table in self._tables]
        taken = self.pool.take([int(tail is not None) for _, tail in split], child)
        chain = row.chain
        if tokens is not None and isinstance(chain, TokenChain):
            chain = chain.of(tokens)
        other = self._add_row(child, chain, row.encoder)
        copies = []
        for g, ((shared, tail), new) in enumerate(zip(split, taken, strict=True)):
            self.pool.share(g, (block for block in shared if block != NULL))
            other.blocks[g] = shared + new
            other.first[g], other.named[g] = row.first[g], min(row.named[g], len(shared))
            if tail is not None:
                copies.append(Copy(g, tail, new[0]))
                self._hold_source(other, g, tail)
        other.copied = row.copied or not row.sources
        if not other.copied:  # the parent has not begun either: both will copy the end of the prefix they were found
            for g, source in row.sources:
                self._hold_source(other, g, source)
        other.extent = row.extent
        other.undrafted = int(row.extent > 0)
        return Growth(taken, copies)

    def release(self, request: RequestId, length: int | None = None, retain: Retain = USUAL_RETENTION) -> None:
        """Give back all blocks. length: tokens that are written, when not all that blocks were taken for."""
        row = self._rows.pop(request)
        if length is not None:
            row.extent = length
        row.chain.grow()
        self._drop_sources(row)
        if self._caching:
            for table in self._tables:
                table.settle(row)
            if retain.pin or retain.ttl_s is not None:
                self._retain(row, retain)
        worth = self._worth(row.extent) if self.pool.policy.asks_worth else 0.0
        for table in self._tables:
            table.finish(row, retain.tier, worth)
        self.pool.end(request)

    def swap_out(self, request: RequestId, length: int) -> list[tuple[int, int, BlockId]] | None:
        """`release` a request whose first `length` tokens are written, and say what must be copied for it to go on from
        there later: (group, place in its table, block) each, before anybody else writes to those blocks.

        None, with nothing done, when its blocks wait to be filled from others first.
        """
        row = self._rows[request]
        if row.sources:
            return None
        row.extent = length
        for table in self._tables:
            table.settle(row)  # what windows have passed need not be copied
        held = [
            (g, n, block)
            for g, (blocks, group) in enumerate(zip(row.blocks, self._groups, strict=True))
            for n, block in enumerate(blocks)
            if block != NULL and (group.reach.keeps is not Keeps.TOKENS or n * group.block_tokens < length)
        ]
        self.release(request, length)
        return held

    def swap_bytes(self, request: RequestId) -> int:
        """What `swap_out` would copy, about."""
        row = self._rows[request]
        return sum(
            sum(block != NULL for block in blocks) * group.block_bytes
            for blocks, group in zip(row.blocks, self._groups, strict=True)
        )

    def swap_in(
        self, request: RequestId, chain: Chain, length: int, places: Sequence[tuple[int, int]], encoder: Encoder | None
    ) -> list[BlockId]:
        """Open a request again where `swap_out` closed it. places: (group, place in its table) of what was copied.

        Returns the blocks to copy it to, in that order. Raises `PoolExhausted`, with nothing taken.
        """
        wants = [0] * len(self._tables)
        for g, _ in places:
            wants[g] += 1
        taken = self.pool.take(wants, request)
        row = self._add_row(request, chain, encoder)
        chain.grow()
        unused = [iter(blocks) for blocks in taken]
        found = []
        for g, n in places:  # in the order of places within a group
            blocks = row.blocks[g]
            if not blocks:
                row.first[g] = n
            blocks += [NULL] * (n - len(blocks))
            found.append(next(unused[g]))
            blocks.append(found[-1])
        for g, group in enumerate(self._groups):
            if group.reach.keeps is Keeps.TOKENS:
                full = length // group.block_tokens
                row.blocks[g] += [NULL] * (full - len(row.blocks[g]))
                row.named[g] = full  # they had their names before
                if all(place[0] != g for place in places):
                    row.first[g] = len(row.blocks[g])
            else:
                row.named[g] = len(row.blocks[g])
        row.extent, row.copied = length, True
        return found

    def abandon(self, request: RequestId) -> None:
        """`swap_in` was for nothing: the copies are not made."""
        row = self._rows.pop(request)
        for g, blocks in enumerate(row.blocks):
            self.pool.give_back(g, [block for block in blocks if block != NULL])
        self.pool.end(request)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix and every pin. Open requests keep their blocks."""
        for pin in self._pins:
            self._unpin(pin)
        self._pins, self._expiries = [], []
        self.pool.forget_all()
        self._ends.clear()
        self._recent.clear()

    def names(self, group: int, chain: Chain) -> list[bytes]:
        """The names of the full blocks of a sequence in a group, in order."""
        chain.grow()
        return chain.draft_names if self._groups[group].is_draft else chain.names

    def forget(self, group: int, block: BlockId) -> None:
        """Forget what one block holds."""
        self.pool.forget(group, block)

    def listen(self) -> EventLog:
        """Collect events from now on."""
        if self.pool.log is None:
            self.pool.log = EventLog([(group.reach.name, group.block_tokens) for group in self._groups])
        return self.pool.log

    def stop_listening(self) -> None:
        self.pool.log = None

    def known(self) -> list[Stored]:
        """All that is known now, as if it had just become known; the blocks of a group in no order."""
        return [
            Stored(number, group.reach.name, group.block_tokens, tuple(names))
            for number, group in enumerate(self._groups)
            if (names := self.pool.index(number))
        ]

    # -- the search --------------------------------------------------------------------------------------------------

    def _search(self, chain: Chain, limit: int, encoder: Encoder | None) -> Hit:
        """From long to short: whichever group can not go on says how much shorter it must be."""
        size = self._size
        known = self._ever_known(chain, limit)
        length = self._candidate(chain, min(limit, (known + 1) * size - 1), limit if known * size >= limit else -1)
        lost: dict[str, int] = {}
        while length > 0:
            shorter, lacking = length, None
            for table in self._tables:
                reached = table.reaches(chain, shorter)
                if reached < shorter:
                    shorter, lacking = reached, table
            if lacking is None:
                break
            cause = lacking.cause(chain, length)
            shorter = self._candidate(chain, shorter, -1)
            lost[cause] = lost.get(cause, 0) + length - shorter
            length = shorter
        if length == 0 and not lost:
            lost = self._lost_to_salt(chain, limit)
        branch = min(known * size, limit // size * size)
        found = max(table.encoder_tokens(encoder) for table in self._tables)
        return Hit(length, chain, lost or NO_LOSS, branch if branch > length else 0, encoder, found)

    def _candidate(self, chain: Chain, length: int, limit: int) -> int:
        """The longest prefix up to `length` that could be cached: `limit` itself, a known end, or full blocks."""
        blocks, tail = divmod(length, self._size)
        if tail == 0 or length == limit:
            return length
        tails = self._ends.after(chain.names[blocks - 1]) if 0 < blocks <= len(chain.names) else None
        return blocks * self._size + max((t for t in tails or () if t <= tail), default=0)

    def _ever_known(self, chain: Chain, limit: int) -> int:
        """Blocks of a prompt, from the front, that some group holds, or held before they were evicted.

        Without a group that keeps the front of sequences, only the last of these blocks may be known.
        """
        most = min(len(chain.names), -(-limit // self._size))
        if not self._keeps_front:
            while most > 0 and not self._was_known(chain.names[most - 1]):
                most -= 1
            return most
        known = min(most, max(table.leading_run(chain) for table in self._tables))
        while known < most and self._was_known(chain.names[known]):
            known += 1
        return known

    def _was_known(self, name: bytes) -> bool:
        return any(name in self.pool.index(g) or self.pool.was_evicted(g, name) for g in range(len(self._groups)))

    # -- parts of the verbs ------------------------------------------------------------------------------------------

    def _copies(self, row: Row, taken: Sequence[Sequence[BlockId]]) -> tuple[Copy, ...]:
        """A prefix that ends inside a block, or in a state, goes on in a block of the request's own."""
        row.copied = True
        return tuple(Copy(g, source, taken[g][0]) for g, source in row.sources)

    def _hold_source(self, row: Row, group: int, block: BlockId) -> None:
        """Nobody may have this block before it is copied."""
        self.pool.share(group, [block])
        row.sources.append((group, block))

    def _drop_sources(self, row: Row) -> None:
        for g, source in row.sources:
            self.pool.give_back(g, [source])
        row.sources.clear()

    def _add_row(self, request: RequestId, chain: Chain, encoder: Encoder | None) -> Row:
        row = self._rows[request] = Row(request, chain, len(self._tables), encoder)
        return row

    def _missing(self, row: Row, length: int) -> list[int]:
        """Blocks to add per group. Groups of tokens have blocks for the same tokens: one answers for all."""
        if not self._others:
            return [self._tables[0].missing(row, length)] * len(self._tables)
        return [table.missing(row, length) for table in self._tables]

    def _note_quiet(self, row: Row) -> None:
        row.quiet_until = min([table.next_event(row) for table in self._others or self._tables[:1]])

    def _make_saves(self, row: Row, length: int) -> tuple[Save, ...]:
        """Blocks for snapshots on the way. They are worth having, never worth failing for."""
        made = []
        for g, table in enumerate(self._tables):
            for at in table.save_lengths(row, length):
                wants = [int(other == g) for other in range(len(self._tables))]
                if not self.pool.room_for(wants, row.request):
                    break
                made.append(Save(g, at, self.pool.take(wants, row.request)[g][0]))
        row.saves += made
        return tuple(made)

    def _worth(self, length: int) -> float:
        work = length * (1 + length / (2 * WORK_DOUBLES_AT_TOKENS))
        return work / max(1, self.plan.bytes_held(max(1, length)))

    def _note_salt(self, hit: Hit) -> None:
        chain = hit.chain
        if isinstance(chain, TokenChain) and len(chain.tokens) >= self._size:
            self._recent[self._first_tokens(chain)] = chain.salt, chain.tokens
            if len(self._recent) > SALT_MEMORY:
                self._recent.popitem(last=False)

    def _lost_to_salt(self, chain: Chain, limit: int) -> dict[str, int]:
        """Tokens that are shared with a prompt of another salt."""
        if not isinstance(chain, TokenChain) or len(chain.tokens) < self._size:
            return {}
        other_salt, tokens = self._recent.get(self._first_tokens(chain), (chain.salt, ()))
        if other_salt == chain.salt:
            return {}
        alike = 0
        for mine, other in zip(chain.tokens, tokens, strict=False):
            if mine != other:
                break
            alike += 1
        return {SALT: min(alike, limit) // self._size * self._size}

    def _first_tokens(self, chain: TokenChain) -> bytes:
        return array("I", chain.tokens[: self._size]).tobytes()

    # -- retention hints ---------------------------------------------------------------------------------------------

    def _retain(self, row: Row, retain: Retain) -> None:
        """Pin what a request leaves, or note when it may go. What does not fit the pinned share is kept as usual."""
        left = [
            [(block, name) for block in blocks if block != NULL and (name := self.pool.name_of(g, block)) is not None]
            for g, blocks in enumerate(row.blocks)
        ]
        until = self._clock() + retain.ttl_s if retain.ttl_s is not None else None
        if retain.pin:
            self._expire()
            pin = _Pin(until, [[block for block, _ in blocks] for blocks in left], self._large_pages(left))
            if self.num_pinned + pin.large_pages <= self._most_pinned:
                for g, blocks in enumerate(pin.blocks):
                    self.pool.share(g, blocks)
                self._pins.append(pin)
                return
        if until is not None:
            heapq.heappush(self._expiries, (until, row.request, left))

    def _large_pages(self, left: Sequence[Sequence[tuple[BlockId, bytes]]]) -> int:
        return sum(-(-len(blocks) // group.pages_per_large) for blocks, group in zip(left, self._groups, strict=True))

    def _expire(self) -> None:
        """What was to be kept for a time, and that time is over, is the first to go."""
        now = self._clock()
        over = [pin for pin in self._pins if pin.until is not None and pin.until <= now]
        for pin in over:
            self._pins.remove(pin)
            self._unpin(pin)
        while self._expiries and self._expiries[0][0] <= now:
            _, _, left = heapq.heappop(self._expiries)
            for g, blocks in enumerate(left):
                for block, name in blocks:
                    if self.pool.name_of(g, block) == name:
                        self.pool.demote(g, block)

    def _unpin(self, pin: "_Pin") -> None:
        for g, blocks in enumerate(pin.blocks):
            self.pool.give_back(g, reversed(blocks), Tier.LOW)

    # -- accounts ----------------------------------------------------------------------------------------------------

    def account(self) -> dict[str, int]:
        """Bytes of the large pages in use by running requests, and what of them serves nobody.

        held      all of it, less blocks that only keep a prefix for later
        unfilled  slots of held blocks that no token was written to
        passed    tokens that no query reads any more, in a block with some that one does
        blank     blocks that nobody holds
        padding   bytes of held blocks that belong to no layer
        """
        held = unfilled = passed = padding = 0
        blocks_used = 0
        for g, group in enumerate(self._groups):
            visible: dict[BlockId, tuple[int, int]] = {}  # block -> first and last token in it that counts
            for row in self._rows.values():
                for n, block in enumerate(row.blocks[g]):
                    if block != NULL:
                        low, high = self._visible(group, row, n)
                        old = visible.get(block, (group.block_tokens, 0))
                        visible[block] = min(old[0], low), max(old[1], high)
            token_bytes = group.content_bytes // group.block_tokens
            unfilled += sum(group.block_tokens - high for _, high in visible.values()) * token_bytes
            passed += sum(low for low, _ in visible.values()) * token_bytes
            padding += len(visible) * (group.block_bytes - group.content_bytes)
            blocks_used += len(visible) * group.block_bytes
            held += self.pool.num_blank_in_use(g) * group.block_bytes
        return {
            "held": held + blocks_used,
            "unfilled": unfilled,
            "passed": passed,
            "blank": held,
            "padding": padding,
        }

    def _visible(self, group: Group, row: Row, n: int) -> tuple[int, int]:
        """Of block `n` of a row: the first slot that a query still reads, and the end of those written to."""
        if group.reach.keeps is not Keeps.TOKENS:
            return 0, group.block_tokens
        start, size = n * group.block_tokens, group.block_tokens
        low = min(max(group.reach.oldest_needed(row.extent) - start, 0), size)
        return low, min(max(row.extent - start, 0), size)

    # -- for check.py ------------------------------------------------------------------------------------------------

    def held(self) -> Counter[tuple[int, int]]:
        """How often tables, pins and copies under way name each (group, block)."""
        count: Counter[tuple[int, int]] = Counter()
        for row in self._rows.values():
            for g, blocks in enumerate(row.blocks):
                count.update((g, block) for block in blocks if block != NULL)
            count.update((g, block) for g, block in row.sources)
            count.update((save.group, save.block) for save in row.saves)
        for pin in self._pins:
            for g, blocks in enumerate(pin.blocks):
                count.update((g, block) for block in blocks)
        return count


class _Pin(NamedTuple):
    until: float | None  # clock
    blocks: list[list[BlockId]]  # [group][block]
    large_pages: int
