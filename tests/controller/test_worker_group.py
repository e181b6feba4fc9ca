"""Real Ray workers behind real streams: start-up, failure, and what a step costs in vain."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from intarsia.controller import worker_group
from intarsia.controller.worker_group import WorkerGroup
from intarsia.errors import CorruptCheckpoint, EngineUnavailable, InvalidSetting, ModelNotFound, OutOfMemory
from intarsia.proto.channel import Stream, StreamServer
from intarsia.proto.request import SamplingParams
from intarsia.proto.step import Advance, Fault, Step, StepResult
from intarsia.proto.worker import ModelSettings
from intarsia.tests.conftest import Loop
from intarsia.tests.local import Completion, asking, make_engine


async def finished(group: WorkerGroup, step: Step) -> StepResult:
    return await group.start_step(step)


def test_error_of_a_worker_comes_back_as_it_was_raised(two_workers: WorkerGroup, loop: Loop, tmp_path):
    with pytest.raises(ModelNotFound, match="no model directory"):
        loop.run(two_workers.load(ModelSettings(str(tmp_path / "nowhere"), tensor_parallel_size=2)))


def test_corrupt_weights_leave_the_workers_usable(two_workers: WorkerGroup, loop: Loop, tiny: Callable, tmp_path):
    import shutil

    broken = shutil.copytree(tiny("llama").path, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(CorruptCheckpoint):
        loop.run(two_workers.load(ModelSettings(str(broken), tensor_parallel_size=2)))
    facts = loop.run(two_workers.load(ModelSettings(str(tiny("llama").path), tensor_parallel_size=2)))
    assert [layer.kv_heads for layer in facts.layers] == [1, 1, 1]


def test_more_workers_than_the_cluster_has_cpus_are_refused_with_the_numbers(ray_cluster: None, loop: Loop):
    with pytest.raises(InvalidSetting, match=r"tensor_parallel_size 64 needs 64 CPUs; the Ray cluster has \d+"):
        loop.run(WorkerGroup.create(64))


def test_failing_step_names_the_rank_and_the_reason(two_workers: WorkerGroup, loop: Loop, tiny: Callable):
    loop.run(make_engine(tiny("llama").path, two_workers))
    with pytest.raises(EngineUnavailable, match=r"worker \d could not run step 1: .*slot 3 is empty"):
        loop.run(finished(two_workers, Step(1, 1, (), (), (), (), (), (), (), (Advance(3, 1, ()),))))
    before = loop.run(two_workers.process_ids())
    loop.run(two_workers.rebuild())
    assert set(before).isdisjoint(loop.run(two_workers.process_ids())), "the state that they were in is not known"


def test_killed_worker_is_noticed_in_the_step_that_waits_for_it(ray_cluster: None, loop: Loop, tiny: Callable):
    group: Any = loop.run(WorkerGroup.create(1))
    try:
        loop.run(make_engine(tiny("llama").path, group))
        os.kill(loop.run(group.process_ids())[0], signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="worker 0 of 1 is gone in step 1"):
            loop.run(finished(group, Step(1, 1, (), (), (), (), (), (), (), ())))
    finally:
        loop.run(group.close())


def test_killed_worker_is_replaced_when_nothing_runs(ray_cluster: None, loop: Loop, tiny: Callable):
    group: Any = loop.run(WorkerGroup.create(1))

    async def scenario() -> None:
        engine = await make_engine(tiny("llama").path, group)
        running = asyncio.create_task(engine.run())
        await asyncio.sleep(0.1)
        assert not running.done()
        os.kill((await group.process_ids())[0], signal.SIGKILL)
        while not engine.stats.rebuilds:
            await asyncio.sleep(0.01)
        completion = Completion()
        engine.submit(asking([1], SamplingParams(max_tokens=3)), 0, completion.sink)
        await completion.done.wait()
        assert len(completion.token_ids) == 3
        running.cancel()

    try:
        loop.run(scenario())
    finally:
        loop.run(group.close())


def test_stopped_worker_is_replaced_and_its_requests_go_on_with_the_same_tokens(
    ray_cluster: None, loop: Loop, tiny: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_group, "HUNG_AFTER_S", 0.5)
    monkeypatch.setattr(worker_group, "ALIVE_WITHIN_S", 1.0)
    group: Any = loop.run(WorkerGroup.create(2))
    model = tiny("llama")

    async def scenario() -> None:
        engine = await make_engine(model.path, group)
        running = asyncio.create_task(engine.run())
        stopped = (await group.process_ids())[1]
        completion = Completion()
        sampling = SamplingParams(temperature=0, max_tokens=24)
        engine.submit(asking(model.prompts[0], sampling), 0, completion.sink)
        while not completion.token_ids:
            await asyncio.sleep(0)
        os.kill(stopped, signal.SIGSTOP)
        await completion.done.wait()
        assert completion.token_ids == model.expected[0]
        assert engine.stats.rebuilds == 1
        assert stopped not in await group.process_ids()
        with pytest.raises(ProcessLookupError):  # it is not left behind, to wake up some day
            while True:
                os.kill(stopped, 0)
                await asyncio.sleep(0.05)
        assert engine.recount().all_free
        running.cancel()

    try:
        loop.run(scenario())
    finally:
        loop.run(group.close())


def test_worker_that_takes_its_time_and_says_so_is_left_alone(
    ray_cluster: None, loop: Loop, tiny: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_group, "HUNG_AFTER_S", 1e-4)  # no step is as short
    asked = []
    is_alive = worker_group.Beside.is_alive

    async def noted(self: worker_group.Beside, within_s: float) -> bool:
        asked.append(within_s)
        return await is_alive(self, within_s)

    monkeypatch.setattr(worker_group.Beside, "is_alive", noted)
    group: Any = loop.run(WorkerGroup.create(1))
    model = tiny("llama")

    async def scenario() -> None:
        engine = await make_engine(model.path, group)
        running = asyncio.create_task(engine.run())
        completions = [Completion() for _ in model.prompts]
        for prompt, completion in zip(model.prompts, completions, strict=True):
            engine.submit(asking(prompt, SamplingParams(temperature=0, max_tokens=24)), 0, completion.sink)
        for completion, expected in zip(completions, model.expected, strict=True):
            await completion.done.wait()
            assert completion.token_ids == expected
        assert asked and engine.stats.rebuilds == 0
        running.cancel()

    try:
        loop.run(scenario())
    finally:
        loop.run(group.close())


class NoPlacement:
    """Ranks on GPUs, as far as the group asks."""

    has_gpus = True
    actors = (None, None)


@pytest.mark.parametrize(
    ("fault", "error", "ends"),
    [(Fault.MEMORY, OutOfMemory, {1}), (Fault.OTHER, EngineUnavailable, {1})],
)
def test_fault_of_a_gpu_is_heard_of_while_another_waits_for_it(
    loop: Loop, fault: Fault, error: type[EngineUnavailable], ends: set[int]
):
    """Rank 0 never answers: NCCL does not let it go. The streams are real ones."""

    async def run() -> None:
        async def hang(stream: Stream) -> None:
            await stream.receive()
            await asyncio.Event().wait()

        async def fail(stream: Stream) -> None:
            step = Step.unpack(await stream.receive())
            stream.send(StepResult(step.epoch, step.number, (), error="no room", fault=fault).pack())
            await asyncio.Event().wait()

        servers = [StreamServer(handle) for handle in (hang, fail)]
        group: Any = WorkerGroup(NoPlacement())  # type: ignore[arg-type]
        for server in servers:
            group._streams.append(await Stream.connect(await server.start("127.0.0.1")))
        with pytest.raises(error, match="worker 1 could not run step 7: no room") as caught:
            await asyncio.wait_for(group.start_step(Step(1, 7, (), (), (), (), (), (), (), ())), 10)
        assert type(caught.value) is error and group._failed == ends
        for server in servers:
            await server.close()

    loop.run(run())
