"""Prompts that front ends want prepared, on their way to the scheduler."""

from collections.abc import Callable

from ..proto.messages import Prepare
from ..proto.request import RequestOptions, SamplingParams
from ..proto.status import PreparedPrompt
from .admission.admission import Admission
from .scheduling.preparation import Preparation, Wanted

NOTHING_DRAWN = SamplingParams(max_tokens=1)


class Preparing:
    """Takes them, and wakes the engine."""

    def __init__(self, admission: Admission, preparation: Preparation, wake: Callable[[], None]):
        self._admission = admission
        self._preparation = preparation
        self._wake = wake

    def take(self, asked: Prepare, told: Callable[[PreparedPrompt], None]) -> None:
        """told: is called once, with what became of it. Raises `InvalidRequest` for what could never be asked for."""
        options = RequestOptions(tenant=asked.tenant, salt=asked.salt, lease=asked.lease)
        request = self._admission.prepared(asked.tokens, NOTHING_DRAWN, options)
        self._preparation.add(Wanted(request, min(asked.kept, len(request.tokens)), asked.passed, told))
        self._wake()
