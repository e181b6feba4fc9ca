"""What an engine and its front ends say to each other.

A connection keeps its front end's requests: when it closes, they are aborted and their blocks are free. A front end
has two connections, which end together: one for all of the messages below, and one on which nothing is under way. A
machine that is lost without a word is heard of there within three seconds; on the first it looks for a minute like a
front end that stands still. `Pair`, and `Idle` on the second, tell which two belong together.

The engine first says what it is (`EngineInfo`), then sends one `Delivery` per step, and the answers to questions.

Handles are numbers that the front end draws; a request for n answers takes n of them in a row. A viewer is the salt
whose figures and events are meant; None: all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import IntarsiaError
from ..kvcache.events import Cleared, Removed, Stored
from .codec import Tagged
from .reply import Delta
from .status import SnapshotQuery

# -- from a front end ------------------------------------------------------------------------------------------------


class Submit(NamedTuple):
    """A request. What is wrong with it is answered under its handle."""

    handle: int
    request: Sequence[Any]  # the plain values of a `GenerateRequest`


class Abort(NamedTuple):
    """One answer has said enough."""

    handle: int


class Enough(NamedTuple):
    """The text of one answer is complete. It ends as one that ends by itself, and its last delta tells of its lease."""

    handle: int


class Refused(NamedTuple):
    """So many requests the front end refused by itself, since the engine had just said that it is full."""

    requests: int


class AskLoad(NamedTuple):
    handle: int
    viewer: str | None


class AskCacheState(NamedTuple):
    handle: int
    viewer: str | None


class AskProbe(NamedTuple):
    """What a request with this prompt would meet. viewer: whose requests the load counts."""

    handle: int
    tokens: Sequence[int]
    salt: str
    viewer: str | None


class Prepare(NamedTuple):
    """Compute a prompt that is likely to be asked for, up to its last token, when there is room. Answered when it is
    done, or will not be."""

    handle: int
    tokens: Sequence[int]
    tenant: str
    salt: str
    kept: int  # tokens that an earlier sequence has in common with it
    passed: Sequence[int]  # how that one goes on, which no request will ask for; empty: that is not known
    lease: str = ""  # of the conversation that goes on so


class AskMetrics(NamedTuple):
    handle: int


class AskLeases(NamedTuple):
    handle: int
    viewer: str | None


class ReleaseLease(NamedTuple):
    """End a lease. Answered with whether there was one of that id."""

    handle: int
    lease: str
    viewer: str | None


class AskSnapshot(NamedTuple):
    handle: int
    query: SnapshotQuery


class WatchCache(NamedTuple):
    """Answered when all that is known has been told."""

    handle: int
    viewer: str | None


class UnwatchCache(NamedTuple):
    handle: int


class Pair(NamedTuple):
    """This connection is one of the two of this name."""

    name: bytes


class Idle(NamedTuple):
    """As `Pair`; nothing more will be under way here."""

    name: bytes


# -- from an engine --------------------------------------------------------------------------------------------------


class Delivery(NamedTuple):
    """What one step brought to one front end. Most of it is a token each, so those are columns."""

    handles: Sequence[int]
    tokens: Sequence[int]
    deltas: Sequence[tuple[int, Delta]] = ()  # by handle: first and last tokens, and those with log-probabilities
    errors: Sequence[tuple[int, IntarsiaError]] = ()  # by handle; what came for it is among the deltas


class Answer(NamedTuple):
    """To a question."""

    handle: int
    value: Any  # the plain values of what was asked for


class CacheEvents(NamedTuple):
    """To one who watches."""

    handle: int
    events: Sequence[Sequence[Any]]  # as `CACHE_EVENTS` has them


class EngineLost(NamedTuple):
    """The engine ends."""

    error: IntarsiaError
    may_come_back: bool  # another one may take over from it


FROM_FRONT_END = Tagged(
    Submit, Abort, Refused, AskLoad, AskCacheState, AskProbe, Prepare, AskMetrics, AskSnapshot, WatchCache,
    UnwatchCache, Pair, Idle, Enough, AskLeases, ReleaseLease, checked=True,
)  # fmt: skip

FROM_ENGINE = Tagged(Delivery, Answer, CacheEvents, EngineLost, checked=False)

CACHE_EVENTS = Tagged(Stored, Removed, Cleared, checked=False)
