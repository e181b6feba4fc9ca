"""What tests share: tiny checkpoints with their true tokens, one Ray cluster, one group of two workers."""

import os
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see environment.py
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), "intarsia-tests")  # servers keep responses there
os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: GPU kernels run in Python here

import asyncio
import gc
import socket
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_SERVERS = ("deploy/", "workers/process/test_fork_server.py", "test_imports.py")
START_NONE = tuple(
    f"deploy/{part}/" for part in ("checkpoints", "formats", "proof", "replay", "settings", "terminal", "tools")
)


PART_OF_THE_GATE = {
    "test_tokens_equal_the_oracle_on_one_worker", "test_the_table_says_of_a_family_what_is_observed",
    "test_two_ranks_of_packed_weights_answer_as_transformers_with_the_plain_twin",
}  # fmt: skip
"""Of the tests that each family goes through, those that are not slow for families beside `models.EACH_KIND`."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares a Ray or starts a server stays in one process: two Ray clusters would get into each other's way."""
    here = Path(__file__).parent
    for item in items:
        if getattr(item, "originalname", "") not in PART_OF_THE_GATE and _is_one_more(_param(item, "family")):
            item.add_marker(pytest.mark.slow)
        fixtures = getattr(item, "fixturenames", ())
        place, family = item.path.relative_to(here).as_posix(), _family_of(item)
        starts_servers = place.startswith(START_SERVERS) and not place.startswith(START_NONE)
        if "ray_cluster" in fixtures or starts_servers:
            item.add_marker(pytest.mark.xdist_group("servers"))
        elif place == "test_snippets.py":  # its programs have a Ray, ports and a list of servers of their own
            item.add_marker(pytest.mark.xdist_group("snippets"))
        elif family is not None and item.get_closest_marker("xdist_group") is None:  # its checkpoint is made once
            item.add_marker(pytest.mark.xdist_group(family))
        elif (name := _param(item, "real")) is not None:  # it is read and expanded once
            item.add_marker(pytest.mark.xdist_group(name))


class MemoryGivenBack:
    """Engines of real models leave cycles and holes in the heap: 13 GB after them all, and then others are killed."""

    MOST_MORE_BYTES = 500 * 10**6

    def __init__(self) -> None:
        self._least_bytes = resident_bytes()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if resident_bytes() > self._least_bytes + self.MOST_MORE_BYTES:
            from intarsia.environment import give_back_freed_memory

            gc.collect()
            give_back_freed_memory()
            self._least_bytes = resident_bytes()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(MemoryGivenBack())


def _family_of(item: pytest.Item) -> str | None:
    """Of a test that takes a tiny checkpoint of some family."""
    family = _param(item, "family")
    return family if "tiny" in getattr(item, "fixturenames", ()) and isinstance(family, str) else None


def _param(item: pytest.Item, name: str) -> Any:
    asked = getattr(item, "callspec", None)
    return asked.params.get(name) if asked is not None else None


def _is_one_more(family: Any) -> bool:
    """Of a kind that another family stands for."""
    if not isinstance(family, str):
        return False
    from intarsia.tests.models import EACH_KIND, FAMILIES

    return family in FAMILIES and family not in EACH_KIND


@dataclass(frozen=True)
class TinyModel:
    """A tiny random checkpoint, and what transformers makes of `PROMPTS`."""

    path: Path
    prompts: list[list[int]]
    images: list[list[bytes]]  # of each prompt
    expected: list[list[int]]  # 24 greedy tokens per prompt, each from a full recomputation
    window_ignored: list[list[int]]  # the same with a window that hides nothing


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes the checkpoint of a family and its expected tokens, once per session."""
    made: dict[str, TinyModel] = {}

    def make(family: str) -> TinyModel:
        if family not in made:
            from intarsia.tests import models

            path = models.make_checkpoint(family, tmp_path_factory.mktemp("models") / family)
            prompts, images = models.prompts_of(family)
            asked = list(zip(prompts, images, strict=True))
            expected = [models.greedy(models.load_oracle(path, about), prompt, 24) for prompt, about in asked]
            blind = expected
            if family in models.BLIND:
                oracle = models.load_oracle(path, (), **models.BLIND[family])
                blind = [models.greedy(oracle, prompt, 24) for prompt in prompts]
            made[family] = TinyModel(path, prompts, images, expected, blind)
        return made[family]

    return make


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of bytes."""
    from intarsia.tests import models

    return models.make_talker(tmp_path_factory.mktemp("talker"))


def free_port() -> int:
    """A port of the loopback address on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Loop:
    """An event loop in a thread of its own, for what lives longer than one test."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine, limit_s: float = 240.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=limit_s)


@pytest.fixture(scope="session")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray cluster with room for a group of four workers beside one of two and an engine's own two."""
    from intarsia.deploy.start.own_ray import ensure_ray

    own = ensure_ray(workers=8)
    yield
    if own is not None:
        own.stop()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def worker_pair(ray_cluster: None, loop: Loop) -> Iterator[Any]:
    from intarsia.controller.worker_group import WorkerGroup

    group = loop.run(WorkerGroup.create(2))
    yield group
    loop.run(group.close())


@pytest.fixture
def two_workers(worker_pair: Any, loop: Loop, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A real group of two tensor-parallel workers. Tests load what they need into it, one after another. Those of
    another file may come much later, and find workers that meet anew."""
    if worker_pair.__dict__.setdefault("used_in", request.path) != request.path:
        worker_pair.used_in = request.path
        loop.run(meet_anew(worker_pair))
    yield worker_pair
    if request.node.stash[FAILED]:  # and may have left them apart: the next test has another fault to find
        loop.run(meet_anew(worker_pair))


async def meet_anew(group: Any) -> None:
    await group.leave()
    await group.take_over()
