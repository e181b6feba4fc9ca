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

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from .eviction import USUAL_POLICY, Policy
from .group_table import COPIED, DROPPED, HELD, NOTHING, Copy, Growth, Row, marks_of
from .hints import USUAL_RETENTION, Hints, Retain
from .ids import BlockId, RequestId
from .leased_blocks import LeasedBlocks
from .lookup import Hit, Lookup
from .plan import MemoryPlan
from .pool import BlockPool
from .prefix import Chain, Encoder, Namer, TokenChain
from .retention import retain_by_worth
from .room import Room
from .settings import CacheSettings
from .swapping import Swapping
from .tables import Tables, name_every
from .visits import Arrival


class CacheManager:
    """The open requests, over one `BlockPool`. Single-threaded.
    Invariant: a request is open here and in every table, or in none. What it holds is written in the tables."""

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
        self.plan, self.pool = plan, BlockPool(plan, policy)
        self.is_caching = settings.prefix_caching
        self._tables = Tables(plan, self.pool, caching=self.is_caching)
        by_worth = self.is_caching and (policy or USUAL_POLICY).keeps_by_worth
        self._arrivals: list[Arrival] = []
        self.retention = retain_by_worth(plan, self.pool, self._tables, self._arrivals) if by_worth else None
        self.namer = Namer(hash_key, plan.block_tokens)
        self._missing, self._next_event = self._tables.missing, self._tables.next_event
        self._name_every = name_every(plan)
        self._lookup = Lookup(self._tables, self.pool, plan.block_tokens, caching=self.is_caching)
        self.hints = Hints(self.pool, plan, settings.pinned_share, clock)
        beside = self._tables, self.hints, self.retention
        self.leased = LeasedBlocks(plan, self.pool, *beside, caching=self.is_caching)
        self._room = Room(self._tables, self.pool)
        self._swapping = Swapping(self._tables, self.pool, plan)
        self._rows: dict[RequestId, Row] = {}

    # -- asking for a prefix -----------------------------------------------------------------------------------------

    def chain(self, tokens: Sequence[int], salt: bytes = b"", encoder: Encoder | None = None) -> TokenChain:
        """The names of a sequence. Kept with a request, they are computed once. `tokens` may grow; it is not copied.
        encoder: what the text is read beside, which is part of its names."""
        return self.namer.chain(tokens, salt, encoder)

    def names(self, group: int, chain: Chain) -> list[bytes]:
        """The names of the full blocks of a sequence in a group, in order."""
        chain.grow()
        return self._tables.each[group].names(chain)

    def lookup(
        self,
        prompt: Chain | Sequence[int],
        salt: bytes = b"",
        encoder: Encoder | None = None,
        *,
        last: Hit | None = None,
    ) -> Hit:
        """The longest cached prefix of a prompt from which every group can continue.

        At least the last token is left to compute: its logits are what the caller is after.

        last: what was found before, which is found again at no cost if nothing has changed since.
        """
        chain: Chain = self.chain(prompt, salt, encoder) if isinstance(prompt, Sequence) else prompt
        if last is not None and self._lookup.is_current(last, chain):
            return last
        if encoder is not None:
            encoder = self.namer.of_owner(encoder, salt, chain.mark)
        return self._lookup.find(chain, encoder)

    # -- asking for room ---------------------------------------------------------------------------------------------

    def quiet_until(self, request: RequestId) -> int:
        """Below this length, growing token by token, a request needs no block: `extend` would do nothing."""
        return self._rows[request].quiet_until

    def room_to_grow(self, request: RequestId, length: int, *, at_no_loss: bool = False) -> int:
        """The longest up to `length` that the pool has blocks for now; what the request has already if none.
        at_no_loss: without the eviction of a prefix that is likely to be wanted again."""
        return self._room.to_grow(self._rows[request], length, at_no_loss=at_no_loss)

    def chunk_end(self, request: RequestId, length: int) -> int:
        """Where a chunk of prefill up to `length` had better end."""
        return self._room.chunk_end(self._rows[request], length)

    # -- asking for what is there ------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._rows)

    def table(self, request: RequestId) -> list[list[BlockId]]:
        """The blocks of a request, [group][block of the sequence]; null where they were given back."""
        return [list(table.blocks(request)) for table in self._tables.each]

    def held_blocks(self, request: RequestId) -> tuple[bytes, ...]:
        """The blocks that a request holds in each group, as int32 in a row; empty if it is not open."""
        if request not in self._rows:
            return (b"",) * len(self._tables.each)
        return tuple(array("i", table.held(request)).tobytes() for table in self._tables.each)

    # -- acting: the life of a request -------------------------------------------------------------------------------

    def open(self, request: RequestId, hit: Hit, borders: Sequence[int] = (), *, is_asked: bool = True) -> None:
        """Begin a request that holds the blocks of `hit`. borders: lengths in tokens at which other prompts are likely
        to part from it. is_asked: by a client; else nothing is learnt from it."""
        borders = self._tables.borders(hit.chain, borders)
        row = self._add_row(Row(request, hit.chain, hit.encoder, hit.tokens))
        for table in self._tables.each:
            table.open(row, hit.tokens)
        if hit.tokens and any(table.has_source(request) for table in self._tables.each):
            row.sources = HELD
        row.marks = marks_of(hit.tokens, hit.branch, hit.chain.known, borders, self.plan.block_tokens)
        if self.is_caching:
            self._lookup.opened(hit.chain)
        if self.retention is not None:
            about = hit.chain.known, hit.tokens, tuple(borders), is_asked
            self._arrivals.append(Arrival(request, hit.chain, len(hit.chain.names), *about))

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
        # First what the last steps have written: it may give blocks back.
        if row.sources is COPIED:
            self._drop_sources(row)
        if written is None or length - written > 1 or row.chain.lag >= self._name_every:
            row.chain.grow()
            settled = self._tables.each
        else:
            settled = self._tables.moving
        for table in settled:
            table.settle(row)
        if self.hints.are_any:
            self.hints.expire()
        # Then blocks for the coming one.
        taken = self.pool.take(self._missing(row, length), request)
        copies = self._copies(row, taken) if row.sources is HELD else ()
        for table, new in zip(self._tables.each, taken, strict=True):
            table.append(row, new)
        saves = [save for table in self._tables.states for save in table.take_saves(row, length)]
        row.longest_step = max(row.longest_step, length - row.extent)
        row.extent = max(row.extent, length)
        row.quiet_until = self._next_event(row)
        return Growth(taken, copies, saves)

    def commit(self, request: RequestId) -> None:
        """The step that `extend` was for has run: its keys, values and states are written.

        Full blocks get their name in the prefix cache; blocks that no later token reads go back to the pool. A request
        that grows by single tokens can do without: `extend` does it when it next needs a block.
        """
        row = self._rows[request]
        row.chain.grow()
        self._drop_sources(row)
        for table in self._tables.each:
            table.settle(row)
        row.quiet_until = self._tables.next_event(row)

    def fork(self, parent: RequestId, child: RequestId, tokens: Sequence[int] | None = None) -> Growth:
        """A second request that goes on from where `parent` is. Full blocks are shared, the rest is copied.

        The copies must be made before either writes on.

        tokens: the child's own, which begin as the parent's; kept by reference. None: it will not differ in what is
        cached.

        Raises `PoolExhausted`, with nothing taken, when the pool has too few blocks.
        """
        row = self._rows[parent]
        taken = self.pool.take([table.copies_at_fork(row) for table in self._tables.each], child)
        chain = row.chain
        if tokens is not None and isinstance(chain, TokenChain):
            chain = chain.of(tokens)
        other = self._add_row(Row(child, chain, row.encoder, row.extent))
        copies = [
            copy
            for table, new in zip(self._tables.each, taken, strict=True)
            if (copy := table.fork(row, other, new)) is not None
        ]
        # A parent that has not begun waits for copies: then its child waits for the same ones.
        other.sources = HELD if row.sources is HELD else COPIED
        return Growth(taken, copies)

    def release(self, request: RequestId, length: int | None = None, retain: Retain = USUAL_RETENTION) -> None:
        """Give back all blocks. length: tokens that are written, when not all that blocks were taken for."""
        row = self._rows.pop(request)
        if length is not None:
            row.extent = length
        row.chain.grow()
        self._drop_sources(row)
        if self.is_caching:
            for table in self._tables.each:
                table.settle(row)
            if retain.is_lasting:
                self.hints.retain(request, [table.held(request) for table in self._tables.each], retain)
        for table in self._tables.each:
            table.finish(row, retain.tier)
        if self.retention is not None:
            self.retention.released(row, retain)
        self.pool.end(request)

    # -- acting: to host memory and back -----------------------------------------------------------------------------

    def swap_bytes(self, request: RequestId) -> int:
        """What `swap_out` would copy, about."""
        return self._swapping.num_bytes(request)

    def swap_out(self, request: RequestId, length: int) -> list[tuple[int, int, BlockId]] | None:
        """`release` a request whose first `length` tokens are written, and say what must be copied for it to go on from
        there later: (group, place in its table, block) each, before any other request writes to those blocks.

        None, with nothing done, when its blocks wait to be filled from others first.
        """
        moved = self._swapping.to_move(self._rows[request], length)
        if moved is not None:
            self.release(request, length)
        return moved

    def swap_in(
        self, request: RequestId, chain: Chain, length: int, places: Sequence[tuple[int, int]], encoder: Encoder | None
    ) -> list[BlockId]:
        """Open a request again where `swap_out` closed it. places: (group, place in its table) of what was copied, in
        the order of places within a group.

        Returns the blocks to copy it to, in that order. Raises `PoolExhausted`, with nothing taken.
        """
        row = Row(request, chain, encoder, length)
        blocks = self._swapping.restore(row, places)
        self._add_row(row)
        return blocks

    def abandon(self, request: RequestId) -> None:
        """`swap_in` was for nothing: the copies are not made."""
        self._swapping.abandon(self._rows.pop(request))

    # -- acting: what is cached --------------------------------------------------------------------------------------

    def expect(self, request: RequestId, length: int) -> None:
        """Another request waits to go on where `request` has computed `length` tokens: keep what it needs for that."""
        self._rows[request].expect(length)

    def touch(self, hit: Hit) -> None:
        """A request waits to take this prefix up: of what is cached, evict it last."""
        if hit.tokens and self.retention is not None:
            self.retention.await_hit(hit)

    def forget(self, group: int, block: BlockId) -> None:
        """Forget what one block holds."""
        self.pool.groups[group].forget(block)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, pin and lease. Open requests keep their blocks."""
        self.leased.forget_all()
        self.hints.forget_all()
        self.pool.forget_all()
        self._lookup.forget()
        if self.retention is not None:
            self.retention.forget_all()

    # -- the recount -------------------------------------------------------------------------------------------------

    def held(self) -> list[Counter[int]]:
        """[group]: how often tables, pins, leases and copies under way name each block."""
        counts = [table.count_held() for table in self._tables.each]
        for g, block in (*self.hints.pinned, *self.leased.held):
            counts[g][block] += 1
        return counts

    # -- parts of the verbs ------------------------------------------------------------------------------------------

    def _add_row(self, row: Row) -> Row:
        assert row.request not in self._rows, f"request {row.request} is open already"
        self._rows[row.request] = row
        return row

    def _copies(self, row: Row, taken: Sequence[Sequence[BlockId]]) -> Sequence[Copy]:
        """A prefix that ends inside a block, or in a state, goes on in a block of the request's own."""
        tables = zip(self._tables.each, taken, strict=True)
        copies = [copy for table, new in tables if (copy := table.copy(row, new)) is not None]
        row.sources = COPIED
        return copies

    def _drop_sources(self, row: Row) -> None:
        if row.sources is not DROPPED:
            for table in self._tables.each:
                table.drop_source(row)
            row.sources = DROPPED
