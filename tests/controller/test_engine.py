"""The engine at its door and in trouble, with a simulated worker."""

import asyncio
import contextlib
import re
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from intarsia.controller import losses as losses_module
from intarsia.controller.admission import structured_output
from intarsia.controller.admission.overload import OverloadSettings
from intarsia.controller.engine import Engine
from intarsia.controller.leases.leases import Leases
from intarsia.controller.leases.settings import LeaseSettings
from intarsia.controller.losses import MOST_LOSSES, Losses, NoRoom
from intarsia.controller.scheduling import prefill_budget as prefill_budget_module
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    RequestTooLarge,
)
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import MemoryPlan
from intarsia.kvcache.reach import Full, Sliding
from intarsia.proto.messages import Delivery
from intarsia.proto.request import RequestOptions, SamplingParams
from intarsia.proto.status import EngineInfo, GroupInfo
from intarsia.proto.step import Step, StepResult
from intarsia.proto.worker import WorkerStatus
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.local import Completion, asking
from intarsia.tests.simulated import VOCAB, SimulatedWorker, continuation
from intarsia.tests.simulated_leases import with_leasable

PROMPT = [1, 2, 3, 4, 5]
SAMPLING = SamplingParams(max_tokens=8)


class SimulatedGroup:
    """Runs steps in this process; fails from `fail_at` on, or at each of `losses` and comes back."""

    def __init__(self, plan: MemoryPlan, fail_at: int | None = None, losses: Sequence[int] = ()):
        self._plan = plan
        self._worker = SimulatedWorker(plan)
        self._fail_at = fail_at
        self._losses = set(losses)
        self.step_s = 0.0

    async def start_step(self, step: Step) -> StepResult:
        await asyncio.sleep(self.step_s)
        if self._fail_at is not None and step.number >= self._fail_at:
            raise EngineUnavailable(f"worker 1 of 2 is gone in step {step.number}")
        if step.number in self._losses:
            self._losses.discard(step.number)
            raise EngineUnavailable(f"worker 0 of 2 is gone in step {step.number}")
        return self._worker.run(step)

    async def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(1, "here", "cpu", 1, None, None, 0, 0, 0.0)]

    async def rebuild(self) -> None:
        if self._fail_at is not None:
            raise NoRoom("there are no others")
        self._worker = SimulatedWorker(self._plan)

    async def lost(self) -> IntarsiaError:
        await asyncio.Event().wait()
        raise AssertionError

    async def prepare_form(self, kind: str, text: str) -> None:
        if text == "slow":
            await asyncio.sleep(3600)
        if text != "good":
            raise InvalidRequest(f"{kind} cannot be used: {text}", field=kind)


def make_engine(
    blocks: int = 64,
    fail_at: int | None = None,
    eos: tuple[int, ...] = (),
    losses: Sequence[int] = (),
    overload: OverloadSettings | None = None,
    leasable: int = 0,
) -> Engine:
    """leasable: large pages, of `blocks`, that leases may hold"""
    plan = with_leasable(plan_of(Full(), Sliding(5), blocks=blocks - leasable), leasable)
    manager = CacheManager(plan)
    if leasable:
        Leases(manager, LeaseSettings(share_per_tenant=0.25))
    info = EngineInfo(
        model="simulated", model_dir="", architecture="", dtype="", device="", tensor_parallel_size=1, weight_bytes=0,
        vocab_size=VOCAB, max_model_len=100, max_num_seqs=4, max_num_batched_tokens=16, eos_token_ids=eos,
        strategy="layered", groups=(GroupInfo("full", (0,), 4, 64),), num_blocks=blocks - 1, num_buffers=1,
        kv_cache_bytes=0, max_len_concurrency=plan.concurrency(100), enable_prefix_caching=True, lease_blocks=leasable,
    )  # fmt: skip
    scheduler = Scheduler(SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=16), manager)
    return Engine(info, scheduler, manager, SimulatedGroup(plan, fail_at, losses), overload=overload)


def running(engine: Engine, work: Coroutine) -> Any:
    """Run `work` beside the engine's loop."""

    async def both() -> Any:
        loop = asyncio.create_task(engine.run())
        try:
            return await asyncio.wait_for(work, 20)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    return asyncio.run(both())


def submit(engine: Engine, tokens: list[int], sampling: SamplingParams = SAMPLING) -> Completion:
    completion = Completion()
    engine.submit(asking(tokens, sampling), 0, completion.sink)
    return completion


@pytest.mark.parametrize(
    ("tokens", "sampling", "error", "message"),
    [
        ([], SAMPLING, InvalidRequest, "the prompt is empty; it needs at least 1 token"),
        ([1] * 100, SAMPLING, InvalidRequest, "too long: it has 100 tokens; .* maximum context length is 100"),
        ([1, 2, VOCAB], SAMPLING, InvalidRequest, f"prompt token {VOCAB} at position 2 is not in the vocabulary of 50"),
        ([1, -1], SAMPLING, InvalidRequest, "prompt token -1 at position 1"),
        ([1, "2"], SAMPLING, InvalidRequest, "prompt token '2' at position 1 is no whole number"),
        ([1.0], SAMPLING, InvalidRequest, "prompt token 1.0 at position 0 is no whole number"),
        ([1] * 60, SamplingParams(max_tokens=30), RequestTooLarge, "60 prompt tokens .30 .* 25 blocks; .* has 20"),
    ],
)  # fmt: skip
def test_refused_request_names_the_numbers_and_disturbs_no_other(tokens, sampling, error, message):
    engine = make_engine(blocks=21)

    async def scenario() -> Completion:
        good = submit(engine, PROMPT)
        with pytest.raises(error, match=message.replace(" .30", r" \+ 30")) as refusal:
            submit(engine, tokens, sampling)
        assert refusal.value.field in ("prompt", "max_tokens")
        await good.done.wait()
        return good

    assert running(engine, scenario()).token_ids == continuation(PROMPT, 8)
    assert engine.recount().all_free


def test_answers_come_in_pieces_while_requests_are_refused():
    engine = make_engine(overload=OverloadSettings(max_requests_per_tenant=1))
    deliveries: list[int] = []

    async def scenario() -> Completion:
        first = submit(engine, PROMPT)
        with pytest.raises(Overloaded):
            submit(engine, PROMPT)
        await first.done.wait()
        second = Completion()

        def sink(delivery: Delivery) -> None:
            deliveries.append(len(delivery.tokens) + sum(len(item.token_ids) for _, item in delivery.deltas))
            second.sink(delivery)

        engine.submit(asking(PROMPT, SamplingParams(max_tokens=30)), 0, sink)
        await second.done.wait()
        return second

    assert running(engine, scenario()).token_ids == continuation(PROMPT, 30)
    assert sum(deliveries) == 30 and len(deliveries) < 30


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("why", ["refused", "crowded"])
def test_an_answer_under_way_goes_on_in_pieces_when_more_come_than_can_be_served(why: str, logprobs: int | None):
    engine = make_engine(overload=OverloadSettings(max_requests_per_tenant=1 if why == "refused" else None))
    before: list[int] = []
    after: list[int] = []

    async def scenario() -> Completion:
        completion, deliveries = Completion(), before

        def sink(delivery: Delivery) -> None:
            nonlocal deliveries
            deltas = [item.token_ids for _, item in delivery.deltas]
            deliveries.append(len(delivery.tokens) + sum(map(len, deltas)))
            completion.sink(delivery)
            if len(before) == 2 and deliveries is before and why == "crowded":
                asyncio.get_running_loop().call_soon(crowd)
            if len(before) == 10 and deliveries is before:
                deliveries = after
                asyncio.get_running_loop().call_soon(one_more)

        def crowd() -> None:  # four can run, so five wait
            for _ in range(8):
                submit(engine, PROMPT, SamplingParams(max_tokens=20))

        def one_more() -> None:
            with pytest.raises(Overloaded) if why == "refused" else contextlib.nullcontext():
                submit(engine, PROMPT)

        engine.submit(asking(PROMPT, SamplingParams(max_tokens=60, logprobs=logprobs)), 0, sink)
        await completion.done.wait()
        return completion

    assert running(engine, scenario()).token_ids == continuation(PROMPT, 60)
    assert before == [1] * 10
    assert sum(after) == 50 and len(after) < 50


def test_end_token_of_the_model_stops_unless_ignored():
    expected = continuation(PROMPT, 8)
    engine = make_engine(eos=(expected[2],))

    async def scenario() -> tuple[Completion, Completion]:
        stops, ignores = submit(engine, PROMPT), submit(engine, PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
        await asyncio.gather(stops.done.wait(), ignores.done.wait())
        return stops, ignores

    stops, ignores = running(engine, scenario())
    assert stops.token_ids == expected[: expected.index(expected[2]) + 1]
    assert stops.finish_reason == "stop"
    assert ignores.token_ids == expected


def test_sequence_ends_at_max_model_len():
    engine = make_engine(blocks=128)

    async def scenario() -> Completion:
        completion = submit(engine, [1] * 95, SamplingParams(max_tokens=50))
        await completion.done.wait()
        return completion

    completion = running(engine, scenario())
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


def test_lost_worker_is_told_to_every_caller_and_to_new_ones():
    engine = make_engine(fail_at=4)

    async def scenario() -> list[Completion]:
        completions = [submit(engine, [n] * 5) for n in range(3)]
        await asyncio.gather(*(c.done.wait() for c in completions))
        with pytest.raises(EngineUnavailable, match="worker 1 of 2 is gone"):
            submit(engine, PROMPT)
        return completions

    for completion in running(engine, scenario()):
        assert isinstance(completion.error, EngineUnavailable)


@pytest.mark.parametrize("losses", [(1,), (4,), (3, 4, 9), (2, 6, 7, 12)])
def test_workers_that_come_back_go_on_with_the_same_tokens(losses: tuple[int, ...]):
    engine = make_engine(losses=losses)

    async def scenario() -> list[Completion]:
        completions = [submit(engine, [n + 1] * (3 + n), SamplingParams(max_tokens=10)) for n in range(6)]
        await asyncio.gather(*(c.done.wait() for c in completions))
        return completions

    for n, completion in enumerate(running(engine, scenario())):
        assert completion.error is None
        assert completion.token_ids == continuation([n + 1] * (3 + n), 10)
    assert 1 <= engine.stats.rebuilds <= len(losses)  # steps under way beside a lost one are lost with it
    assert engine.recount().all_free


class Allergic(SimulatedGroup):
    """Dies of any step of a request whose prompt holds a certain token."""

    poison: int

    def __init__(self, plan: MemoryPlan, poison: int):
        super().__init__(plan)
        self.poison = poison
        self._slots: set[int] = set()  # that have it

    async def start_step(self, step: Step) -> StepResult:
        self._slots -= set(step.retire)
        self._slots |= {
            admit.slot for admit in step.admit if self.poison in admit.tokens[: admit.sampling.prompt_tokens]
        }
        if self._slots & {*step.decode, *(advance.slot for advance in step.advance)}:
            raise EngineUnavailable("worker 0 of 2 is gone")
        return await super().start_step(step)

    async def rebuild(self) -> None:
        await super().rebuild()
        self._slots.clear()


@pytest.mark.parametrize("poisoned", [1, 3])
def test_requests_that_the_workers_die_of_are_found_out_and_no_other_suffers(
    poisoned: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(losses_module, "SUSPECT_FOR_S", 0.0)
    monkeypatch.setattr(losses_module, "PAUSES_S", (0.0,))
    healthy = make_engine()
    workers = Allergic(healthy._manager.plan, poison=49)
    engine = Engine(healthy.info, healthy._scheduler, healthy._manager, workers)
    prompts = [[n + 1] * (3 + n) for n in range(8)]

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        good = [submit(engine, prompt) for prompt in prompts[:5]]
        while not good[0].token_ids:
            await asyncio.sleep(0)
        bad = [submit(engine, [49] * (n + 2)) for n in range(poisoned)]
        good += [submit(engine, prompt) for prompt in prompts[5:]]
        await asyncio.gather(*(c.done.wait() for c in (*good, *bad)))
        return good, bad

    good, bad = running(engine, scenario())
    for completion in bad:
        assert isinstance(completion.error, EngineUnavailable)
        assert f"were lost {MOST_LOSSES + 1} times" in completion.error.message
    for prompt, completion in zip(prompts, good, strict=True):
        assert completion.error is None
        assert completion.token_ids == continuation(prompt, 8)
    assert engine.recount().all_free
    assert engine.stats.rebuilds <= MOST_LOSSES + 1 + 3 * (poisoned - 1)


class Small(SimulatedGroup):
    """Has memory for so many tokens of prompts in a step."""

    def __init__(self, plan: MemoryPlan, most: int):
        super().__init__(plan)
        self.most = most
        self.ran: list[int] = []

    async def start_step(self, step: Step) -> StepResult:
        tokens = sum(advance.tokens for advance in step.advance)
        if tokens > self.most:
            raise OutOfMemory(f"worker 0 could not run step {step.number}: can't allocate memory")
        self.ran.append(tokens)
        return await super().start_step(step)


def test_steps_that_do_not_fit_in_memory_get_smaller_and_no_request_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill_budget_module, "GROW_AFTER_STEPS", 10)
    usual = make_engine(blocks=128)
    workers = Small(usual._manager.plan, most=5)
    engine = Engine(usual.info, usual._scheduler, usual._manager, workers)
    prompts = [[n + 1] * 30 for n in range(4)]

    async def scenario() -> list[Completion]:
        completions = [submit(engine, prompt) for prompt in prompts]
        await asyncio.gather(*(c.done.wait() for c in completions))
        workers.most = 16  # the other process has given it back
        for _ in range(20):
            completions.append(submit(engine, [*prompts[0][:-1], len(completions)]))
            await completions[-1].done.wait()
        return completions

    completions = running(engine, scenario())
    assert all(completion.error is None for completion in completions)
    for prompt, completion in zip(prompts, completions[:4], strict=True):
        assert completion.token_ids == continuation(prompt, 8)
    assert max(workers.ran[:20]) <= 5
    assert max(workers.ran) > 5, "larger steps are tried again"


def test_a_request_that_fits_in_no_step_is_told_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses_module, "SUSPECT_FOR_S", 0.0)
    monkeypatch.setattr(losses_module, "PAUSES_S", (0.0,))
    usual = make_engine(blocks=128)
    engine = Engine(usual.info, usual._scheduler, usual._manager, Small(usual._manager.plan, most=0))

    async def scenario() -> Completion:
        completion = submit(engine, [7] * 30)
        await completion.done.wait()
        return completion

    error = running(engine, scenario()).error
    assert isinstance(error, EngineUnavailable) and "can't allocate memory" in error.message


def test_a_request_may_lose_its_workers_often_while_it_gets_tokens():
    engine = make_engine(losses=range(3, 90, 4))

    async def scenario() -> Completion:
        completion = submit(engine, PROMPT, SamplingParams(max_tokens=20))
        await completion.done.wait()
        return completion

    assert running(engine, scenario()).token_ids == continuation(PROMPT, 20)
    assert engine.stats.rebuilds > 2 * MOST_LOSSES


@pytest.mark.parametrize("at_rebuild", [False, True])
def test_workers_that_never_run_a_step_are_given_up_after_the_stated_time(at_rebuild: bool):
    usual = make_engine(losses=range(1, 500))
    group: Any = usual._workers
    if at_rebuild:
        group.rebuild = _lost_again
    engine = Engine(usual.info, usual._scheduler, usual._manager, group, losses=Losses(give_up_after_s=0.5))

    async def scenario() -> Completion:
        completions = [submit(engine, [n + 1] * 5) for n in range(20)]
        await asyncio.gather(*(c.done.wait() for c in completions))
        return completions[-1]

    error = running(engine, scenario()).error
    assert isinstance(error, EngineUnavailable)
    assert re.search(r"lost \d+ times in \d s without a step in between.*give_up_after_s is 0.5", error.message)
    assert engine.failure is not None


async def _lost_again() -> None:
    raise EngineUnavailable("worker 1 of 2 is gone again")


def test_workers_that_are_lost_often_within_a_moment_go_on_with_the_same_tokens():
    """In a row, while they are built again, and before any step of a request is through."""
    usual = make_engine(losses=range(1, 5))
    group: Any = usual._workers
    rebuild, tries = group.rebuild, []

    async def sometimes() -> None:
        tries.append(0)
        if len(tries) % 2:
            await _lost_again()
        await rebuild()

    group.rebuild = sometimes
    engine = Engine(usual.info, usual._scheduler, usual._manager, group, losses=Losses(give_up_after_s=30))

    async def scenario() -> list[Completion]:
        completions = [submit(engine, [n + 1] * 5) for n in range(3)]
        await asyncio.gather(*(c.done.wait() for c in completions))
        return completions

    for n, completion in enumerate(running(engine, scenario())):
        assert completion.error is None
        assert completion.token_ids == continuation([n + 1] * 5, 8)
    assert len(tries) == 4


def test_a_form_that_is_being_compiled_waits_for_workers_that_come_back():
    engine = make_engine(eos=(1,))
    group: Any = engine._workers
    prepare, tries = group.prepare_form, []

    async def lost_at_first(kind: str, text: str) -> None:
        tries.append(text)
        if len(tries) < 3:
            raise EngineUnavailable("a worker is gone")
        await prepare(kind, text)

    group.prepare_form = lost_at_first

    async def scenario() -> Completion:
        completion = submit(engine, PROMPT, SamplingParams(max_tokens=8, regex="good"))
        await completion.done.wait()
        return completion

    assert running(engine, scenario()).error is None
    assert len(tries) == 3


def test_one_message_per_front_end_and_step():
    engine = make_engine()
    messages: list[int] = []

    async def scenario() -> None:
        done = asyncio.Event()
        finished = 0

        def sink(delivery: Delivery) -> None:
            nonlocal finished
            messages.append(len(delivery.handles) + len(delivery.deltas))
            finished += sum(item.finish_reason is not None for _, item in delivery.deltas)
            if finished == 4:
                done.set()

        for n in range(4):
            engine.submit(asking([n], SAMPLING), n, sink)
        await done.wait()

    running(engine, scenario())
    assert messages == [4] * 8


def test_aborted_request_frees_its_blocks():
    engine = make_engine()

    async def scenario() -> None:
        completion = Completion()
        [request] = engine.submit(asking(PROMPT, SamplingParams(max_tokens=90)), 0, completion.sink)
        while len(completion.token_ids) < 3:
            await asyncio.sleep(0)
        engine.abort(request)
        engine.abort(request)
        while not engine.recount().all_free:
            await asyncio.sleep(0)

    running(engine, scenario())
    assert engine.stats.aborted_requests == 1


class Slow(SimulatedGroup):
    """Answers a step only when told to; knows what is under way."""

    def __init__(self, plan: MemoryPlan):
        super().__init__(plan)
        self.started: list[int] = []
        self.allowed = asyncio.Semaphore(0)

    async def start_step(self, step: Step) -> StepResult:
        self.started.append(step.number)
        await self.allowed.acquire()
        return await super().start_step(step)


def slow_engine(depth: int) -> tuple[Engine, Slow]:
    engine = make_engine()
    workers = Slow(engine._manager.plan)
    return Engine(engine.info, engine._scheduler, engine._manager, workers, depth), workers


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("depth", "under_way"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_the_next_steps_are_sent_while_one_runs(depth: int, under_way: list[int]):
    engine, workers = slow_engine(depth)

    async def scenario() -> Completion:
        completion = submit(engine, PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
        await settle()
        assert workers.started == under_way
        for _ in range(20):
            workers.allowed.release()
        await completion.done.wait()
        return completion

    assert running(engine, scenario()).token_ids == continuation(PROMPT, 8)
    assert engine.recount().all_free


def test_a_request_that_comes_while_a_step_runs_is_sent_without_waiting_for_it():
    """The first one has its last token under way: there is room for a step, and nothing to fill it with."""
    engine, workers = slow_engine(depth=2)

    async def scenario() -> tuple[Completion, Completion]:
        first = submit(engine, PROMPT, SamplingParams(max_tokens=1))
        await settle()
        assert workers.started == [1]
        second = submit(engine, [9, 8, 7], SamplingParams(max_tokens=1))
        await settle()
        assert workers.started == [1, 2]
        for _ in range(20):
            workers.allowed.release()
        await asyncio.gather(first.done.wait(), second.done.wait())
        return first, second

    first, second = running(engine, scenario())
    assert (first.token_ids, second.token_ids) == (continuation(PROMPT, 1), continuation([9, 8, 7], 1))


def test_a_step_too_many_after_a_stop_token_tells_and_keeps_nothing():
    expected = continuation(PROMPT, 8)
    engine, workers = slow_engine(depth=2)

    async def scenario() -> Completion:
        params = SamplingParams(max_tokens=8, stop_token_ids=(expected[1],))
        completion = submit(engine, PROMPT, params)
        for _ in range(20):
            workers.allowed.release()
        await completion.done.wait()
        await settle()
        return completion

    completion = running(engine, scenario())
    assert completion.token_ids == expected[: expected.index(expected[1]) + 1]
    assert len(workers.started) == len(completion.token_ids) + 1
    assert engine.stats.generated_tokens == len(completion.token_ids)
    assert engine.recount().all_free


def test_a_request_given_up_while_two_steps_run_frees_its_blocks():
    engine, workers = slow_engine(depth=2)

    async def scenario() -> None:
        [request] = engine.submit(asking(PROMPT, SAMPLING), 0, Completion().sink)
        await settle()
        assert workers.started == [1, 2]
        engine.abort(request)
        for _ in range(20):
            workers.allowed.release()
        await settle()

    running(engine, scenario())
    assert engine.recount().all_free


# Answers of a given form


def test_a_form_that_can_not_be_compiled_is_told_and_disturbs_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(structured_output, "COMPILE_TIMEOUT_S", 0.05)
    engine = make_engine(eos=(VOCAB - 1,))

    async def scenario() -> list[Completion]:
        asked = [submit(engine, PROMPT)] + [
            submit(engine, PROMPT, SamplingParams(max_tokens=8, regex=regex, ignore_eos=True))
            for regex in ("good", "bad", "slow")
        ]
        await asyncio.gather(*(completion.done.wait() for completion in asked))
        return asked

    plain, good, bad, slow = running(engine, scenario())
    assert plain.token_ids == good.token_ids == continuation(PROMPT, 8)
    assert isinstance(bad.error, InvalidRequest)
    assert (bad.error.message, bad.error.field) == ("regex cannot be used: bad", "regex")
    assert isinstance(slow.error, InvalidRequest)
    assert "could not be compiled within 0.05 s" in slow.error.message
    assert engine.recount().all_free


def test_a_request_given_up_while_its_form_is_compiled_is_never_queued():
    engine = make_engine(eos=(VOCAB - 1,))

    async def scenario() -> None:
        [request] = engine.submit(asking(PROMPT, SamplingParams(regex="good")), 0, Completion().sink)
        engine.abort(request)
        await settle()

    running(engine, scenario())
    assert engine.stats.steps == 0


def test_a_form_without_an_end_token_is_refused():
    with pytest.raises(InvalidRequest, match="has no end token, so an answer of a given form could not end"):
        submit(make_engine(), PROMPT, SamplingParams(regex="good"))


# Deadlines, and several answers


def test_a_request_whose_time_is_over_hears_how_far_it_came():
    engine, workers = slow_engine(depth=1)

    async def scenario() -> Completion:
        completion = Completion()
        engine.submit(asking(PROMPT, SAMPLING, options=RequestOptions(timeout_s=0.02)), 0, completion.sink)
        await settle()
        workers.allowed.release()
        await settle()
        await asyncio.sleep(0.03)
        workers.allowed.release()
        await completion.done.wait()
        return completion

    completion = running(engine, scenario())
    assert isinstance(completion.error, DeadlineExceeded)
    assert "0.02 s are over; 2 tokens of at most 8 were generated" in completion.error.message
    assert engine.stats.expired_requests == 1
    assert engine.recount().all_free


def test_answers_to_one_prompt_have_handles_in_a_row():
    engine = make_engine()
    heard: dict[int, list[int]] = {5: [], 6: [], 7: []}

    async def scenario() -> None:
        done = asyncio.Event()

        def sink(delivery: Delivery) -> None:
            for handle, token in zip(delivery.handles, delivery.tokens, strict=True):
                heard[handle].append(token)
            for handle, item in delivery.deltas:
                heard[handle] += item.token_ids
            if all(len(tokens) == 8 for tokens in heard.values()):
                done.set()

        engine.submit(asking(PROMPT, SamplingParams(max_tokens=8, n=3)), 5, sink)
        await done.wait()

    running(engine, scenario())
    assert heard == {handle: continuation(PROMPT, 8) for handle in (5, 6, 7)}


def test_a_receipt_comes_with_the_last_delta_and_the_next_turn_finds_all():
    engine = make_engine(leasable=12)
    told: list[Any] = []

    async def ask() -> None:
        first, options = Completion(), RequestOptions(keep_s=60.0)
        engine.submit(asking(PROMPT, SAMPLING, options=options), 0, told.append)
        engine.submit(asking(PROMPT, SAMPLING, options=RequestOptions()), 1, first.sink)
        await first.done.wait()
        while not any(delta.finish_reason for each in told for _, delta in each.deltas):
            await asyncio.sleep(0.001)

    running(engine, ask())
    deltas = [delta for each in told for _, delta in each.deltas]
    receipt = deltas[-1].lease
    assert [delta.lease for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert receipt is not None and receipt.tokens == len(PROMPT) + 8 - 1
    [held] = engine.status.leases()
    assert held.receipt == receipt and engine.status.release_lease(receipt.id) and engine.status.leases() == ()


def test_an_answer_whose_text_is_complete_ends_soon_and_is_leased():
    engine = make_engine(leasable=12)
    completion, leases = Completion(), []

    def sink(delivery: Any) -> None:
        completion.sink(delivery)
        leases.extend(delta.lease for _, delta in delivery.deltas if delta.lease is not None)
        if len(completion.token_ids) == 3:
            engine.end_soon(number)

    async def ask() -> None:
        nonlocal number
        [number] = engine.submit(asking(PROMPT, SAMPLING, options=RequestOptions(keep_s=60.0)), 0, sink)
        await completion.done.wait()

    number: Any = 0
    running(engine, ask())
    assert 3 < len(completion.token_ids) <= 5 and completion.finish_reason == "length"
    assert completion.token_ids == continuation(PROMPT, 8)[: len(completion.token_ids)]
    assert leases[0].id and leases[0].tokens == len(PROMPT) + len(completion.token_ids) - 1
    engine.end_soon(number)  # it has ended, which harms no request


def test_lost_workers_end_leases_and_requests_that_ask_for_one_go_on():
    engine = make_engine(leasable=12, losses=(14,))
    first, second = Completion(), Completion()
    receipts: list[Any] = []

    def sink(delivery: Any) -> None:
        second.sink(delivery)
        receipts.extend(delta.lease for _, delta in delivery.deltas if delta.lease is not None)

    async def ask() -> None:
        options = RequestOptions(keep_s=60.0)
        engine.submit(asking(PROMPT, SAMPLING, options=options), 0, first.sink)
        await first.done.wait()
        assert len(engine.status.leases()) == 1
        engine.submit(asking([7] * 20, SAMPLING, options=options), 1, sink)
        await second.done.wait()

    running(engine, ask())
    counts = engine.status.metrics().leases
    assert (counts.granted, counts.lost, counts.held) == (2, 1, 1) and engine.stats.rebuilds == 1
    assert [lease.receipt for lease in engine.status.leases()] == receipts
