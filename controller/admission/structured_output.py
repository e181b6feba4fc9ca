"""Structured output: the form of an answer is compiled before its request is queued.

The workers compile it beside the steps, so requests that run do not wait for it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from ...errors import EngineUnavailable, IntarsiaError, InvalidRequest
from ..request import Request

COMPILE_TIMEOUT_S = 5.0
"""Usual forms take milliseconds, the first one of a model a second more."""

LOOK_AGAIN_S = 0.2
"""For workers that were lost while they compiled."""


class Compilers(Protocol):
    """The workers, as far as they compile."""

    async def prepare_form(self, kind: str, text: str) -> None:
        """Raises `InvalidRequest`, naming the field, or `EngineUnavailable`."""
        ...


class StructuredOutput:
    """The forms that are being compiled."""

    def __init__(self, workers: Compilers):
        self._workers = workers
        self._compiling: set[asyncio.Task[None]] = set()

    def compile(self, form: tuple[str, str], then: Callable[[IntarsiaError | None], None]) -> None:
        """Compile a form in the background.

        form: its kind, which is the request's field, and its text
        then: is called with None when the workers have it, or with the reason why it cannot be compiled
        """
        task = asyncio.ensure_future(self._compile(*form, then))
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    def close(self) -> None:
        """Stop compiling; `then` is not called any more."""
        for task in self._compiling:
            task.cancel()

    async def _compile(self, kind: str, text: str, then: Callable[[IntarsiaError | None], None]) -> None:
        then(await self._refusal(kind, text))

    async def _refusal(self, kind: str, text: str) -> IntarsiaError | None:
        """Why a form cannot be compiled; None once the workers have it. Workers that are lost are waited for."""
        while True:
            try:
                await asyncio.wait_for(self._workers.prepare_form(kind, text), COMPILE_TIMEOUT_S)
                return None
            except TimeoutError:
                return InvalidRequest(
                    f"{kind} could not be compiled within {COMPILE_TIMEOUT_S:g} s; make it simpler", field=kind
                )
            except EngineUnavailable:
                await asyncio.sleep(LOOK_AGAIN_S)
            except IntarsiaError as refusal:
                return refusal


def too_complex(request: Request, why: str) -> InvalidRequest:
    """The form of its answer was compiled, and became too complex while tokens were chosen."""
    form, generated_tokens = request.sampling.form, len(request.tokens) - request.prompt_tokens
    return InvalidRequest(
        f"the answer's form became too complex after {generated_tokens} tokens: {why}; give a simpler one",
        field=form[0] if form else None,
        generated_tokens=generated_tokens,
    )
