"""What a device has to spare for pages. The device is simulated; the steps that are measured are real ones."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from intarsia.controller.startup import build_engine
from intarsia.deploy.settings.options import engine_settings
from intarsia.errors import InvalidSetting
from intarsia.kvcache.plan import MemoryPlan
from intarsia.proto.request import SamplingParams
from intarsia.proto.worker import RunnerLimits
from intarsia.tests.conftest import TinyModel
from intarsia.tests.local import LocalWorkers, complete, make_engine
from intarsia.workers import worker as worker_module
from intarsia.workers.memory import (
    FREED_WITHIN_S,
    LOOK_EVERY_S,
    STEADY_S,
    await_freed_memory,
    check_device,
    spare_bytes,
)

MIB = 2**20


class Simulated:
    """A device of which others use 3 MiB; a step takes what it is told."""

    def __init__(self, total: int, in_use: int, step: int):
        self._total, self._in_use, self._step = total, in_use, step
        self.steps = 0

    def total(self) -> int:
        return self._total

    def in_use(self) -> int:
        return self._in_use

    def held(self) -> int:
        return self._in_use

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        self.steps += 1
        return self._step


class Trying(LocalWorkers):
    """Remembers how large a plan was tried."""

    async def spare_memory(self, trial: MemoryPlan, limits: RunnerLimits, share: float) -> int | None:
        self.trial_bytes = trial.memory_bytes
        return await super().spare_memory(trial, limits, share)


def test_pages_get_what_the_share_leaves_beside_all_else():
    memory = Simulated(total=100 * MIB, in_use=30 * MIB, step=10 * MIB)
    assert spare_bytes(memory, 0.9, lambda: None, trial_bytes=5 * MIB) == (90 - (30 - 5) - 10) * MIB
    assert spare_bytes(memory, 0.9, lambda: None, 5 * MIB, unseen_bytes=7 * MIB) == (90 - (30 - 5) - 10 - 7) * MIB


def test_a_share_that_leaves_nothing_is_refused_with_the_numbers():
    memory = Simulated(total=100 * MIB, in_use=80 * MIB, step=10 * MIB)
    with pytest.raises(InvalidSetting, match=r"0\.9 allows 0\.09 GiB of the device's 0\.10 GiB.*nothing is left") as no:
        spare_bytes(memory, 0.9, lambda: None, trial_bytes=0)
    assert (no.value.field, no.value.details["needed"]) == ("gpu_memory_utilization", 90 * MIB)


@pytest.mark.parametrize("family", ["gemma3", "bamba", "mllama"])
def test_an_engine_takes_what_its_device_can_spare(tiny: Callable, family: str, monkeypatch: pytest.MonkeyPatch):
    model: TinyModel = tiny(family)
    device = Simulated(total=64 * MIB, in_use=20 * MIB, step=4 * MIB)
    monkeypatch.setattr(worker_module, "device_memory", lambda _: device)
    workers = Trying()

    async def serve() -> int:
        engine = await make_engine(
            model.path, workers, kv_cache_memory=None, gpu_memory_utilization=0.5, max_num_batched_tokens=64
        )
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        done = await complete(engine, model.prompts, greedy, model.images)
        assert [one.token_ids for one in done] == model.expected
        return engine.info.kv_cache_bytes

    found = asyncio.run(serve())
    allowed = (32 - 20 - 4) * MIB + workers.trial_bytes  # the trial's pages come back
    assert device.steps == 1 and 0.9 * allowed < found <= allowed
    asked = engine_settings(str(model.path), kv_cache_memory="3MiB")
    engine = asyncio.run(build_engine(asked, LocalWorkers()))
    assert device.steps == 1 and engine.info.kv_cache_bytes <= 3 * MIB


def test_a_cpu_has_no_memory_of_its_own(tiny: Callable):
    settings = engine_settings(str(tiny("gemma3").path))
    assert settings.gpu_memory_utilization == 0.9
    engine = asyncio.run(build_engine(settings, LocalWorkers()))
    assert 63 * MIB < engine.info.kv_cache_bytes <= 64 * MIB


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1])
def test_a_share_beyond_all_is_refused(share: float):
    with pytest.raises(InvalidSetting, match="more than 0 and at most 1"):
        engine_settings("m", gpu_memory_utilization=share)


class Freed:
    """A device whose memory is given back bit by bit: what is held at each look."""

    def __init__(self, *held: int):
        self._held = list(held)
        self.looks = 0

    def total(self) -> int:
        return 1000

    def held(self) -> int:
        self.looks += 1
        return self._held[min(self.looks - 1, len(self._held) - 1)]

    def in_use(self) -> int:
        return self.held()

    def peak_of(self, work: Callable[[], object]) -> int:
        raise AssertionError("nothing is measured")


@pytest.mark.parametrize(
    ("held", "waited_s"),
    [
        ([30], 0.0),  # hardly anything is held
        ([900, 700, 400, 20], 0.3),
        ([900, 500], STEADY_S + LOOK_EVERY_S),  # another process has 500, and keeps it
        ([1000 - n for n in range(900)], FREED_WITHIN_S),  # it gets freer for ever
    ],
)
def test_memory_of_a_process_that_was_killed_is_awaited_until_it_gets_no_freer(held: list[int], waited_s: float):
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    await_freed_memory(torch.device("cpu"), Freed(*held), lambda: now_s, sleep)
    assert now_s == pytest.approx(waited_s, abs=2 * LOOK_EVERY_S)


@pytest.mark.parametrize(("visible", "is_fine"), [(None, True), ("", True), ("-1", True), ("0", False), ("1,2", False)])
def test_a_gpu_that_was_given_and_cannot_be_used_is_an_error(
    visible: str | None, is_fine: bool, monkeypatch: pytest.MonkeyPatch
):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check_device(torch.device("cuda"))
    if is_fine:
        check_device(torch.device("cpu"))
        return
    with pytest.raises(InvalidSetting, match=rf"gives this worker GPU {visible}, and torch sees none: torch .* CUDA"):
        check_device(torch.device("cpu"))
