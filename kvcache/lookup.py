"""The search for a cached prefix, and why a longer one was not found.

    prompt, blocks of 4     0..3   4..7   8..11  12..15  16..19
    full layers             [x]    [x]    [x]    [x]     [ ]      go on at 16, or before
    sliding layers          [ ]    [x]    [x]    [ ]     [ ]      go on at 12, from the blocks of their window
    states                  [ ]    [s]    [ ]    [ ]     [ ]      go on at 8, where a snapshot was saved
                                   ^ the hit: all groups can go on at 8

It goes from long to short. A group that cannot go on at a length says at which shorter one it could. So the search
skips lengths at which nothing can be found.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .group_blocks import Known
from .misses import CACHING_OFF, LAST_TOKEN, NEW, SALT, Miss, lost_tokens, merged
from .pool import BlockPool
from .prefix import Chain, Encoder, TokenChain
from .tables import Tables

REMEMBERED_NAMES = 1 << 16
"""Latest names of blocks of prompts, where states alone are kept: no block tells there that a prompt was known."""

REMEMBERED_PROMPTS = 256
"""Latest prompts remembered, to tell a prompt that another salt kept from its prefix."""


class Hit(NamedTuple):
    """A cached prefix. Good until the pool changes, so `open` it at once."""

    tokens: int
    chain: Chain
    misses: tuple[Miss, ...] = ()  # the other tokens of the prompt, by cause
    branch: int = 0  # where the prompt leaves what is known; 0: it does not, or not beyond `tokens`
    encoder: Encoder | None = None
    encoder_tokens: int = 0  # of its encoder's output, found in the cache
    version: int = 0  # of the pool, when it was looked up
    known: int = 0  # tokens of the prompt, then

    @property
    def lost(self) -> Mapping[str, int]:
        """Tokens that were cached once and will be computed again, by cause."""
        return lost_tokens(self.misses)


class Lookup:
    """Asks all groups at once, and changes nothing. It remembers the salts of the latest prompts."""

    def __init__(self, tables: Tables, pool: BlockPool, block_tokens: int, *, caching: bool):
        self._tables = tables.each
        self._keep_front = tables.keep_front
        self._pool = pool
        self._caching = caching
        self._known: Known = pool.known
        self._size = block_tokens
        self._passed: OrderedDict[bytes, None] | None = OrderedDict() if tables.are_states_alone else None
        self._prompts: OrderedDict[bytes, tuple[bytes, Sequence[int]]] = OrderedDict()  # by their first block's tokens

    def is_current(self, hit: Hit, chain: Chain) -> bool:
        """Would `find` find the same?"""
        return hit.chain is chain and hit.version == self._known.version and hit.known == chain.known

    def find(self, chain: Chain, encoder: Encoder | None) -> Hit:
        """The longest cached prefix from which every group can go on. At least the last token is left to compute."""
        if not self._caching:
            return Hit(0, chain, (Miss(CACHING_OFF, chain.known),), encoder=encoder)
        chain.grow()
        hit = self._search(chain, chain.known - 1, encoder)
        assert hit.tokens < chain.known, "no token is left to compute"
        return hit

    def opened(self, chain: Chain) -> None:
        """A request with this prompt begins: remember its salt, and where another could part from it."""
        if self._passed is not None:
            for name in chain.names:
                self._passed[name] = None
                self._passed.move_to_end(name)
            while len(self._passed) > REMEMBERED_NAMES:
                self._passed.popitem(last=False)
        if isinstance(chain, TokenChain) and len(chain.tokens) >= self._size:
            self._prompts[self._first_block(chain)] = chain.salt, chain.tokens
            if len(self._prompts) > REMEMBERED_PROMPTS:
                self._prompts.popitem(last=False)

    def forget(self) -> None:
        self._prompts.clear()
        if self._passed is not None:
            self._passed.clear()

    # -- the search --------------------------------------------------------------------------------------------------

    def _search(self, chain: Chain, limit: int, encoder: Encoder | None) -> Hit:
        """limit: of the length."""
        size = self._size
        known = self._ever_known(chain, limit)
        length = self._candidate(chain, min(limit, (known + 1) * size - 1), limit if known * size >= limit else -1)
        misses = [Miss(LAST_TOKEN if length == limit else NEW, chain.known - length)]
        while length > 0:
            # The group that lacks most says how far it could go on.
            shorter, lacking = length, None
            for table in self._tables:
                reached = table.reaches(chain, shorter)
                if reached < shorter:
                    shorter, lacking = reached, table
            if lacking is None:
                break
            # What lies between is lost, for that group's reason.
            cause = lacking.cause(chain, length)
            shorter = self._candidate(chain, shorter, -1)
            assert shorter < length, f"the search stays at {length} tokens"
            misses.append(Miss(cause, length - shorter, lacking.layers))
            length = shorter
        if length == 0 and len(misses) == 1 and (of_others := self._known_to_others(chain, limit)):
            misses = [Miss(NEW, chain.known - of_others), Miss(SALT, of_others)]
        branch = min(known * size, limit // size * size)
        return Hit(
            tokens=length,
            chain=chain,
            misses=merged(misses) if len(misses) > 1 else tuple(misses),
            branch=branch if branch > length else 0,
            encoder=encoder,
            encoder_tokens=max(table.encoder_tokens(encoder) for table in self._tables),
            version=self._known.version,
            known=chain.known,
        )

    def _candidate(self, chain: Chain, length: int, limit: int) -> int:
        """The longest prefix up to `length` that could be cached: `limit` itself, a known end, or full blocks."""
        blocks, tail = divmod(length, self._size)
        if tail == 0 or length == limit:
            return length
        full, ends = blocks * self._size, self._known.ends
        tails = ends.after(chain.names[blocks - 1]) if 0 < blocks <= len(chain.names) else None
        # Sequences that have these blocks in common may end after them in different tokens.
        return full + max((t for t in tails or () if t <= tail and chain.end(full + t) in ends), default=0)

    def _ever_known(self, chain: Chain, limit: int) -> int:
        """Blocks of a prompt, from the front, that some group holds, or held before they were evicted.

        Without a group that keeps the front of sequences, only the last of these blocks may be known, or only what ends
        inside the block after it.
        """
        most = min(len(chain.names), -(-limit // self._size))
        if not self._keep_front:
            while most > 0 and not self._was_known(name := chain.names[most - 1]) and not self._known.ends.after(name):
                most -= 1
            return most
        known = min(most, max(table.leading_run(chain) for table in self._tables))
        while known < most and self._was_known(chain.names[known]):
            known += 1
        return known

    def _was_known(self, name: bytes) -> bool:
        if self._passed is not None and name in self._passed:
            return True
        return any(name in group.index or group.was_known(name) for group in self._pool.groups)

    # -- prompts of other salts --------------------------------------------------------------------------------------

    def _known_to_others(self, chain: Chain, limit: int) -> int:
        """Tokens that are shared with a prompt of another salt."""
        if not isinstance(chain, TokenChain) or len(chain.tokens) < self._size:
            return 0
        other_salt, tokens = self._prompts.get(self._first_block(chain), (chain.salt, ()))
        if other_salt == chain.salt:
            return 0
        alike = 0
        for mine, other in zip(chain.tokens, tokens, strict=False):
            if mine != other:
                break
            alike += 1
        return min(alike, limit) // self._size * self._size

    def _first_block(self, chain: TokenChain) -> bytes:
        return array("I", chain.tokens[: self._size]).tobytes()
