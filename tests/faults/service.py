"""An engine with a gRPC server in front, and traffic through it whose every token is known beforehand."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from intarsia import SamplingParams
from intarsia.deploy.client import AsyncClient
from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.environment import freeze_startup_objects
from intarsia.errors import IntarsiaError

PROMPTS = (
    "The hacker said that the",
    "A bug is",
    "In the days of real programmers",
    "To grok something is to",
    "Once the machine was",
    "Those who wrote code",
)


class Service(NamedTuple):
    engine: RunningEngine
    front_end: FrontEnd
    address: str  # of its gRPC server


@contextlib.asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[Service]:
    """The demo model, served; `settings` as users give them."""
    model = str(DEMO_MODEL_DIR)
    settings = {"kv_cache_memory": "16MiB"} | settings
    engine = await start_engine(engine_settings(model, **settings))
    try:
        front_end = FrontEnd(engine.client, Tokenizer.load(model))
        server = GrpcServer(front_end)
        try:
            address = await server.start(port=0)
            freeze_startup_objects()  # as `intarsia serve` does
            yield Service(engine, front_end, address)
        finally:
            await server.stop()
    finally:
        await engine.shutdown()


class Known(NamedTuple):
    """A request, and the tokens of its answer."""

    prompt: str
    sampling: SamplingParams
    tokens: tuple[int, ...] = ()


def draw(rng: random.Random, count: int, shortest: int, longest: int) -> list[Known]:
    """Requests, greedy and seeded ones; with `shortest` to `longest` tokens to generate."""

    def one(n: int) -> Known:
        prompt = " ".join(rng.choices(PROMPTS, k=rng.randint(1, 4)))
        temperature = rng.choice((0.0, 0.8, 1.2))
        max_tokens = rng.randint(shortest, longest)
        return Known(prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=n, ignore_eos=True))

    return [one(n) for n in range(count)]


async def read(client: AsyncClient, known: Known, at_chunk: Callable[[], object] = lambda: None) -> str | None:
    """Ask it, and read the answer to its end: what is wrong with it, None if nothing is. Raises `IntarsiaError`."""
    said: list[int] = []
    async with contextlib.aclosing(client.generate(known.prompt, known.sampling)) as answer:
        async for chunk in answer:
            said += chunk.token_ids
            at_chunk()
    if tuple(said) == known.tokens:
        return None
    pairs = zip(said, known.tokens, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(said))
    return f"{known.sampling.seed}: {len(said)} of {len(known.tokens)} tokens, {same} as expected"


async def answered(client: AsyncClient, asked: Sequence[Known]) -> list[Known]:
    """The same with the answers that an undisturbed service gives."""
    answers = await asyncio.gather(*(client.complete(each.prompt, each.sampling) for each in asked))
    return [each._replace(tokens=answer.token_ids) for each, answer in zip(asked, answers, strict=True)]


class Traffic:
    """So many streams at once, each after its end followed by another, until it is stopped."""

    def __init__(self, client: AsyncClient, known: Sequence[Known], streams: int, rng: random.Random):
        self.finished = 0
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.came_s: list[float] = []  # when tokens came
        self._client = client
        self._known = known
        self._rng = rng
        self._stopping = asyncio.Event()
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(streams)]

    async def stop(self) -> None:
        """Every stream that goes on is read to its end."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    def recovered_s(self, since_s: float) -> float:
        """From then to the end of the longest silence that began since."""
        came = [since_s, *(at for at in self.came_s if at >= since_s)]
        gaps = [(later - earlier, later) for earlier, later in pairwise(came)]
        return max(gaps)[1] - since_s if gaps else float("inf")

    async def _go_on(self) -> None:
        while not self._stopping.is_set():
            await self._one(self._rng.choice(self._known))

    async def _one(self, known: Known) -> None:
        try:
            wrong = await read(self._client, known, lambda: self.came_s.append(time.monotonic()))
        except IntarsiaError as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)
            return
        self.finished += 1
        if wrong is not None:
            self.wrong.append(wrong)
