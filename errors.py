"""Every error a person or a program can meet, as one tree.

Each error is a letter to the person who has to act: what was asked, what there is, what to do, with the numbers in the
sentence. Programs read `field` (what was wrong), `details` (the numbers) and `retryable` (can the same call succeed
later?). Anything that is not an `IntarsiaError` is a bug of ours.

    IntarsiaError
    ├── InvalidRequest       a request that cannot be served as asked: change it
    │   ├── RequestTooLarge  ... because it would not fit even with the whole pool to itself
    │   │   └── ContextTooLong  ... because its prompt is longer than the model takes
    │   ├── UnknownModel     ... because it names a model that is not served here
    │   ├── UnknownLease     ... because it names a lease that is not held, or not any more
    │   └── UnknownResponse  ... because it names a response that is not kept here
    │       └── UnknownPrevious  ... as the one that it goes on from
    ├── InvalidSetting       a setting that cannot work: change how the engine is started
    ├── ModelError           the checkpoint is at fault
    │   ├── ModelNotFound    there is no checkpoint at that place
    │   ├── CorruptCheckpoint  there is one, and it cannot be read
    │   └── UnsupportedModel   it can be read, and we do not know how to run it
    ├── Unauthenticated      the server wants a key, and this is none of its keys
    ├── RequestAborted       another caller asked to stop it
    ├── DeadlineExceeded     the answer did not come in the time that was given
    ├── PoolExhausted        no blocks left right now (the scheduler's business; users never see it)
    ├── Overloaded           more is asked of the server at once than it takes: try again later
    │   └── OverQuota        ... because the caller itself has as much here as it may
    └── EngineUnavailable    the engine is starting, stopping or gone: try again later
        └── OutOfMemory      ... because a step did not fit in memory; smaller ones are tried
"""

from typing import ClassVar, Self

Detail = str | int | float


class IntarsiaError(Exception):
    """Base of all errors of Intarsia.

    `field` names the offending input; `details` holds the numbers of the message for programs.
    """

    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None
    """How long to wait before the same call, where that is known to help: in `details`, or usual for the class."""

    def __init__(self, message: str, *, field: str | None = None, **details: Detail):
        super().__init__(message)
        self.message = message
        self.field = field
        self.details: dict[str, Detail] = details
        if "retry_after_s" in details:
            self.retry_after_s = float(details["retry_after_s"])

    def __str__(self) -> str:
        return self.message

    def bare(self) -> Self:
        """Without the way it came: the frames of a traceback keep all that they worked on, and where they keep the
        error, too, until Python's collector of cycles comes by. What is told of a refusal needs none of that."""
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self

    def again(self) -> "IntarsiaError":
        """The same, to be raised anew."""
        return self.from_wire(self.to_wire())

    def to_wire(self) -> list[object]:
        """As plain values, for MessagePack."""
        return [type(self).__name__, self.message, self.field, self.details]

    @staticmethod
    def from_wire(wire: list) -> "IntarsiaError":
        name, message, field, details = wire
        return ERRORS.get(name, IntarsiaError)(message, field=field, **details)


class InvalidRequest(IntarsiaError):
    """The request cannot be served as asked; the same request will be refused again."""


class RequestTooLarge(InvalidRequest):
    """The request would not fit even if it had the whole pool to itself."""


class ContextTooLong(RequestTooLarge):
    """The prompt is longer than the model takes."""

    @classmethod
    def of(cls, what: str, max_model_len: int, *, field: str, asked: int, limit: int) -> Self:
        """what: of the prompt there is too much, in words. The rest is said so that clients know what to do: many look
        for these words of OpenAI's, and some for "prompt is too long"."""
        return cls(
            f"the prompt is too long: {what}; this model's maximum context length is {max_model_len} tokens "
            "(max_model_len), one of them for the answer. Shorten the prompt.",
            field=field,
            asked=asked,
            limit=limit,
        )


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""


class UnknownResponse(InvalidRequest):
    """The request names a response, a conversation or an item that is not kept here, or not any more."""


class UnknownPrevious(UnknownResponse):
    """The conversation that the request goes on with is not kept here, or not any more."""


class UnknownLease(InvalidRequest):
    """The request names a lease that is not held here, or not any more."""

    @classmethod
    def of(cls, lease: str) -> "UnknownLease":
        return cls(
            f"no lease with id '{lease[:100]}' is held: its time is over, it was released or taken over by the next "
            "turn, or the cache was reset",
            field="lease",
        )


class InvalidSetting(IntarsiaError):
    """The engine cannot be started with these settings."""


class ModelError(IntarsiaError):
    """The checkpoint is at fault."""


class ModelNotFound(ModelError):
    """There is no checkpoint at that place."""


class CorruptCheckpoint(ModelError):
    """The checkpoint exists and cannot be read."""


class UnsupportedModel(ModelError):
    """The checkpoint can be read, and we do not know how to run it."""


class Unauthenticated(IntarsiaError):
    """The server wants a key, and the caller has none, or another."""


class RequestAborted(IntarsiaError):
    """Another caller asked to stop the request."""


class DeadlineExceeded(IntarsiaError):
    """The answer did not come within the time that the request gave. What was generated by then has been sent."""

    retryable = True


class PoolExhausted(IntarsiaError):
    """The pool has fewer free blocks than asked for. Nothing was taken."""

    retryable = True
    retry_after_s = 1.0


class Overloaded(IntarsiaError):
    """More is asked of the server at once than it takes. Nothing of the request was done."""

    retryable = True
    retry_after_s = 1.0


class OverQuota(Overloaded):
    """The caller itself has as much here as it may; requests of others are taken."""


class EngineUnavailable(IntarsiaError):
    """The engine is starting, stopping or gone."""

    retryable = True
    retry_after_s = 1.0


class OutOfMemory(EngineUnavailable):
    """A step did not fit in memory beside weights and pages. Requests go on in smaller ones; who is told was alone in
    the smallest."""


def _tree(cls: type[IntarsiaError]) -> dict[str, type[IntarsiaError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


ERRORS = _tree(IntarsiaError)
"""Every error class by name, for those who rebuild an error from the wire."""
