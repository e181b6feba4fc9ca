"""Every error a person or a program can meet, as one tree.

Each error is a letter to whoever has to act: what was asked, what there is, what to do, with the numbers in the
sentence. Programs read `field` (what was wrong), `details` (the numbers) and `retryable` (can the same call succeed
later?). Anything that is not an `IntarsiaError` is a bug of ours.

    IntarsiaError
    ├── InvalidRequest       a request that can not be served as asked: change it
    │   └── RequestTooLarge  ... because it would not fit even with the whole pool to itself
    ├── InvalidSetting       a setting that can not work: change how the engine is started
    ├── ModelError           the checkpoint is at fault
    │   ├── ModelNotFound    there is no checkpoint at that place
    │   ├── CorruptCheckpoint  there is one, and it can not be read
    │   └── UnsupportedModel   it can be read, and we do not know how to run it
    ├── PoolExhausted        no blocks left right now (the scheduler's business; users never see it)
    └── EngineUnavailable    the engine is starting, stopping or gone: try again later
"""

from typing import ClassVar

Detail = str | int | float


class IntarsiaError(Exception):
    """Base of all errors of Intarsia.

    `field` names the offending input; `details` holds the numbers of the message for programs.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str | None = None, **details: Detail):
        super().__init__(message)
        self.message = message
        self.field = field
        self.details: dict[str, Detail] = details

    def __str__(self) -> str:
        return self.message

    def to_wire(self) -> list[object]:
        """As plain values, for MessagePack."""
        return [type(self).__name__, self.message, self.field, self.details]

    @staticmethod
    def from_wire(wire: list) -> "IntarsiaError":
        name, message, field, details = wire
        return ERRORS.get(name, IntarsiaError)(message, field=field, **details)


class InvalidRequest(IntarsiaError):
    """The request can not be served as asked; the same request will be refused again."""


class RequestTooLarge(InvalidRequest):
    """The request would not fit even if it had the whole pool to itself."""


class InvalidSetting(IntarsiaError):
    """The engine can not be started with these settings."""


class ModelError(IntarsiaError):
    """The checkpoint is at fault."""


class ModelNotFound(ModelError):
    """There is no checkpoint at that place."""


class CorruptCheckpoint(ModelError):
    """The checkpoint exists and can not be read."""


class UnsupportedModel(ModelError):
    """The checkpoint can be read, and we do not know how to run it."""


class PoolExhausted(IntarsiaError):
    """The pool has fewer free blocks than asked for. Nothing was taken."""

    retryable = True


class EngineUnavailable(IntarsiaError):
    """The engine is starting, stopping or gone."""

    retryable = True


def _tree(cls: type[IntarsiaError]) -> dict[str, type[IntarsiaError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


ERRORS = _tree(IntarsiaError)
"""Every error class by name, for those who rebuild an error from the wire."""
