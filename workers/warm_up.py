"""Forward passes over the null block, before requests come: what can be found out, chosen or compiled then is."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedModel
from ..kernels.paged_attention import select_backend
from ..kernels.products import compile_products
from ..kernels.sampling import Changes, Draw
from ..proto.step import View
from ..proto.worker import ModelSettings
from .cpu.fused import fuse
from .cpu.linear import products_left_out, settle_linears
from .cpu.order import check_sums
from .graphs import GRAPH_BYTES, Recorder, StepGraphs, mixed_tokens, recorded_rows, recorder
from .memory import DeviceMemory
from .runner import ModelRunner, Rows
from .slots import GREEDY, Slot

WARM_UP_TOKENS = 4

DEAREST, DEAREST_CHANGES = Draw(temperature=1.0, top_p=0.9, logprobs=0), Changes(biases=[(0, 1.0)])
"""What takes the most memory of all ways to draw a token. On a GPU every kernel of a draw is launched."""


@torch.inference_mode()
def warm_up(runner: ModelRunner, settings: ModelSettings) -> None:
    """Let the layers find their backend, or fail, before requests wait; let the model run as fast as it can."""
    model, limits = runner.model, runner.limits
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    _take_slot(runner, longest)
    _choose_backend(runner, settings.attention_backend)
    # Fewer calls of Python: by torch's compiler or by ours, for families whose modules the table is tested with.
    if settings.torch_compile:
        _compile(runner)
    else:
        _fuse(runner, settings)
    if model.order.is_one and model.device.type == "cuda":
        check_sums(model.attention.backend, lambda: runner.forward(_rows()), chooses=not model.attention.has_frames)
    # On a CPU: how many threads compute a step, and its matrix products for each number of tokens.
    runner.threads.learn(lambda tokens: runner.forward(_rows(tokens=tokens)), longest, runner.parallel.share_from_first)
    compile_products(model.module, limits.max_num_batched_tokens, runner.use_threads_for)
    logits = runner.forward(_rows())
    _draw_dearly(runner, logits)
    runner.sampling.draw(logits, [Draw()], [0])
    runner.tables.retire(0)
    # On a GPU: steps are recorded, now where that can be.
    record = _recorder_of(runner, settings)
    if record is not None and runner.last_tokens is not None:
        widths = [runner.tables.block_tables[g].shape[1] for g, _ in runner.masks]
        limited = limits.max_num_seqs, limits.max_num_batched_tokens, widths
        runner.graphs = StepGraphs(model, runner.logits, runner.last_tokens, record, *limited)
        record_all(runner)


@torch.inference_mode()
def unseen_bytes(runner: ModelRunner, settings: ModelSettings, memory: DeviceMemory) -> int:
    """What steps will take of the device that `run_largest_steps` does not show, about: what is merged of long rows;
    and where steps are recorded, the same once more, graphs, tables of frames, and what lies between the layers of the
    one with the most tokens, in which the others have theirs."""
    model, limits = runner.model, runner.limits
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    _take_slot(runner, longest)
    _choose_backend(runner, settings.attention_backend)
    _fuse(runner, settings)  # before there are pages: weights lie beside those that are made of them for a moment
    merged = model.attention.backend.capabilities.merge_bytes if runner.masks else 0
    if _recorder_of(runner, settings) is None:
        return merged
    rows, mixed = recorded_rows(limits.max_num_seqs), mixed_tokens(model, limits.max_num_batched_tokens)
    tables = 0  # of frames; those that are held are there already
    if runner.tables.held is None:
        tables = sum(runner.tables.block_tables[g][:1].nbytes for g, _ in runner.masks) * rows[0] * (2 if mixed else 1)
    kinds = _views_to_record(runner)
    if model.cross is not None and len(kinds) > 1:
        tables += model.cross.table_bytes(rows[0] + sum(mixed[:1]))
    _take_slot(runner, longest, kinds[0])
    largest = _of_tokens(mixed[0], longest) if mixed else _rows(rows=rows[0], tokens=1)
    between = memory.peak_of(lambda: runner.forward(largest))
    runner.tables.retire(0)
    return 2 * merged + between + tables + GRAPH_BYTES * len(kinds) * (len(mixed) + len(rows))


def _fuse(runner: ModelRunner, settings: ModelSettings) -> None:
    """What is fused already stays so. All weights lie as products read them from then on."""
    model = runner.model
    if not (settings.torch_compile or settings.enforce_eager) and model.is_tested:
        fuse(model.module, model.attention, model.device)
    settle_linears(model.module)


def _recorder_of(runner: ModelRunner, settings: ModelSettings) -> Recorder | None:
    """None where steps are not recorded, as where what each step gathers is laid out by the host."""
    has_frames = runner.model.attention.has_frames
    return recorder(runner.model.device) if has_frames and not settings.enforce_eager else None


def _dearest_views(runner: ModelRunner) -> tuple[View, ...]:
    """Of a row that sees as much of images as there may be."""
    return runner.model.cross.dearest_views if runner.model.cross is not None else ()


def _views_to_record(runner: ModelRunner) -> list[tuple[View, ...]]:
    """What rows of recorded steps see of images, one of each kind. The dearest first: it takes the most memory."""
    cross = runner.model.cross
    return [()] if cross is None or not cross.has_frames else [cross.dearest_views, ()]


@torch.inference_mode()
def record_all(runner: ModelRunner) -> None:
    """Record a step of each shape, so that no request waits for that."""
    graphs, limits = runner.graphs, runner.limits
    if graphs is None:
        return
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    steps = [_of_tokens(tokens, longest) for tokens in graphs.mixed_to_record()]
    for rows in graphs.to_record():
        steps.append(_rows(rows=rows, tokens=1)._replace(computed=np.ones(rows, dtype=np.int32)))
    for views in _views_to_record(runner):
        _take_slot(runner, longest, views)
        for step in steps:
            if graphs.refusal is None:
                runner.forward(step)
    runner.tables.retire(0)


@torch.inference_mode()
def run_largest_steps(runner: ModelRunner, backend: str | None) -> None:
    """Steps of as many tokens as there may be, of one prompt and of many rows, whose tokens are drawn as dearly as can
    be."""
    limits = runner.limits
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    each = min(limits.max_num_batched_tokens // rows, longest)
    _take_slot(runner, longest, _dearest_views(runner))
    _choose_backend(runner, backend)
    runner.forward(_rows(tokens=longest))
    logits = runner.forward(_rows(rows=rows, tokens=each))
    kept = torch.empty_like(logits)  # as recorded steps have it, beside those of a step that goes the usual way
    _draw_dearly(runner, logits)
    del kept
    runner.tables.retire(0)


def _draw_dearly(runner: ModelRunner, logits: Tensor) -> None:
    rows = len(logits)
    runner.sampling.draw(logits, [DEAREST] * rows, [0] * rows, [DEAREST_CHANGES] * rows)


def _choose_backend(runner: ModelRunner, name: str | None) -> None:
    model = runner.model
    choose = partial(select_backend, device=model.device, name=name)
    with products_left_out(model.module):
        model.attention.learn(lambda: runner.forward(_rows()), choose)
    if runner.last_tokens is not None and model.attention.backend.capabilities.held_tables:
        runner.tables.hold(model.device)


def _take_slot(runner: ModelRunner, tokens: int, views: Sequence[View] = ()) -> None:
    """Put so many tokens into slot 0, from which all rows read. views: what they see of images"""
    prompt = np.arange(max(tokens, WARM_UP_TOKENS)) % WARM_UP_TOKENS
    runner.tables.slots[0] = Slot(prompt, GREEDY, Draw(), views=views)


def _rows(rows: int = 1, tokens: int = WARM_UP_TOKENS) -> Rows:
    """Rows of a few tokens, the first of their sequences."""
    return Rows(
        slots=np.zeros(rows, dtype=np.int64),
        places=np.arange(rows),
        query_lens=np.full(rows, tokens, dtype=np.int32),
        computed=np.zeros(rows, dtype=np.int32),
        finishes=np.ones(rows, dtype=bool),
    )


def _of_tokens(tokens: int, longest: int) -> Rows:
    """Rows with so many tokens together, or a few less, none with more than `longest`."""
    rows = -(-tokens // longest)
    return _rows(rows=rows, tokens=tokens // rows)


def _compile(runner: ModelRunner) -> None:
    """Now, not when requests come: no, one and several tokens are different things to a compiler, and so are logits."""
    from torch._dynamo.exc import TorchDynamoException

    if not runner.model.attention.is_constant:
        raise UnsupportedModel(
            "layers of this model attend to tokens that they choose, or by biases that they learnt, which is not "
            "compiled. "
            "Start without torch_compile.",
            field="torch_compile",
        )
    runner.model.compile()
    one = _rows()._replace(query_lens=np.ones(1, dtype=np.int32))
    unfinished = _rows()._replace(finishes=np.zeros(1, dtype=bool))
    try:
        for rows in (_rows(), _rows(rows=2), unfinished, one):
            runner.forward(rows)
    except TorchDynamoException as error:
        raise UnsupportedModel(
            f"torch.compile cannot compile this model: {error}. Start without torch_compile.",
            field="torch_compile",
        ) from error
