"""The controller's own work: an engine whose workers have no model and answer at once."""

import asyncio
import random
import time
from typing import Any

from intarsia.controller.delivery import Delivery
from intarsia.controller.engine import Engine
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import PlanSettings
from intarsia.kvcache.reach import Full, Sliding
from intarsia.kvcache.spec import LayerSpec
from intarsia.kvcache.strategies import plan_memory
from intarsia.proto.codec import pack
from intarsia.proto.request import USUAL_OPTIONS, GenerateRequest, SamplingParams
from intarsia.proto.status import EngineInfo
from intarsia.proto.step import Step, StepResult

NEW_TOKENS = 512
MEASURED_STEPS = 400


class NullWorkers:
    """Both ways a step is packed and unpacked, as over the stream."""

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}  # slot -> tokens computed, and known

    async def start_step(self, step: Step) -> StepResult:
        received = Step.unpack(step.pack())
        known = self._known
        known.update((entry.slot, [entry.computed_tokens, len(entry.tokens)]) for entry in received.admit)
        drawing = len(received.decode)
        for entry in received.advance:
            progress = known[entry.slot]
            progress[0] += entry.tokens
            drawing += progress[0] >= progress[1]
            progress[1] += progress[0] >= progress[1]
        for slot in received.decode:
            known[slot][0] += 1
            known[slot][1] += 1
        return StepResult.unpack(StepResult(step.epoch, step.number, (7,) * drawing, run_us=1).pack())

    async def prepare_form(self, kind: str, text: str) -> None:
        raise NotImplementedError

    async def status(self) -> Any:
        return []

    async def rebuild(self) -> None:
        raise NotImplementedError

    async def lost(self) -> Any:
        await asyncio.Event().wait()


class NullEngine:
    def __init__(self) -> None:
        layers = tuple(
            LayerSpec(index, Full() if index % 6 == 5 else Sliding(1024), 8, 128, 128, item_bytes=2)
            for index in range(48)
        )
        plan = plan_memory(layers, PlanSettings(memory_bytes=64 * 2**30, block_tokens=16), 8192)
        self.manager = CacheManager(plan)
        self.engine = Engine(
            EngineInfo(
                "null", "", "null", "float32", "cpu", 1, 0, 512, 8192, 256, 8192, (), plan.strategy, (),
                plan.usable_blocks, plan.num_buffers, plan.memory_bytes, 1.0, True,
            ),
            Scheduler(SchedulerSettings(max_num_seqs=256, max_num_batched_tokens=8192), self.manager),
            self.manager,
            NullWorkers(),
        )  # fmt: skip

    def fill(self) -> None:
        """Known prefixes in every block."""
        manager, number = self.manager, 1 << 40
        while manager.pool.num_free_pages:
            number += 1
            tokens = [number % 997 + n for n in range(4096)]
            tokens[0] = number % 100_000
            request = RequestId(number)
            manager.open(request, manager.lookup(tokens))
            for length in range(512, 4097, 512):
                manager.extend(request, length)
                manager.commit(request)
            manager.release(request)

    async def decode_us(self, count: int, round_: int) -> dict[str, float]:
        """Per step in which so many requests decode, in µs."""
        engine = self.engine
        left = asyncio.Event()
        open_answers = count

        def sink(delivery: Delivery) -> None:
            nonlocal open_answers
            pack(delivery)
            open_answers -= sum(item.finish_reason is not None for _, item in delivery.deltas)
            if open_answers == 0:
                left.set()

        rng = random.Random(round_)
        for n in range(count):
            prompt = [rng.randrange(512) for _ in range(512 + rng.randrange(256))]
            sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            engine.submit(GenerateRequest(prompt, sampling, (), USUAL_OPTIONS, 0.0, len(prompt), False), n, sink)
        while engine.stats.generated_tokens < (round_ * NEW_TOKENS + 2) * count:  # all decode
            await asyncio.sleep(0)
        steps, plan_us, commit_us, began_s = (
            engine.stats.steps, engine.stats.plan_us, engine.stats.commit_us, time.perf_counter(),
        )  # fmt: skip
        while engine.stats.steps < steps + MEASURED_STEPS:
            await asyncio.sleep(0)
        steps = engine.stats.steps - steps
        spent_us = {
            "plan_us": engine.stats.plan_us - plan_us,
            "commit_us": engine.stats.commit_us - commit_us,
            "all_us": (time.perf_counter() - began_s) * 1e6,
        }
        await left.wait()
        return {name: us / steps for name, us in spent_us.items()}


async def rounds_us(count: int, rounds: int, is_full: bool) -> list[dict[str, float]]:
    """The same of each round. is_full: the pool is full of known prefixes when a round begins; else it is empty"""
    null = NullEngine()
    loop = asyncio.create_task(null.engine.run())
    found = []
    for round_ in range(rounds):
        if is_full:
            null.fill()
        else:
            null.engine.reset_prefix_cache()
        found.append(await null.decode_us(count, round_))
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    return found
