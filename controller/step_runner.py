"""What an engine needs of its workers: of a worker group over streams, or of one worker in this process."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from ..errors import IntarsiaError
from ..proto.step import Step, StepResult
from ..proto.worker import WorkerStatus


class StepRunner(Protocol):
    """The workers of a model that is loaded, once their memory is allocated."""

    def start_step(self, step: Step) -> Awaitable[StepResult]:
        """Send a step on its way at once; its answer comes later. Answers are awaited in the order of steps."""
        ...

    async def prepare_form(self, kind: str, text: str) -> None:
        """Compile the form of an answer, beside the steps. Raises `InvalidRequest`, naming the field."""
        ...

    async def lost(self) -> IntarsiaError:
        """Wait until nothing can run any more; why that is."""
        ...

    async def rebuild(self) -> None:
        """Something is lost: begin again, with empty pages. Raises `EngineUnavailable` when that did not succeed, and
        `NoRoom` when it cannot."""
        ...

    async def status(self) -> Sequence[WorkerStatus]:
        """How each rank is, asked beside the steps."""
        ...
