"""Decode steps that are recorded and replayed. Where there is no GPU, operations are recorded as torch sees them: with
every number that Python read baked in, as in a CUDA graph, and replayed without any Python between them."""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from intarsia.kernels.mixers import cpu as mixers
from intarsia.kernels.paged_attention import TritonBackend, worklist
from intarsia.kernels.state.triton import TritonStates
from intarsia.kernels.toolchain import triton as gpu
from intarsia.proto.request import SamplingParams
from intarsia.proto.worker import RunnerLimits
from intarsia.tests.kernels.scenes import cut_short
from intarsia.tests.local import LocalWorkers, complete, make_engine
from intarsia.workers import graphs, warm_up
from intarsia.workers.graphs import (
    MOST_GATHERING_TOKENS,
    MOST_ROWS,
    CudaRecorder,
    Recorder,
    Replay,
    mixed_tokens,
    padded_pages,
    padded_rows,
    recorded_rows,
)
from intarsia.workers.last_tokens import LastTokens
from intarsia.workers.models import load

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SHORT = {"max_num_batched_tokens": 16}
"""Steps, so that those with prompts are soon recorded by an interpreter of GPUs' kernels."""


class Tape:
    """Records by running once more, and puts the pages back as they were: a GPU does not run what it records."""

    def __init__(self, workers: LocalWorkers):
        self._workers = workers
        self.recorded = self.replayed = 0

    def __call__(self, forward: Callable[[], Tensor]) -> Replay:
        model = self._workers.worker._model
        assert model is not None
        buffers = {
            view.untyped_storage().data_ptr(): view.untyped_storage()
            for views in (*model.pages.tokens.values(), *model.pages.states.values())
            for view in (views if isinstance(views, tuple | list) else [views])
        }
        before = [storage.clone() for storage in buffers.values()]
        tape = make_fx(forward)()
        for storage, old in zip(buffers.values(), before, strict=True):
            storage.copy_(old)
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return tape()

        return replay


def record_with(record: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are recorded on a CPU, and the tokens of a step stay where a GPU would have them."""

    def last_tokens(limits: RunnerLimits, device: torch.device) -> LastTokens:
        return LastTokens(limits.max_num_seqs, limits.max_num_batched_tokens, device)

    monkeypatch.setattr(warm_up, "recorder", lambda device: record)
    monkeypatch.setattr(LastTokens, "of", last_tokens)


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> tuple[LocalWorkers, Tape]:
    """Workers whose decode steps are recorded."""
    workers = LocalWorkers()
    tape = Tape(workers)
    record_with(tape, monkeypatch)
    # C++ leaves nothing on the tape. There is none on a GPU.
    monkeypatch.setattr(warm_up, "fuse", lambda *_: None)
    monkeypatch.setattr(load, "hold_linears", lambda *_: None)
    monkeypatch.setattr(load, "pack_experts", lambda *_: None)
    monkeypatch.setattr(mixers, "is_available", lambda: False)
    return workers, tape


@pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "bamba", "qwen3_5", "deepseek_v3"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma2", "smollm3", "llama4", "falcon_h1", "lfm2", "gemma3n")
        ),
    ],
)
def test_replayed_steps_give_the_tokens_of_the_oracle(family: str, tiny: Callable, taped: tuple[LocalWorkers, Tape]):
    """Requests come, grow over borders of pages and shapes, and go; prompts come in chunks between."""
    model, (workers, tape) = tiny(family), taped

    async def run() -> None:
        engine = await make_engine(model.path, workers, attention_backend="torch", max_prefill_chunk_tokens=7)
        for _ in range(2):
            answers = await complete(engine, model.prompts, GREEDY)
            assert [answer.token_ids for answer in answers] == model.expected
        assert engine.recount().all_free

    asyncio.run(run())
    assert tape.recorded > 2, "rows and pages must have taken several shapes"
    assert tape.replayed > 10


def test_steps_that_see_an_image_go_unrecorded_where_attention_has_no_frames_for_them(
    tiny: Callable, taped: tuple[LocalWorkers, Tape], monkeypatch: pytest.MonkeyPatch
):
    """Frames of plain torch are for rows that all have keys. Steps of text alone are recorded."""
    (model, (workers, tape)), replayed = (tiny("mllama"), taped), []
    run = graphs.StepGraphs.run

    def noted(self: graphs.StepGraphs, step: graphs.PackedStep) -> Tensor | None:
        logits = run(self, step)
        replayed.append((step.sight is not None, logits is not None))
        return logits

    monkeypatch.setattr(graphs.StepGraphs, "run", noted)

    async def answers() -> None:
        engine = await make_engine(model.path, workers, attention_backend="torch")
        for which in ([0], [0, 1], [2]):
            prompts, images = [model.prompts[n] for n in which], [model.images[n] for n in which]
            answers = await complete(engine, prompts, GREEDY, images)
            expected = [model.expected[n] for n in which]
            assert [answer.token_ids for answer in answers] == [tokens[: GREEDY.max_tokens] for tokens in expected]

    asyncio.run(answers())
    assert (True, True) not in replayed
    assert {(True, False), (False, True)} <= set(replayed)
    assert tape.replayed > 10


def test_a_recording_that_fails_leaves_its_memory_behind_and_the_garbage_collector_waits(
    monkeypatch: pytest.MonkeyPatch,
):
    """After a failure the allocator believes that a recording into that memory still goes on. What is collected may be
    graphs of an engine before, which must not be freed meanwhile."""
    pools: list[object] = []

    @contextmanager
    def graph(_: object, pool: object, capture_error_mode: str) -> Iterator[None]:
        pools.append(pool)
        assert not gc.isenabled()
        if len(pools) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield

    for name, value in (("graph_pool_handle", object), ("CUDAGraph", object), ("graph", graph)):
        monkeypatch.setattr(torch.cuda, name, value)
    record = CudaRecorder()
    with pytest.raises(RuntimeError):
        record(lambda: torch.zeros(1))
    for _ in range(2):
        record(lambda: torch.zeros(1))
    assert gc.isenabled()
    assert pools[0] is not pools[1]
    assert pools[1] is pools[2]


def test_what_cannot_be_recorded_goes_on_unrecorded_and_the_log_says_why(
    tiny: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(forward: Callable[[], Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    record_with(refuse, monkeypatch)
    model = tiny("gemma3")
    for backend, reason in (("torch", "could not be recorded: operation not"), ("reference", "has no fixed shapes")):
        caplog.clear()

        async def run(backend: str = backend) -> None:
            engine = await make_engine(model.path, attention_backend=backend)
            answers = await complete(engine, model.prompts[:2], GREEDY)
            assert [answer.token_ids for answer in answers] == model.expected[:2]

        with caplog.at_level(logging.WARNING, graphs.logger.name):
            asyncio.run(run())
        [record] = [record for record in caplog.records if record.name == graphs.logger.name]
        assert reason in record.getMessage()


def test_more_shapes_than_may_be_kept_are_computed_unrecorded(
    tiny: Callable, taped: tuple[LocalWorkers, Tape], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(graphs, "MOST_FRAMES", 1)
    model, (workers, tape) = tiny("gemma3"), taped

    async def run() -> None:
        engine = await make_engine(model.path, workers, attention_backend="torch")
        answers = await complete(engine, model.prompts, GREEDY)
        assert [answer.token_ids for answer in answers] == model.expected

    asyncio.run(run())
    assert tape.recorded == 1


def test_nothing_is_recorded_when_modules_shall_run_as_written(tiny: Callable, taped: tuple[LocalWorkers, Tape]):
    model, (workers, tape) = tiny("gemma3"), taped

    async def run() -> None:
        engine = await make_engine(model.path, workers, attention_backend="torch", enforce_eager=True)
        await complete(engine, model.prompts[:2], GREEDY)

    asyncio.run(run())
    assert tape.recorded == 0


def test_shapes_are_few_and_never_too_small():
    assert [padded_rows(n) for n in (1, 2, 3, 5, 8, 9, 16, 17, 64)] == [1, 2, 4, 8, 8, 16, 16, 24, 64]
    assert recorded_rows(20) == [24, 16, 8, 4, 2, 1] and recorded_rows(4096)[0] == MOST_ROWS
    assert [padded_pages(n) for n in (1, 2, 3, 8, 9, 1000)] == [1, 2, 4, 8, 16, 1024]


def record_wide_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each recording from now on."""
    recorded: list[int] = []

    def record(forward: Callable[[], Tensor]) -> Replay:
        recorded.append(len(forward()))
        return forward

    record_with(record, monkeypatch)
    monkeypatch.setattr(warm_up, "fuse", lambda *_: None)
    capabilities = replace(TritonBackend.capabilities, devices=frozenset({"cpu"}))
    monkeypatch.setattr(TritonBackend, "capabilities", capabilities)
    monkeypatch.setattr(TritonStates, "devices", frozenset({"cpu"}))
    return recorded


@pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))
@pytest.mark.parametrize("family", ["gemma3", "bamba"])
def test_wide_frames_are_recorded_before_requests_come_and_are_few(
    family: str, tiny: Callable, monkeypatch: pytest.MonkeyPatch
):
    """Our kernels for GPUs, run by Python. What is recorded is run again instead of replayed."""
    with_prompts, decode = [4], [4, 2, 1]  # rows of logits
    of_each = with_prompts + decode
    recorded = record_wide_frames(monkeypatch)
    model, workers = tiny(family), LocalWorkers()

    async def run() -> None:
        engine = await make_engine(model.path, workers, attention_backend="triton", max_num_seqs=3, **SHORT)
        before = list(recorded)
        answers = await complete(engine, model.prompts[:2], SamplingParams(temperature=0, max_tokens=5))
        assert [answer.token_ids for answer in answers] == [tokens[:5] for tokens in model.expected[:2]]
        # Largest first, all of them before the first request, and no other one after it.
        assert before == recorded == of_each
        runner = workers.worker._runner
        assert runner is not None and runner.graphs is not None
        plans = [frame.metas[0].plan for frame in runner.graphs._frames.values()]
        kinds = 1 + len(with_prompts)
        assert len({plan.kv_len.data_ptr() for plan in plans}) == kinds, "frames share the memory of the largest"
        held = runner.tables.held
        assert held is not None and all(plan.block_table is held.numbers for plan in plans), "none has its own table"
        # Ranks that meet anew take apart what was recorded; it is recorded again before the next request.
        runner.graphs.forget()
        workers.worker.clear()
        assert recorded == of_each * 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("most_tokens", "counts"), [(1, []), (2, [2]), (128, [128]), (300, [300, 256, 128]), (8192, [1024, 512, 256, 128])]
)
def test_steps_with_prompts_are_filled_up_to_few_counts_of_tokens(most_tokens: int, counts: list[int]):
    attention = SimpleNamespace(backend=SimpleNamespace(capabilities=TritonBackend.capabilities), gathers=False)
    states = SimpleNamespace(has_mixed_frames=False)
    model: Any = SimpleNamespace(attention=attention, pages=SimpleNamespace(state_groups=[]), states=states)
    assert mixed_tokens(model, most_tokens) == counts
    model.pages.state_groups.append(1)
    assert mixed_tokens(model, most_tokens) == []
    states.has_mixed_frames = True
    assert mixed_tokens(model, most_tokens) == counts
    attention.gathers = True  # what each query of a prompt chooses
    assert mixed_tokens(model, most_tokens) == sorted({min(n, MOST_GATHERING_TOKENS) for n in counts}, reverse=True)


@pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))
def test_a_step_that_does_not_fit_into_its_frame_goes_the_usual_way(tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    """Rows are cut every few tokens, and what is merged has no room, as with many rows of very long requests."""
    record_wide_frames(monkeypatch)
    cut_short(monkeypatch)
    monkeypatch.setattr(worklist, "MOST_RECORD_BYTES", 0)
    fitted: list[bool] = []
    run = graphs.StepGraphs.run

    def noted(self: graphs.StepGraphs, step: graphs.PackedStep) -> Tensor | None:
        logits = run(self, step)
        fitted.append(logits is not None)
        return logits

    monkeypatch.setattr(graphs.StepGraphs, "run", noted)
    model = tiny("mistral")

    async def answer() -> None:
        engine = await make_engine(model.path, LocalWorkers(), attention_backend="triton", max_num_seqs=1, **SHORT)
        assert all(fitted)
        (answer,) = await complete(engine, model.prompts[:1], SamplingParams(temperature=0, max_tokens=4))
        assert answer.token_ids == model.expected[0][:4]
        assert not fitted[-1]

    asyncio.run(answer())
