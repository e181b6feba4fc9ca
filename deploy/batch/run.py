"""`intarsia batch`: every line of a file gets its result, however often the run is interrupted."""

import asyncio
import contextlib
import hashlib
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from starlette.types import ASGIApp

from ...controller.startup import EngineSettings
from ...errors import EngineUnavailable, IntarsiaError, InvalidSetting
from ...proto.status import EngineLoad
from ..checkpoints.weights import weights_bar
from ..front_end.front_end import FrontEnd, FrontEndSettings
from ..front_end.tokenizer import Tokenizer
from ..openai.app import make_app
from ..start.ending import SIGNALS, leave_at_the_latest, say
from ..terminal.banner import counted
from .answering import OFFLINE, answer
from .journal import Input, Journal, begin_anew, partial_of
from .survey import NO_REQUEST, Outcome, outcome, survey

if TYPE_CHECKING:
    from ..start.launch import RunningEngine

AHEAD = 2
"""Lines in flight for each request that an engine runs at once. More than 1, so that a request always waits."""

REFUSED, STOPPED = 3, 130
"""Exit statuses beside 0 (done) and 2 (nothing could be done as asked)."""

END_WITHIN_S = 1.8
"""Time to end after a signal to stop. Finished lines are in the journal."""

TELL_EVERY_S = 10.0
"""Seconds between two lines of progress, where there is no screen to draw a bar on."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Names the batch to answer and the file for its results."""

    source: Path
    out: Path
    num_engines: int = 1  # that share the lines, each with the whole model
    restart: bool = False  # begin anew, whatever earlier runs left
    strict: bool = False  # a line that is refused is a failure of the run

    def __post_init__(self):
        if self.num_engines < 1:
            raise InvalidSetting(f"num_engines must be at least 1, got {self.num_engines}", field="num_engines")
        if self.source.absolute() == self.out.absolute():
            raise InvalidSetting(f"{self.out} is the batch itself; choose another --out", field="out")


async def run_batch(settings: BatchSettings, engine: EngineSettings) -> Outcome | None:
    """Answer all lines and return the outcome; None when a signal stopped it before.

    Raises `InvalidSetting` for files that do not fit, `EngineUnavailable` when all engines are gone; what is done is
    kept for the next run then.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())  # a log has whole lines
    source = Input(settings.source)
    # A finished batch is not answered twice, unless --restart says so.
    if settings.restart:
        begin_anew(settings.out)
    elif is_there(settings.out, source):
        found = outcome(settings.out, source.numbers)
        console.print(f"{settings.out} has all {len(source):,} results already (--restart begins anew): {found}")
        return found
    served = engine.served_model_name or Path(engine.model.model_dir).name
    for note in survey(source, served).notes(served):
        console.print(f"note: {note}", markup=False)
    # The journal holds what earlier runs answered; the rest is answered now.
    journal = Journal(settings.out, source, {"model": _fingerprint(engine)})
    try:
        if journal.resumed:
            console.print(f"{journal.resumed:,} of {len(source):,} results are there already")
        if not journal.is_complete and not await _answer_all(settings, engine, source, journal, console):
            console.print(
                f"stopped: {journal.count:,} of {len(source):,} results are in {journal.path}; "
                "the same command goes on from there"
            )
            return None
        journal.finish()
    finally:
        journal.close()
    found = outcome(settings.out, source.numbers)
    console.print(f"{settings.out}: {counted(len(source), 'result')}, {found}", markup=False)
    return found


def is_there(out: Path, source: Input) -> bool:
    """Is this the finished result of the same number of lines? Raises `InvalidSetting` if it is something else."""
    if not out.exists() or partial_of(out).exists():
        return False
    with out.open("rb") as file:
        lines = sum(line.startswith(b'{"id":"batch_req_') for line in file)
    if lines != len(source):
        raise InvalidSetting(
            f"{out} exists, and has {lines:,} results while {source.path} has {len(source):,} lines. Choose another "
            "--out, or begin anew with --restart.",
            field="out",
        )
    return True


async def _answer_all(
    settings: BatchSettings, engine: EngineSettings, source: Input, journal: Journal, console: Console
) -> bool:
    """False when it was stopped."""
    async with _engines(settings.num_engines, engine) as engines:
        with _stop_signals() as stopped:  # once Ray has started, which has handlers of its own
            started = time.monotonic()
            with _progress(console, journal, len(source)):
                work = asyncio.ensure_future(_share(source, journal, engines, engine))
                await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    say("stopping ...")
                    leave_at_the_latest(END_WITHIN_S, STOPPED)
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                    return False
                work.result()
            await _report(console, journal, engines, time.monotonic() - started)
    return True


async def _share(source: Input, journal: Journal, engines: "list[RunningEngine]", settings: EngineSettings) -> None:
    """Engines take lines from one list as they have room. One that is gone leaves its lines to the others."""
    tokenizer = Tokenizer.of(settings.model)
    todo = source.lines(journal)
    given_up: list[tuple[int, bytes]] = []  # by engines that have gone

    async def work(engine: "RunningEngine", app: ASGIApp) -> None:
        while engine.client.connection.failure is None:
            place, text = given_up.pop() if given_up else next(todo, (None, b""))
            if place is None:
                return
            done = await answer(app, text, source.numbers[place])
            if done is None:
                given_up.append((place, text))
            else:
                journal.add(place, done)

    # Each engine has a front end, and as many tasks as lines in flight.
    front_end_settings = FrontEndSettings(max_streams=AHEAD * settings.scheduler.max_num_seqs, seeds_by_id=True)
    workers = []
    for engine in engines:
        front_end = FrontEnd(engine.client, tokenizer, front_end_settings, limits=OFFLINE)
        app = make_app(lambda front_end=front_end: front_end)
        workers += [work(engine, app) for _ in range(AHEAD * settings.scheduler.max_num_seqs)]
    await asyncio.gather(*workers)
    # All engines have gone before the lines were done.
    if not journal.is_complete:
        failure = next(
            (engine.client.connection.failure for engine in engines if engine.client.connection.failure), None
        )
        raise failure or EngineUnavailable("lines were left over; run the same command again")


@contextlib.asynccontextmanager
async def _engines(count: int, settings: EngineSettings) -> "AsyncIterator[list[RunningEngine]]":
    """One after another, since the first one may have to start Ray."""
    from ..start.launch import start_engine  # and with it Ray, which takes a while

    engines: list[RunningEngine] = []
    try:
        for number in range(count):
            name = f"{settings.name}-{number}" if settings.name and count > 1 else settings.name
            with weights_bar(settings.model) as watch:
                engines.append(await start_engine(replace(settings, name=name), watch))
        yield engines
    finally:
        for engine in reversed(engines):  # the first one last: Ray may be its own
            with contextlib.suppress(IntarsiaError):
                await engine.shutdown()


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Future[None]]:
    """Done when a signal asks us to stop."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopped.done():
            stopped.set_result(None)

    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        if not stopped.done():  # else: once is enough
            for number in SIGNALS:
                loop.remove_signal_handler(number)


@contextlib.contextmanager
def _progress(console: Console, journal: Journal, total: int) -> Iterator[None]:
    """A bar with the time that is left; a line now and then where there is no screen."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=total, completed=journal.count, rate="")
        telling = asyncio.ensure_future(_tell(bar, task, console, journal, total))
        try:
            yield
        finally:
            telling.cancel()
            bar.update(task, completed=journal.count)


async def _tell(bar: Progress, task: TaskID, console: Console, journal: Journal, total: int) -> None:
    first, started, told = journal.count, time.monotonic(), time.monotonic()
    while True:
        await asyncio.sleep(0.2)
        now = time.monotonic()
        rate = (journal.count - first) / (now - started)
        bar.update(task, completed=journal.count, rate=f"{rate:.1f}/s")
        if bar.disable and now - told >= TELL_EVERY_S:
            told = now
            left = f", {(total - journal.count) / rate:.0f} s left" if rate else ""
            console.print(f"{journal.count:,} of {total:,} ({journal.count / total:.1%}), {rate:.1f}/s{left}")


async def _report(console: Console, journal: Journal, engines: "list[RunningEngine]", took_s: float) -> None:
    loads: list[EngineLoad] = [
        await engine.client.questions.load() for engine in engines if engine.client.connection.failure is None
    ]
    prompts, cached, generated = (
        sum(getattr(load, name) for load in loads) for name in ("prompt_tokens", "cached_tokens", "generated_tokens")
    )
    reused = f" ({cached / prompts:.1%} out of the prefix cache)" if prompts else ""
    console.print(
        f"{counted(journal.count - journal.resumed, 'line')} in {took_s:.1f} s: {prompts:,} tokens of prompts{reused}, "
        f"{generated:,} generated, {generated / max(took_s, 1e-9):,.0f} per second"
    )


def _fingerprint(engine: EngineSettings) -> str:
    """A name that results of the same model and settings share."""
    model = engine.model
    folder = Path(model.model_dir)
    digest = hashlib.sha256(f"{model.dtype} {engine.max_model_len} {engine.served_model_name}".encode())
    others = [Path(each) for each in (model.chat_template,) if each is not None]
    others += sorted(Path(model.tokenizer_dir).glob("*")) if model.tokenizer_dir is not None else ()
    for path in (*sorted(folder.glob("*")), *others):
        if path.suffix in (".json", ".jinja") or path in others:
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size}".encode())
    return f"{folder.name} {digest.hexdigest()[:16]}"


def main(settings: BatchSettings, engine: EngineSettings) -> int:
    """Exit status: 0 when every line has its result and at least one is an answer; 3 when none is, or a line was no
    request at all (with `strict`: when a line was refused); 130 when it was stopped."""
    found = asyncio.run(run_batch(settings, engine))
    if found is None:
        return STOPPED
    is_failed = bool(found.refused) and (settings.strict or not found.answered or bool(found.refused[NO_REQUEST]))
    return REFUSED if is_failed else 0
