"""What a parser says of an answer, in the order of the answer. Pieces of one kind joined are the same however the
answer was cut."""

from typing import NamedTuple


class Thought(NamedTuple):
    """Some of the model's reasoning."""

    text: str


class Words(NamedTuple):
    """Some of what is said to the user."""

    text: str


class CallBegun(NamedTuple):
    """A call of a tool. Its arguments follow, up to its `CallEnded`."""

    name: str
    id: str | None  # the model's own, where a format has one that the template wants back


class ArgumentsPiece(NamedTuple):
    """Some of the JSON text of the arguments of the call that has begun."""

    text: str


class CallEnded(NamedTuple):
    """The call that began last has ended."""

    is_whole: bool  # False: the answer was cut in it, or it broke off behind what had been told already


Event = Thought | Words | CallBegun | ArgumentsPiece | CallEnded


class NotACall(Exception):
    """What looked like a call is none, so it is text."""


class CutOff(Exception):
    """The answer ended within a call."""
