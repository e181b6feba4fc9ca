"""What a part is: cases, in jobs that have a process each. Free of torch, so that a list of them costs nothing."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .bare import provide_msgpack
from .shapes import ENGINES

if TYPE_CHECKING:
    from .device import Bench

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is measured together.

    run    gives a row after the other, each written at once
    touch  launches the same kernels once, so that they are compiled; None: there are none of ours
    """

    name: str
    run: Callable[["Bench"], Iterator[Row]]
    touch: Callable[["Bench"], object] | None = None


class Job(NamedTuple):
    """Cases that share a process. `share` is of the time that is left, relative to those of the jobs after it."""

    part: str
    name: str  # of the job within its part; empty where a part has one job
    share: float

    @property
    def id(self) -> str:
        return f"{self.part}/{self.name}" if self.name else self.part

    def cases(self, is_rehearsed: bool) -> list[Case]:
        """Of this job, by the function `cases` of the part's file."""
        provide_msgpack()  # before anything of ours is imported
        module = importlib.import_module(f".{self.part}", __package__)
        return module.cases(self.name, is_rehearsed)


JOBS: Sequence[Job] = (
    Job("ceilings", "", 1),
    Job("families", "", 4),
    Job("compile", "", 3),
    Job("attention", "", 6),
    Job("states", "", 2),
    Job("sampling", "", 2),
    Job("tokenwise", "", 2),
    Job("products", "", 2),
    Job("packed", "", 2),
    Job("pages", "", 1),
    *(Job("errors", dtype, 2) for dtype in ("bfloat16", "float32", "float16")),
    *(Job("engine", engine.name, engine.share) for engine in ENGINES),
)

PARTS = tuple(dict.fromkeys(job.part for job in JOBS))
FIRST = tuple(part for part in PARTS if part != "engine")
SECOND = ("ceilings", "compile", "engine")


def jobs_of(parts: Sequence[str]) -> list[Job]:
    """parts: or single jobs of them, by their ids"""
    return [job for job in JOBS if job.part in parts or job.id in parts]
