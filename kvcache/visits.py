"""What is noted of a request for the sake of what is kept: when it comes, and what was known of its prompt then."""

from typing import NamedTuple

from .ids import RequestId
from .points import Point
from .prefix import Chain
from .sorts import Kind, Sort, gap_bucket, new_bucket, turns_bucket


class Arrival(NamedTuple):
    """A request has begun. It is looked at when memory is needed or when a request leaves, so it costs its first token
    nothing."""

    request: RequestId
    chain: Chain
    blocks: int  # full ones of its prompt
    tokens: int
    found: int  # of them, in the cache
    borders: tuple[int, ...] = ()  # where other prompts are likely to part from it, in tokens
    is_asked: bool = True  # by a client; else it is prepared for the next one that asks


class Visit(NamedTuple):
    """What was known of a prompt when its request came."""

    gap: int
    turns: int
    known_tokens: int
    ready_tokens: int  # of those, up to the last point at which one could go on
    new_tokens: int
    end: Point | None  # at which it went on, or nearest before
    arrival: Arrival | None

    def sort(self, kind: Kind) -> Sort:
        """Of the points that it leaves."""
        return Sort(kind, gap_bucket(self.gap), turns_bucket(self.turns), new_bucket(self.new_tokens))
