"""Calls to Ray actors, with our own errors on the way back."""

from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from ..errors import EngineUnavailable, IntarsiaError

LOOPBACK = "127.0.0.1"
"""Where our channels listen when no other machine connects."""


async def answer(reference: Any, who: str) -> Any:
    """The result of an actor call. What an actor raised of ours comes back as it was raised.

    Raises `EngineUnavailable`, naming `who`, when the actor's process is gone.
    """
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, IntarsiaError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise EngineUnavailable(f"the {who} process is gone: {error}") from error
