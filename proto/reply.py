"""What comes for an answer, and how it waits for a slow reader: in little memory, and taken in pieces."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, overload

from ..kvcache.misses import Miss
from .codec import pack, unpack
from .leases import LeaseReceipt

PIECE_TOKENS = 64
"""At most, in one piece of what has waited: their texts are looked up in one go, and others wait so long."""

PIECE_ROW_BYTES = 2048
"""The same where there are log-probabilities, by their packed bytes: 300 for a token with 20 alternatives, each of
which becomes a text of its own."""

TOKEN_BYTES = 36
"""That a token takes while it waits."""


NO_MISSES: tuple[Miss, ...] = ()


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one position."""

    token_id: int  # the chosen token
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most probable tokens, best first
    rank: int = 0  # 1: no token is more probable; 0: not known


class Rows(Sequence[TokenLogprobs]):
    """Log-probabilities at positions in a row, packed as they travel: a tenth of the memory. They are unpacked whenever
    they are looked at."""

    __slots__ = ("packed",)

    def __init__(self, packed: Iterable[bytes] = ()):
        self.packed = tuple(packed)

    @classmethod
    def of(cls, rows: Iterable[TokenLogprobs]) -> "Rows":
        return rows if isinstance(rows, Rows) else cls(map(pack, rows))

    def to_wire(self) -> tuple[bytes, ...]:
        return self.packed

    @classmethod
    def from_wire(cls, wire: Iterable[bytes]) -> "Rows":
        return cls(wire)

    def __len__(self) -> int:
        return len(self.packed)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for row in self.packed:
            yield TokenLogprobs(*unpack(row))

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, place: slice) -> "Rows": ...
    def __getitem__(self, place: int | slice) -> "TokenLogprobs | Rows":
        if isinstance(place, slice):
            return Rows(self.packed[place])
        return TokenLogprobs(*unpack(self.packed[place]))

    def __add__(self, later: Iterable[TokenLogprobs]) -> "Rows":
        return Rows(self.packed + Rows.of(later).packed)

    def __radd__(self, earlier: Iterable[TokenLogprobs]) -> "Rows":
        return Rows.of(earlier) + self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"Rows.of({list(self)})"


def num_values(rows: Sequence[TokenLogprobs] | None) -> int:
    """Numbers to be told, about; the rows are taken to be alike."""
    return len(rows) * (1 + len(rows[-1].top)) if rows else 0


class Delta(NamedTuple):
    """What has come for one answer since the last one."""

    token_ids: tuple[int, ...]
    logprobs: Rows | None = None  # one per token, when asked for
    finish_reason: str | None = None  # None while running, else "stop" or "length"
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    prompt_logprobs: Rows | None = None  # of the prompt's second token and on; with the first delta
    answer: int = 0  # which one, when there are several
    queue_s: float = 0.0  # until its request's turn came; with the first delta
    misses: tuple[Miss, ...] = ()  # why the rest of the prompt was not found; with the first delta
    stop: str | None = None  # the text that ended it, which the front end finds
    lease: LeaseReceipt | None = None  # with the last delta, where a lease was asked for

    @classmethod
    def join(cls, deltas: "Sequence[Delta]") -> "Delta":
        """All deltas of one answer, in the order in which they came, as one. Takes time linear in the tokens; the rows
        stay packed."""
        first, last = deltas[0], deltas[-1]
        assert all(delta.answer == first.answer for delta in deltas), "these belong to several answers"
        rows = chain.from_iterable(Rows.of(delta.logprobs or ()).packed for delta in deltas)
        return last._replace(
            token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            logprobs=None if last.logprobs is None else Rows(rows),
            prompt_logprobs=first.prompt_logprobs,
            queue_s=first.queue_s,
            misses=first.misses,
        )

    @property
    def num_bytes(self) -> int:
        """About what it takes while it waits."""
        rows = (*Rows.of(self.logprobs or ()).packed, *Rows.of(self.prompt_logprobs or ()).packed)
        return len(self.token_ids) * TOKEN_BYTES + sum(map(len, rows))


class Backlog:
    """What has not been taken yet, by answer. The tokens of an answer are one piece, however many they have become.

    Invariant: an answer is in it if and only if something of it waits.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Delta | _Piece] = {}  # who is at the front is next

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return sum(each.num_bytes for each in self._waiting.values())

    def put(self, delta: Delta) -> None:
        earlier = self._waiting.get(delta.answer)
        if earlier is None:
            self._waiting[delta.answer] = delta
            return
        if isinstance(earlier, Delta):
            earlier = self._waiting[delta.answer] = _Piece(earlier)
        earlier.add(delta)

    def take(self, *, in_pieces: bool = True) -> Delta:
        """Of the answer whose turn it is, at most a piece; in_pieces: else all of it. Something must wait."""
        answer = next(iter(self._waiting))
        waiting = self._waiting.pop(answer)
        if isinstance(waiting, Delta) and len(waiting.token_ids) > 1 and in_pieces:
            waiting = _Piece(waiting)
        if isinstance(waiting, Delta):
            return waiting
        taken = waiting.take(waiting.count() if in_pieces else len(waiting.tokens))
        if waiting.tokens:
            self._waiting[answer] = waiting  # after the others
        return taken


class _Piece:
    """What waits of one answer."""

    __slots__ = ("about", "row_bytes", "rows", "tokens")

    def __init__(self, first: Delta):
        self.about = first._replace(token_ids=(), logprobs=None)
        self.tokens = list(first.token_ids)
        self.rows: list[bytes] | None = None if first.logprobs is None else list(Rows.of(first.logprobs).packed)
        self.row_bytes = sum(map(len, self.rows or ()))

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) * TOKEN_BYTES + self.row_bytes + self.about.num_bytes

    def add(self, delta: Delta) -> None:
        about = self.about
        self.tokens += delta.token_ids
        if delta.logprobs is not None and self.rows is not None:
            packed = Rows.of(delta.logprobs).packed
            self.rows += packed
            self.row_bytes += sum(map(len, packed))
        self.about = about._replace(
            finish_reason=delta.finish_reason,
            num_cached_tokens=max(about.num_cached_tokens, delta.num_cached_tokens),
            misses=about.misses or delta.misses,
            lease=delta.lease,
            prompt_logprobs=about.prompt_logprobs if about.prompt_logprobs is not None else delta.prompt_logprobs,
        )

    def count(self) -> int:
        """Tokens that are taken together."""
        count = min(PIECE_TOKENS, len(self.tokens))
        if self.rows is None:
            return count
        taken_bytes = 0
        for place, row in enumerate(self.rows[:count]):
            taken_bytes += len(row)
            if taken_bytes > PIECE_ROW_BYTES:
                return max(1, place)
        return count

    def take(self, count: int) -> Delta:
        """The first of them; the last piece says how the answer ended, the first one what is known of the prompt."""
        about, rows = self.about, self.rows
        taken = about._replace(
            token_ids=tuple(self.tokens[:count]),
            logprobs=None if rows is None else Rows(rows[:count]),
            finish_reason=about.finish_reason if count >= len(self.tokens) else None,
        )
        self.about = about._replace(prompt_logprobs=None)
        del self.tokens[:count]
        if rows is not None:
            self.row_bytes -= sum(map(len, rows[:count]))
            del rows[:count]
        return taken
