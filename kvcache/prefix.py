"""Names of prefixes: what a block holds is named by a hash of all tokens up to its end.

    tokens   0 .. 15 | 16 .. 31 | 32 .. 40
    names     n0     |   n1     |  end(41)

One running SHA-256 over key, salt and tokens gives a name per full block; a prefix that ends inside a block has an
*end* name, made of the name before it and the tokens since. The key is a secret of the cluster, so that no one outside
can make two prefixes of one name; prompts of different salts never share. The last bytes of a name are its owner's
mark, a digest of key and salt. It tells who may hear of a block, and nothing has to be stored for that.
"""

import secrets
from array import array
from collections.abc import Container, Sequence
from hashlib import sha256
from itertools import pairwise
from struct import iter_unpack
from typing import NamedTuple, Protocol

from .name_tokens import NameTokens

HASH_BLOCK_BYTES = 64  # of SHA-256: a padded key of this size costs one compression, once

MARK_BYTES = 8
"""Of a name's 32. Those before it are more than enough for no two prefixes to have the same."""

REMEMBERED_MARKS = 256
"""Latest salts whose mark is not computed again."""


class Encoder(NamedTuple):
    """What a request brings for layers that attend to an encoder's output."""

    content: bytes  # hash of it: the same image has the same one
    tokens: int


def owner_mark(key: bytes, salt: bytes) -> bytes:
    """How the names of one salt end."""
    return sha256(key + b"owner" + sha256(salt).digest()).digest()[:MARK_BYTES]


def marked(digest: bytes, mark: bytes) -> bytes:
    """A name."""
    return digest[:-MARK_BYTES] + mark


class Chain(Protocol):
    """The names of one sequence, which may grow."""

    @property
    def names(self) -> list[bytes]:
        """One per full block, as far as they were computed."""
        ...

    @property
    def mark(self) -> bytes:
        """How they end."""
        ...

    @property
    def known(self) -> int:
        """Tokens whose values are known."""
        ...

    @property
    def draft_names(self) -> list[bytes]:
        """The same for a drafter, whose last entry of a block was made with the token after it: that is named, too."""
        ...

    @property
    def lag(self) -> int:
        """Tokens that are known and part of no name yet."""
        ...

    def grow(self) -> list[bytes]:
        """Compute the names of all full blocks of the tokens known by now."""
        ...

    def end(self, length: int) -> bytes | None:
        """Name of the first `length` tokens, which end inside a block; None when there can be none."""
        ...


class TokenChain:
    """Names of a token sequence. Keeps the sequence by reference: what its owner appends is seen by `grow`."""

    __slots__ = ("_block_tokens", "_draft_names", "_end_key", "_notes", "_running", "mark", "names", "salt", "tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        block_tokens: int,
        *,
        key: bytes,
        salt: bytes = b"",
        mark: bytes | None = None,
        notes: NameTokens | None = None,
    ):
        """mark: of the owner; None: made of the salt. notes: where names and their tokens are noted"""
        self.mark = owner_mark(key, salt) if mark is None else mark
        self.tokens = tokens
        self.salt = salt
        self.names: list[bytes] = []
        self._draft_names: list[bytes] = []
        self._block_tokens = block_tokens
        # The salt enters as its hash, so that no salt and first tokens together pose as another salt.
        self._running = sha256(key.ljust(HASH_BLOCK_BYTES, b"\0") + sha256(salt).digest())
        self._end_key = key
        self._notes = notes

    @property
    def draft_names(self) -> list[bytes]:
        names, size = self._draft_names, self._block_tokens
        for length in range((len(names) + 1) * size + 1, min(len(self.names) * size + 1, len(self.tokens)) + 1, size):
            names.append(self._tail_name(b"draft", length - 1, length))
        return names

    def of(self, tokens: Sequence[int]) -> "TokenChain":
        """A chain of the same key and salt over other tokens."""
        key, salt, mark = self._end_key, self.salt, self.mark
        return TokenChain(tokens, self._block_tokens, key=key, salt=salt, mark=mark, notes=self._notes)

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def lag(self) -> int:
        """Tokens that are known and part of no name yet."""
        return len(self.tokens) - len(self.names) * self._block_tokens

    def grow(self) -> list[bytes]:
        names, size = self.names, self._block_tokens
        first, end = len(names) * size, len(self.tokens) // size * size
        if first < end:
            packed = array("I", self.tokens[first:end]).tobytes()
            update, digest, append = self._running.update, self._running.digest, names.append
            mark = self.mark
            for (block,) in iter_unpack(f"{size * 4}s", packed):
                update(block)
                append(digest()[:-MARK_BYTES] + mark)
            if self._notes is not None:
                self._notes.note(names, first // size, packed)
        return names

    def end(self, length: int) -> bytes | None:
        blocks = length // self._block_tokens
        if blocks == 0 or blocks > len(self.names) or length > len(self.tokens):
            return None
        return self._tail_name(b"end", blocks * self._block_tokens, length)

    def _tail_name(self, kind: bytes, full: int, length: int) -> bytes:
        tail = array("I", self.tokens[full:length]).tobytes()
        before = self.names[full // self._block_tokens - 1]
        return marked(sha256(self._end_key + kind + before + tail).digest(), self.mark)


def name_at(chain: Chain, length: int, block_tokens: int) -> bytes | None:
    """The name of the first `length` tokens; None of less than a block, or of more than there are."""
    blocks, tail = divmod(length, block_tokens)
    if tail:
        return chain.end(length)
    return chain.names[blocks - 1] if 0 < blocks <= len(chain.names) else None


def shared_blocks(names: Sequence[bytes], others: Sequence[bytes], start: int = 0) -> int:
    """Full blocks that two sequences have in common. Names are of all that comes before: from some on they differ.

    others: from block `start` on; up to there the two are alike.
    """
    low, high = 0, min(len(names) - start, len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if names[start + middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return start + low


class GivenChain:
    """Names that are known from elsewhere, as in a trace that lists block ids instead of tokens."""

    __slots__ = ("known", "names")

    mark = bytes(MARK_BYTES)

    def __init__(self, names: list[bytes], length: int):
        self.names = names
        self.known = length

    @property
    def lag(self) -> int:
        return 0

    @property
    def draft_names(self) -> list[bytes]:
        return [name + following for name, following in pairwise(self.names)]

    def grow(self) -> list[bytes]:
        return self.names

    def end(self, length: int) -> bytes | None:
        return None


class Namer:
    """Makes the chains of one pool, under its secret key."""

    def __init__(self, key: bytes | None, block_tokens: int):
        """key: drawn when None."""
        self._key = key or secrets.token_bytes(32)
        self._block_tokens = block_tokens
        self.notes: NameTokens | None = None  # of the chains that are made from now on; None: they are not asked for
        self._marks: dict[bytes, bytes] = {}  # by salt

    def chain(self, tokens: Sequence[int], salt: bytes, encoder: Encoder | None) -> TokenChain:
        """encoder: what the text is read beside, which is part of its names."""
        content = sha256(self._key + encoder.content).digest() if encoder is not None else b""
        notes = self.notes if encoder is None else None  # tokens alone do not say what stands beside a picture
        return TokenChain(
            tokens, self._block_tokens, key=self._key, salt=salt + content, mark=self.mark(salt), notes=notes
        )

    def mark(self, salt: bytes) -> bytes:
        """How the names of a salt end."""
        if salt not in self._marks:
            if len(self._marks) >= REMEMBERED_MARKS:
                self._marks.clear()
            self._marks[salt] = owner_mark(self._key, salt)
        return self._marks[salt]

    def of_owner(self, encoder: Encoder, salt: bytes, mark: bytes) -> Encoder:
        """The same content, which the encoders of other salts do not share. mark: of the text's names."""
        content = sha256(self._key + salt + encoder.content).digest()
        return encoder._replace(content=marked(content, mark))


class Ends:
    """Prefixes that end inside a block and are cached: where to look beyond the last full block.

    `after(name)` gives, for the prefix of that name, how many more tokens there are to the cached ends. Blocks that go
    on beyond an end hold it, too, under names of their own: `holder(end)` gives one.

    Invariant: the counts of an end say in how many blocks it is cached; nothing is kept of an end that is in none.
    """

    def __init__(self) -> None:
        self._tails: dict[bytes, dict[int, int]] = {}  # name of the full blocks -> tail tokens -> cached blocks
        self._of: dict[bytes, tuple[bytes, int, int]] = {}  # end -> name of the full blocks, tail tokens, cached blocks
        self._within: dict[bytes, tuple[bytes, int, dict[bytes, None]]] = {}  # end -> as above, names of its holders
        self._held: dict[bytes, list[bytes]] = {}  # name of a holder -> ends

    def __len__(self) -> int:
        return len(self._of) + len(self._within)

    def __contains__(self, end: bytes | None) -> bool:
        return end in self._of or end in self._within

    def after(self, name: bytes) -> dict[int, int] | None:
        return self._tails.get(name)

    def holder(self, end: bytes | None, index: Container[bytes]) -> bytes | None:
        """The name of a block that holds this end, and ends there or goes on. index: of the group that must have it"""
        if end is None or end in index:
            return end
        holders = self._within[end][2] if end in self._within else ()
        return next((name for name in holders if name in index), None)

    def add(self, end: bytes, full: bytes, tail_tokens: int) -> None:
        self._add_tail(full, tail_tokens)
        self._of[end] = full, tail_tokens, self._of[end][2] + 1 if end in self._of else 1

    def add_within(self, end: bytes, full: bytes, tail_tokens: int, holder: bytes) -> bool:
        """holder: the name of a block that holds the end and goes on. False: that is known."""
        if end not in self._within:
            self._add_tail(full, tail_tokens)
            self._within[end] = full, tail_tokens, {}
        holders = self._within[end][2]
        if holder in holders:
            return False
        holders[holder] = None
        self._held.setdefault(holder, []).append(end)
        return True

    def remove(self, end: bytes) -> None:
        """One cached block of that end is evicted. Any other name is ignored."""
        if end not in self._of:
            return
        full, tail_tokens, count = self._of.pop(end)
        if count > 1:
            self._of[end] = full, tail_tokens, count - 1
        assert self._tails[full][tail_tokens] >= count, "fewer prefixes end there than are cached"
        self._drop_tail(full, tail_tokens)

    def concerns(self, name: bytes) -> bool:
        """Is it the name of an end, or of a block that holds one?"""
        return name in self._of or name in self._held

    def remove_holder(self, name: bytes) -> None:
        """No group has a block of that name any more. Any other name is ignored."""
        for end in self._held.pop(name, ()):
            full, tail_tokens, holders = self._within[end]
            del holders[name]
            if not holders:
                del self._within[end]
                self._drop_tail(full, tail_tokens)

    def _add_tail(self, full: bytes, tail_tokens: int) -> None:
        tails = self._tails.setdefault(full, {})
        tails[tail_tokens] = tails.get(tail_tokens, 0) + 1

    def _drop_tail(self, full: bytes, tail_tokens: int) -> None:
        tails = self._tails[full]
        tails[tail_tokens] -= 1
        if tails[tail_tokens] == 0:
            del tails[tail_tokens]
            if not tails:
                del self._tails[full]
