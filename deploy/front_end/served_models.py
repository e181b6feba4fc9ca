"""The models behind one door: which front end answers a call, by the model that it names.

    call ──► its model's name ──► choose ──► the front end of that name, for as long as the call is answered
                                    │
                                    └──► UnknownModel, with the names that there are

Each model has an engine and a front end of its own. They share the door: addresses, keys, limits, and the responses
that are kept. A server of one model has one that needs no name.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any

from ...errors import EngineUnavailable, IntarsiaError, InvalidRequest, UnknownModel
from .front_end import FrontEnd

MOST_SHOWN_CHARS = 100
"""Of a name that was sent."""

CHOSEN: ContextVar[FrontEnd | None] = ContextVar("chosen", default=None)
"""Who answers the call; None: it has named no model."""


class ServedModels:
    """Front ends by the names of their models; in the order in which they are listed. Called, it gives that of the
    call, or any one where the call is not about a model."""

    def __init__(self, front_ends: Sequence[FrontEnd], failed: Collection[str] = ()):
        """failed: models that did not start. Raises `ValueError` when there is none that did."""
        if not front_ends:
            raise ValueError("no model is served")
        self._front_ends = {each.info.model: each for each in front_ends}
        self._failed = list(failed)

    def __call__(self) -> FrontEnd:
        return CHOSEN.get() or next(iter(self._front_ends.values()))

    def choose(self, model: Any) -> None:
        """Have this model answer the call. model: as it was sent.

        Raises `UnknownModel` for one that is not served, `EngineUnavailable` for one that did not start, and
        `InvalidRequest` where several are served and none is named.
        """
        if model is None and len(self._front_ends) + len(self._failed) == 1:
            CHOSEN.set(None)
            return
        if model is None:
            raise InvalidRequest(f"several models are served here: {self._names()}. Name one of them.", field="model")
        if isinstance(model, str) and model in self._failed:
            raise EngineUnavailable(f"the model `{model}` did not start; the server's output says why")
        if not isinstance(model, str) or model not in self._front_ends:
            raise UnknownModel(
                f"The model `{str(model)[:MOST_SHOWN_CHARS]}` does not exist here; there is {self._names()}. GET "
                "/v1/models lists what is served.",
                field="model",
            )
        CHOSEN.set(self._front_ends[model])

    def each(self) -> list[FrontEnd]:
        """All that started."""
        return list(self._front_ends.values())

    @property
    def roomiest(self) -> FrontEnd:
        """That of the model which takes the longest prompts."""
        return max(self.each(), key=lambda each: each.info.max_model_len)

    async def check_ready(self) -> bool:
        """Are all models ready? Raises `EngineUnavailable` when none is."""
        asked = await asyncio.gather(*(each.check_ready() for each in self.each()), return_exceptions=True)
        errors = [outcome for outcome in asked if isinstance(outcome, BaseException)]
        if len(errors) == len(asked) or any(not isinstance(error, IntarsiaError) for error in errors):
            raise errors[0]
        return not errors and not self._failed

    def _names(self) -> str:
        return " and ".join(f"`{name}`" for name in self._front_ends)


class OneModel(ServedModels):
    """A front end that may come later than the routes. Its routes say themselves what they think of other names."""

    def __init__(self, front_end: Callable[[], FrontEnd]):
        self._front_end = front_end
        self._failed = []

    def __call__(self) -> FrontEnd:
        return self._front_end()

    def choose(self, model: Any) -> None:
        """There is but one."""

    def each(self) -> list[FrontEnd]:
        return [self._front_end()]


def models_of(front_end: "FrontEnd | Callable[[], FrontEnd]") -> ServedModels:
    """What a door may be given: one front end, one that comes later, or several."""
    if isinstance(front_end, ServedModels):
        return front_end
    return OneModel((lambda: front_end) if isinstance(front_end, FrontEnd) else front_end)
