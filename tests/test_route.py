"""The way of a token: which files a step enters, and how many lines of them one must open to follow it.

A client asks over real gRPC; front end, engine, scheduler, cache manager and worker run in this process and in one
thread, so that one profiler sees all of them. Every file of ours that is entered is spine or a named leaf. A feature
that adds a file to this way fails here.
"""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import grpc.aio
import pytest

import intarsia
from intarsia.controller.engine import Engine
from intarsia.controller.server import EngineServer
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.settings.limits import Limits
from intarsia.proto import inference_pb2 as pb
from intarsia.proto import inference_pb2_grpc as pb_grpc
from intarsia.proto.step import Step, StepResult
from intarsia.tests.local import LocalWorkers, make_engine

ROOT = Path(intarsia.__file__).parent

SPINE = (
    "deploy/grpc/server.py",
    "deploy/front_end/engine_client.py",
    "controller/engine.py",
    "controller/scheduling/scheduler.py",
    "kvcache/manager.py",
    "kvcache/token_table.py",
    "proto/step.py",
    "workers/runner.py",
    "workers/layers/attention.py",
    "kernels/paged_attention/protocol.py",
)
"""Read in this order, they tell what an ordinary decode step does."""

OF_A_QUIET_STEP = {
    "controller/delivery.py",
    "controller/telemetry.py",
    "deploy/front_end/detokenize.py",
    "kernels/paged_attention/plain_torch.py",
    "proto/channel.py",
    "proto/codec.py",
    "kernels/products/cpu.py",
    "kernels/sampling/cpu.py",
    "workers/worker.py",
}

WHEN_BLOCKS_MOVE = {
    "controller/scheduling/step_draft.py",
    "controller/request.py",
    "controller/scheduling/chunks.py",
    "controller/scheduling/fair_queue.py",
    "controller/scheduling/prefill_budget.py",
    "kvcache/eviction.py",
    "kvcache/group_blocks.py",
    "kvcache/group_table.py",
    "kvcache/large_pages.py",
    "kvcache/packed_blocks.py",
    "kvcache/page_blocks.py",
    "kvcache/pool.py",
    "kvcache/prefix.py",
    "kvcache/reach.py",
    "kvcache/tables.py",
    "workers/slots.py",
}

OF_A_FIRST_PREFILL = {
    "controller/admission/admission.py",
    "controller/admission/overload.py",
    "controller/admission/validation.py",
    "controller/metrics.py",
    "controller/scheduling/deadlines.py",
    "controller/scheduling/live_requests.py",
    "controller/scheduling/preemption.py",
    "controller/scheduling/prefixes.py",
    "controller/scheduling/seats.py",
    "controller/scheduling/sharing.py",
    "controller/scheduling/step_times.py",
    "controller/server.py",
    "deploy/front_end/access.py",
    "deploy/front_end/connection.py",
    "deploy/front_end/front_end.py",
    "deploy/front_end/recovery.py",
    "deploy/grpc/convert.py",
    "deploy/grpc/door.py",
    "deploy/grpc/wire.py",
    "kvcache/lookup.py",
    "kvcache/plan.py",
    "kvcache/room.py",
    "proto/request.py",
    "proto/status.py",
}

LEAVES = {
    "quiet": OF_A_QUIET_STEP,
    "blocks move": OF_A_QUIET_STEP | WHEN_BLOCKS_MOVE,
    "prefill with a hit": OF_A_QUIET_STEP | WHEN_BLOCKS_MOVE | OF_A_FIRST_PREFILL,
}
"""Beside the spine, what each kind of step may enter."""

MOST_SPINE_LINES = 2461
MOST_FILES = {"quiet": 17, "blocks move": 35, "prefill with a hit": 58}
"""Ceilings that only fall."""

PROMPT = list(range(2, 42))
"""Longer than the window of the model; blocks have 16 tokens."""


class Route(NamedTuple):
    """What of our code ran between two moments."""

    functions: frozenset[CodeType]

    @property
    def files(self) -> set[str]:
        return {Path(each.co_filename).relative_to(ROOT).as_posix() for each in self.functions}

    @property
    def lines(self) -> int:
        """Of the functions that were entered."""
        return sum(len({line for *_, line in each.co_lines() if line is not None}) for each in self.functions)


class Watched:
    """Notes the functions of ours that this thread enters."""

    def __init__(self) -> None:
        self._seen: set[CodeType] = set()

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._seen.add(frame.f_code)

    @contextmanager
    def watching(self) -> Iterator[None]:
        gc.collect()
        gc.disable()  # the collector would end what earlier scenarios left, in the middle of this one
        sys.setprofile(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    @property
    def route(self) -> Route:
        return Route(frozenset(each for each in self._seen if is_product(each)))


def is_product(code: CodeType) -> bool:
    file = Path(code.co_filename)
    return file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] not in ("tests", ".venv")


class PacedWorkers(LocalWorkers):
    """Runs no more steps than it is told, so that nothing happens unseen before or after them."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = asyncio.Semaphore(0)
        self._begun: asyncio.Queue[Step] = asyncio.Queue()

    async def start_step(self, step: Step) -> StepResult:
        await self._allowed.acquire()
        self._begun.put_nowait(step)
        return await super().start_step(step)

    async def run(self) -> Step:
        """Allow one step, and wait until it begins."""
        self.allow(1)
        return await self._begun.get()

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()


class Served(NamedTuple):
    """All there is between a client and its tokens."""

    engine: Engine
    workers: PacedWorkers
    stub: Any

    def ask(self) -> Any:
        sampling = pb.SamplingParams(max_tokens=64)
        return self.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling))

    async def read(self, answer: Any, tokens: int) -> None:
        """Run as many steps as bring so many tokens of one answer, one after another."""
        for _ in range(tokens):
            await self.workers.run()
            await answer.read()

    async def read_first(self, answer: Any, beside: Any) -> None:
        """Run steps up to the one that admits a new request, and read what they bring to another one. However slow the
        way of a request is, the steps are the same."""
        first = asyncio.ensure_future(answer.read())
        while not self.engine._scheduler.num_waiting:
            await asyncio.sleep(0.001)
        while not (await self.workers.run()).admit:
            await beside.read()
        await first


async def served(model: Path, scenario: Callable[[Served], Awaitable[Route]]) -> Route:
    workers = PacedWorkers()
    engine = await make_engine(model, workers, attention_backend="torch", enforce_eager=True)
    loop = asyncio.create_task(engine.run())
    door = EngineServer(engine)
    client = await EngineClient.connect(await door.start("127.0.0.1"))
    server = GrpcServer(FrontEnd(client, None, limits=Limits(unread_timeout_s=3600)))  # a slow test is not looked after
    try:
        async with grpc.aio.insecure_channel(await server.start(port=0)) as channel:
            return await asyncio.wait_for(scenario(Served(engine, workers, pb_grpc.InferenceStub(channel))), 60)
    finally:
        workers.allow(1000)
        await server.stop(0)
        await client.close()
        await door.close()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


async def decode(at: Served, first: int, last: int) -> Route:
    """Of the steps that bring tokens `first` to `last` of an answer."""
    watched, answer = Watched(), at.ask()
    await at.read(answer, first)
    with watched.watching():
        await at.read(answer, last - first)
    answer.cancel()
    return watched.route


async def quiet(at: Served) -> Route:
    """Tokens 43 and 44 of a sequence: two blocks of 16 are behind, the third has room."""
    return await decode(at, 2, 4)


async def blocks_move(at: Served) -> Route:
    """Tokens 46 to 64 of a sequence: blocks are taken, named and, behind the window, given back."""
    return await decode(at, 5, 24)


async def prefill_with_a_hit(at: Served) -> Route:
    earlier = at.ask()
    await at.read(earlier, 12)
    watched, answer = Watched(), at.ask()
    with watched.watching():
        await at.read_first(answer, beside=earlier)
    assert at.engine.stats.cached_tokens > 0
    answer.cancel()
    earlier.cancel()
    return watched.route


SCENARIOS = {"quiet": quiet, "blocks move": blocks_move, "prefill with a hit": prefill_with_a_hit}


@pytest.fixture(scope="module")
def routes(tiny: Any) -> dict[str, Route]:
    model = tiny("gemma3").path
    return {name: asyncio.run(served(model, scenario)) for name, scenario in SCENARIOS.items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_step_enters_only_the_spine_and_named_leaves(routes: dict[str, Route], name: str):
    assert routes[name].files >= {SPINE[0], SPINE[-1]}
    strange = routes[name].files - {*SPINE, *LEAVES[name]}
    assert not strange, f"{name}: {sorted(strange)}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_step_enters_no_more_files_than_before(routes: dict[str, Route], name: str):
    assert len(routes[name].files) <= MOST_FILES[name], sorted(routes[name].files)


def test_the_spine_is_short_enough_to_be_read():
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in SPINE}
    assert sum(lines.values()) <= MOST_SPINE_LINES, lines
