"""What a point takes of the memory, in each group of layers, and how its blocks become the first to be evicted."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .encoder_table import EncoderTable
from .plan import Group, MemoryPlan
from .points import Point, names_between
from .pool import BlockPool
from .prefix import Chain, Encoder
from .reach import Keeps, moves_on
from .tables import Tables

MOST_LENGTHS = 4096
"""Of which it is remembered what it takes to go on there."""

LENGTHS_AT_A_POINT = 2
"""Ends inside the block after it. Of more, the oldest is given up."""


class PointSizes(ABC):
    """What points take, of a pool or of one that is only thought of.

    Groups that keep whole sequences have the blocks of a path. The others have *places*: the blocks of a window before
    a length, or the state just there.
    """

    def __init__(self, plan: MemoryPlan):
        numbered = list(enumerate(plan.groups))
        self._size = plan.block_tokens
        self._whole = [(g, group) for g, group in numbered if _keeps_all(group)]
        self._windows = [(g, group) for g, group in numbered if moves_on(group.reach)]
        self._states = [(g, group) for g, group in numbered if group.reach.keeps is Keeps.STATE]
        self._encoder_bytes = sum(g.block_bytes for g in plan.groups if g.reach.keeps is Keeps.ENCODER)
        self._place_bytes: dict[int, int] = {}  # by length, of those asked for of late
        self.has_places = bool(self._windows or self._states)  # is more needed to go on than all blocks before?
        self.path_block_bytes = sum(group.block_bytes for _, group in self._whole)  # of all groups together

    def place_bytes(self, length: int) -> int:
        """What it takes to go on at a length, beside all blocks before."""
        known = self._place_bytes.get(length)
        if known is None:
            if len(self._place_bytes) >= MOST_LENGTHS:
                self._place_bytes.clear()
            groups = [group for _, group in (*self._windows, *self._states)]
            known = self._place_bytes[length] = sum(g.blocks_between(length) * g.block_bytes for g in groups)
        return known

    def _own_window(self, point: Point, group: Group, length: int) -> tuple[int, int]:
        """The blocks of a window that serve no other point: from first to end."""
        first, stop = group.reach.oldest_needed(length) // self._size, point.end
        before = point.parent
        while before is not None and before.end > first:
            if before.is_ready:
                first = before.end
                break
            before = before.parent
        beyond = [child for child in point.children if child.is_kept]
        while beyond and first < stop:
            child = beyond.pop()
            if child.is_ready:
                stop = min(stop, group.reach.oldest_needed(min(child.lengths)) // self._size)
            elif group.reach.oldest_needed(child.end * self._size) // self._size < stop:
                beyond += [other for other in child.children if other.is_kept]
        return first, stop

    def encoder_bytes(self, point: Point) -> int:
        """Of a point that stands for an encoder's output."""
        return self._encoder_bytes * (point.end - point.start)

    def encoder_names(self, encoder: Encoder) -> list[tuple[int, list[bytes]]]:
        """(group, names of its blocks) wherever its output is cached."""
        return []

    # -- acting ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def keep(self, point: Point, first: int) -> None:
        """Blocks of its path from `first` on are there."""

    def end_at(self, point: Point, chain: Chain, length: int) -> None:
        """A request has left a point at this length."""
        end_name = chain.end(length) if length % self._size else None
        if (length % self._size and end_name is None) or not self._can_go_on(point, chain, length, end_name):
            return
        if length in point.lengths:
            point.lengths[length] = point.lengths.pop(length)  # the latest of them
            return
        while len(point.lengths) >= LENGTHS_AT_A_POINT:
            self.drop_length(point, next(iter(point.lengths)))
        self._add_length(point, length)
        point.lengths[length], point.is_ready = end_name, True

    @abstractmethod
    def _can_go_on(self, point: Point, chain: Chain, length: int, end_name: bytes | None) -> bool:
        """Is all there that a request needs to go on at this length?"""

    @abstractmethod
    def _add_length(self, point: Point, length: int) -> None:
        """Count what this length takes, beside what the point has."""

    @abstractmethod
    def drop_length(self, point: Point, length: int, least: int = 0) -> None:
        """What only this length takes is given up. least: of windows, blocks before this one are not."""

    @abstractmethod
    def demote_path(self, point: Point, first: int) -> None:
        """Its blocks from `first` on are given up, of groups that keep whole sequences."""


class PointBlocks(PointSizes):
    """Blocks of the pool: what is given up is evicted before all others."""

    def __init__(self, plan: MemoryPlan, pool: BlockPool, tables: Tables):
        super().__init__(plan)
        self._groups = pool.groups
        self._tables = tables.each
        self._encoders = [(g, table) for g, table in enumerate(tables.each) if isinstance(table, EncoderTable)]
        self._has_drafts = any(group.is_draft for _, group in self._whole)

    # -- asking ------------------------------------------------------------------------------------------------------

    def encoder_names(self, encoder: Encoder) -> list[tuple[int, list[bytes]]]:
        return [(g, table.parts(encoder)) for g, table in self._encoders if table.encoder_tokens(encoder)]

    def _can_go_on(self, point: Point, chain: Chain, length: int, end_name: bytes | None) -> bool:
        name = end_name or point.names[-1]
        if not all(name in self._groups[g].index for g, _ in self._states):
            return False
        return all(self._tables[g].reaches(chain, length) == length for g, _ in self._windows)

    # -- acting ------------------------------------------------------------------------------------------------------

    def keep(self, point: Point, first: int) -> None:
        pass  # the tables have given them back

    def _add_length(self, point: Point, length: int) -> None:
        pass  # likewise

    def end_at(self, point: Point, chain: Chain, length: int) -> None:
        super().end_at(point, chain, length)
        if self._has_drafts and length in point.lengths:
            point.draft_names = chain.draft_names[point.start : point.end]

    def drop_length(self, point: Point, length: int, least: int = 0) -> None:
        end_name = point.lengths.pop(length)
        if end_name is not None:
            for g, _ in (*self._windows, *self._whole):
                self._demote(g, (end_name,))
        for g, _ in self._states:
            name = end_name if end_name is not None else point.names[-1]
            self._demote(g, (name,))
        if point.lengths:
            return
        for g, group in self._windows:
            first, stop = self._own_window(point, group, length)
            self._demote(g, names_between(point, max(first, least), stop))

    def demote_path(self, point: Point, first: int) -> None:
        # The last ones first: so the front outlives the tail.
        if point.encoder is not None:
            self._demote(point.encoder[0], point.names)
            return
        for g, group in self._whole:
            names = point.draft_names if group.is_draft else point.names
            self._demote(g, names[first - point.start : point.kept - point.start][::-1])

    # -- parts of the verbs ------------------------------------------------------------------------------------------

    def _demote(self, g: int, names: Sequence[bytes]) -> None:
        group = self._groups[g]
        block_of = group.index
        group.make_low([block_of[name] for name in names if name in block_of])


def _keeps_all(group: Group) -> bool:
    return group.reach.keeps is Keeps.TOKENS and not moves_on(group.reach)
