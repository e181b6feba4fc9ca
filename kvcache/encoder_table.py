"""Block tables of layers that attend to an encoder's output, such as the tokens of an image.

The blocks of a row do not grow with the text. They are written with the first step, and named by the content they hold.
"""

from collections.abc import Sequence
from hashlib import sha256

from .eviction import Tier
from .group_table import Copy, GroupRow, GroupTable, Row
from .ids import BlockId
from .misses import EVICTED
from .prefix import MARK_BYTES, Chain, Encoder, marked
from .reach import NEVER


class EncoderTable(GroupTable[GroupRow]):
    """Invariant: a row has all blocks of its encoder's tokens, or none. Blocks with a name are never written again."""

    # -- asking for a prefix -----------------------------------------------------------------------------------------

    def reaches(self, chain: Chain, length: int) -> int:
        return length  # independent of the text

    def cause(self, chain: Chain, length: int) -> str:
        return EVICTED

    def needed(self, chain: Chain, length: int) -> list[int]:
        return []

    def encoder_tokens(self, encoder: Encoder | None) -> int:
        if encoder is None or not all(name in self._index for name in self.parts(encoder)):
            return 0
        return encoder.tokens

    # -- asking for a row --------------------------------------------------------------------------------------------

    def missing(self, row: Row, length: int) -> int:
        wanted = -(-row.encoder.tokens // self._size) if row.encoder is not None else 0
        lacking = wanted - len(self._rows[row.request].blocks)
        assert lacking in (0, wanted), f"request {row.request} has {lacking} of {wanted} blocks of its encoder"
        return lacking

    def next_event(self, row: Row) -> int:
        own = self._rows[row.request]
        return NEVER if own.named == len(own.blocks) else row.extent + 1

    def copies_at_fork(self, row: Row) -> int:
        return 0

    # -- acting ------------------------------------------------------------------------------------------------------

    def open(self, row: Row, length: int) -> None:
        own = self._begin(row.request, GroupRow())
        if row.encoder is not None and self._caching and self.encoder_tokens(row.encoder):
            own.blocks = [BlockId(self._index[name]) for name in self.parts(row.encoder)]
            own.named = len(own.blocks)
            assert own.named * self._size >= row.encoder.tokens, f"request {row.request} finds a part of an image"
            self._blocks.share(own.blocks)

    def fork(self, row: Row, child: Row, new: Sequence[BlockId]) -> Copy | None:
        assert not new, "all of an encoder's blocks are shared"
        own, other = self._rows[row.request], self._begin(child.request, GroupRow())
        other.blocks, other.named = list(own.blocks), own.named
        self._blocks.share(other.blocks)

    def settle(self, row: Row) -> None:
        own = self._rows[row.request]
        if self._caching and row.encoder is not None and row.extent and own.named < len(own.blocks):
            names = self.parts(row.encoder)
            if self._index.keys().isdisjoint(names):
                self._blocks.name(own.blocks, names)
            own.named = len(own.blocks)
            assert len(names) == own.named, f"request {row.request} has {own.named} blocks for {len(names)} names"

    def finish(self, row: Row, tier: Tier) -> None:
        self._blocks.give_back(reversed(self._end(row.request).blocks), tier)

    def restore(self, row: Row, places: Sequence[int], new: Sequence[BlockId]) -> None:
        assert len(places) == len(new), f"request {row.request} gets {len(new)} blocks for {len(places)}"
        own = self._begin(row.request, GroupRow())
        own.blocks, own.named = list(new), len(new)

    def parts(self, encoder: Encoder) -> list[bytes]:
        """The names of its blocks."""
        count = -(-encoder.tokens // self._size)
        content, mark = encoder.content, encoder.content[-MARK_BYTES:]
        return [marked(sha256(b"%d/%d/" % (n, encoder.tokens) + content).digest(), mark) for n in range(count)]
