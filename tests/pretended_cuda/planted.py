"""Mistakes that a pretended device must find. Each is put into the product for one run of an engine.

What is to be named is the place of the mistake: here, or where the product falls over it.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import GroupBatch, TritonBackend
from intarsia.kernels.paged_attention import triton as attention
from intarsia.kernels.paged_attention.held_tables import HeldTables
from intarsia.kernels.sampling import TritonSampling
from intarsia.proto.step import Admit
from intarsia.tests.local import make_engine
from intarsia.workers.collectives import NcclCollectives
from intarsia.workers.graphs import StepGraphs
from intarsia.workers.last_tokens import ON_DEVICE, LastTokens
from intarsia.workers.layers.sight import Sight, SightFrames
from intarsia.workers.pages import Pages
from intarsia.workers.slots import SlotTables
from intarsia.workers.tensor_parallel import TensorParallel
from intarsia.workers.worker import Worker

from . import nccl
from .engines import PretendedWorkers, answers, swapping
from .scenes import Scene

Attend = Callable[..., None]


@contextmanager
def _before_attention(mistake: Callable[..., tuple]) -> Iterator[None]:
    """mistake: takes what `attend` is given, and gives what it is given instead"""
    attend = TritonBackend.attend

    def with_mistake(self: TritonBackend, *args: Any) -> None:
        attend(self, *mistake(*args))

    with patch.object(TritonBackend, "attend", with_mistake):
        yield


def lengths_stay_on_the_host() -> Any:
    def mistake(q: Tensor, pages: Tensor, params: Any, meta: Any, out: Tensor) -> tuple:
        kv_len = torch.ones(len(meta.plan.kv_len), dtype=torch.int32)
        return q, pages, params, replace(meta, plan=replace(meta.plan, kv_len=kv_len)), out

    return _before_attention(mistake)


def attention_reads_a_number() -> Any:
    def mistake(q: Tensor, pages: Tensor, params: Any, meta: Any, out: Tensor) -> tuple:
        assert meta.plan.kv_len.max().item() > 0
        return q, pages, params, meta, out

    return _before_attention(mistake)


def attention_makes_a_tensor_of_a_number() -> Any:
    def mistake(q: Tensor, pages: Tensor, params: Any, meta: Any, out: Tensor) -> tuple:
        return q * torch.tensor(1.0, device=q.device), pages, params, meta, out

    return _before_attention(mistake)


def attention_has_a_shape_of_its_numbers() -> Any:
    def mistake(q: Tensor, pages: Tensor, params: Any, meta: Any, out: Tensor) -> tuple:
        assert len(q[q > 0]) > 0
        return q, pages, params, meta, out

    return _before_attention(mistake)


def attention_allocates_by_a_length() -> Any:
    def mistake(q: Tensor, pages: Tensor, params: Any, meta: Any, out: Tensor) -> tuple:
        torch.empty(int(meta.plan.kv_len.sum()), device=q.device)
        return q, pages, params, meta, out

    return _before_attention(mistake)


def queries_are_of_another_kind() -> Any:
    return _before_attention(lambda q, *others: (q.to(torch.bfloat16), *others))


def pages_are_read_behind_their_end() -> Any:
    def mistake(q: Tensor, pages: Tensor, params: Any, meta: Any, out: Tensor) -> tuple:
        plan = replace(meta.plan, block_table=meta.plan.block_table + len(pages))
        return q, pages, params, replace(meta, plan=plan), out

    return _before_attention(mistake)


@contextmanager
def one_pinned_buffer_for_all_uploads() -> Iterator[None]:
    buffer = torch.empty(1 << 16, dtype=torch.uint8).pin_memory()

    def upload(array: np.ndarray, device: torch.device) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        place = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.numpy()[...] = array
        return place.to(device, non_blocking=True)

    with patch.object(attention, "upload", upload):
        yield


def tokens_are_read_before_they_arrive() -> Any:
    return patch.object(torch.cuda.Event, "query", lambda event: True)


def gathered_pages_are_copied_before_they_are_there() -> Any:
    """The stream that copies does not wait for the one that computes."""
    return patch.object(torch.cuda.Stream, "wait_stream", lambda own, other: _wait(own, other, own.number == 0))


def pages_are_put_back_before_they_have_come() -> Any:
    """The stream that computes does not wait for the one that copies."""
    return patch.object(torch.cuda.Stream, "wait_stream", lambda own, other: _wait(own, other, own.number != 0))


def _wait(own: Any, other: Any, does: bool) -> None:
    if does:
        own.wait_event(other.record_event())


def pages_are_swapped_by_another_stream_than_they_are_written() -> Any:
    """What is gathered for a copy to the host is gathered in the stream that copies, too."""
    swap_out = Pages.swap_out

    def with_mistake(self: Pages, moves: Any) -> None:
        assert self._beside is not None
        with torch.cuda.stream(self._beside):
            swap_out(self, moves)

    return patch.object(Pages, "swap_out", with_mistake)


@contextmanager
def _before_the_draw(mistake: Callable[[Tensor], Tensor]) -> Iterator[None]:
    draw = TritonSampling.draw

    def with_mistake(self: TritonSampling, logits: Tensor, *others: Any) -> Any:
        return draw(self, mistake(logits), *others)

    with patch.object(TritonSampling, "draw", with_mistake):
        yield


def sampler_adds_a_host_tensor() -> Any:
    return _before_the_draw(lambda logits: logits + torch.zeros(logits.shape[-1]))


def sampler_waits_once_more() -> Any:
    def mistake(logits: Tensor) -> Tensor:
        assert logits.isfinite().all()
        return logits

    return _before_the_draw(mistake)


@contextmanager
def recorded_steps_keep_their_lengths() -> Iterator[None]:
    """Nothing is forbidden about it. A replay reads what is there, so later tokens see too little."""
    refill, kept = TritonBackend.refill, {}

    def with_mistake(self: TritonBackend, frame: Any, batch: Any, transfer: Any) -> bool:
        if batch.query_lens.max() == 1:  # of decode steps
            batch = replace(batch, kv_lens=kept.setdefault(id(frame), batch.kv_lens))
        return refill(self, frame, batch, transfer)

    with patch.object(TritonBackend, "refill", with_mistake):
        yield


def drawn_tokens_are_not_kept_for_the_next_step() -> Any:
    return patch.object(LastTokens, "keep", lambda self, drawn: ON_DEVICE)


def replayed_steps_pick_the_tokens_of_their_recording() -> Any:
    fill = StepGraphs._fill

    def with_mistake(self: StepGraphs, frame: Any, step: Any, padded: Any) -> bool:
        picks = frame.picks_T.clone()
        does_fit = fill(self, frame, step, padded)
        frame.picks_T.copy_(picks)
        return does_fit

    return patch.object(StepGraphs, "_fill", with_mistake)


def blocks_that_a_request_grows_by_are_lost() -> Any:
    append = SlotTables.append_blocks

    def with_mistake(self: SlotTables, entry: Any) -> None:
        if isinstance(entry, Admit):
            append(self, entry)

    return patch.object(SlotTables, "append_blocks", with_mistake)


def changes_of_tables_do_not_reach_the_device() -> Any:
    """The host's table is right, and so is the place to which the next token is written."""
    put = HeldTables.put

    def with_mistake(self: HeldTables, transfer: Any) -> None:
        self._noted = [(start, stop) for start, stop in self._noted if stop - start > 1]  # those of newcomers
        put(self, transfer)

    return patch.object(HeldTables, "put", with_mistake)


def window_is_off_by_one() -> Any:
    """A query does not see the oldest key of its window."""
    oldest = GroupBatch.oldest_visible

    def with_mistake(self: GroupBatch, position: Any) -> Any:
        found = oldest(self, position)
        return found if self.window_tokens is None else np.where(found > 0, found + 1, found)

    return patch.object(GroupBatch, "oldest_visible", with_mistake)


def ranks_that_meet_anew_replay_what_they_recorded() -> Any:
    return patch.object(StepGraphs, "forget", lambda self: None)


def sums_of_ranks_are_left_out() -> Any:
    return patch.object(NcclCollectives, "all_reduce", lambda self, tensor: None)


@contextmanager
def one_rank_leaves_out_a_collective() -> Iterator[None]:
    share = TensorParallel.share_from_first

    def with_mistake(self: TensorParallel, tensor: Tensor) -> None:
        if self.rank == 0:
            share(self, tensor)

    with (
        patch.object(nccl, "LONGEST_WAIT_S", 2.0),
        patch.object(TensorParallel, "share_from_first", with_mistake),
    ):
        yield


@contextmanager
def rows_see_as_much_of_images_as_when_recorded() -> Iterator[None]:
    """Lengths of what an encoder made are baked into recorded decode steps."""
    refill, kept = SightFrames.refill, {}

    def with_mistake(self: SightFrames, frame: Any, sight: Sight, transfer: Any) -> bool:
        batches = {
            g: replace(batch, kv_lens=np.minimum(kept.setdefault((id(frame), g), batch.kv_lens), _most_keys(batch)))
            if len(sight.sees_T) == len(batch.kv_lens)
            else batch
            for g, batch in sight.batches.items()
        }
        return refill(self, frame, sight._replace(batches=batches), transfer)

    with patch.object(SightFrames, "refill", with_mistake):
        yield


def _most_keys(batch: GroupBatch) -> int:
    return batch.block_table.shape[1] * batch.block_tokens


def rows_see_an_image_as_when_recorded() -> Any:
    """Which rows see an image is baked into recorded steps: there all do."""
    refill = SightFrames.refill

    def with_mistake(self: SightFrames, frame: Any, sight: Sight, transfer: Any) -> bool:
        return refill(self, frame, sight._replace(sees_T=np.ones_like(sight.sees_T)), transfer)

    return patch.object(SightFrames, "refill", with_mistake)


class Planted(NamedTuple):
    """A mistake, and what an engine is asked that makes it."""

    mistake: Callable[[], Any]
    prompts: int = 1
    tokens: int = 4
    block_size: int = 16
    ranks: int = 1
    meets_anew: bool = False
    swaps: bool = False
    has_images: bool = False


def _of_swap(mistake: Callable[[], Any]) -> Planted:
    return Planted(mistake, prompts=2, tokens=14, swaps=True)


PLANTED: dict[str, Planted] = {
    planted.mistake.__name__: planted
    for planted in (
        Planted(lengths_stay_on_the_host),
        Planted(attention_reads_a_number),
        Planted(attention_makes_a_tensor_of_a_number),
        Planted(attention_has_a_shape_of_its_numbers),
        Planted(attention_allocates_by_a_length),
        Planted(queries_are_of_another_kind),
        Planted(pages_are_read_behind_their_end),
        Planted(one_pinned_buffer_for_all_uploads),
        Planted(tokens_are_read_before_they_arrive),
        Planted(sampler_adds_a_host_tensor),
        Planted(sampler_waits_once_more),
        Planted(recorded_steps_keep_their_lengths),
        Planted(drawn_tokens_are_not_kept_for_the_next_step),
        Planted(replayed_steps_pick_the_tokens_of_their_recording, prompts=2),
        Planted(blocks_that_a_request_grows_by_are_lost, tokens=8, block_size=5),
        Planted(changes_of_tables_do_not_reach_the_device, tokens=8, block_size=5),
        Planted(window_is_off_by_one, tokens=14),
        _of_swap(gathered_pages_are_copied_before_they_are_there),
        _of_swap(pages_are_put_back_before_they_have_come),
        _of_swap(pages_are_swapped_by_another_stream_than_they_are_written),
        Planted(sums_of_ranks_are_left_out, ranks=2),
        Planted(one_rank_leaves_out_a_collective, ranks=2),
        Planted(ranks_that_meet_anew_replay_what_they_recorded, ranks=2, meets_anew=True),
        Planted(rows_see_as_much_of_images_as_when_recorded, prompts=2, has_images=True),
        Planted(rows_see_an_image_as_when_recorded, prompts=2, has_images=True),
    )
}


def shown_by(scene: Scene) -> list[str]:
    """The mistakes that a scene can show."""
    return [name for name, planted in PLANTED.items() if planted.has_images == any(scene.images)]


def try_all(scene: Scene, little_memory: str, names: Sequence[str]) -> dict[str, Any]:
    """Of each mistake: what is said of it; if nothing stopped, where a decode step waited, and which tokens came.

    little_memory: so little that one of two requests has to give way
    names: of mistakes; none: all that the scene can show
    """
    names = names or shown_by(scene)
    # A rank that fails ends its process, so that no other waits for it. All are in this one.
    Worker._leave_others = lambda self: None  # type: ignore[method-assign]
    return {name: asyncio.run(_try(scene, PLANTED[name], little_memory)) for name in names}


async def _try(scene: Scene, planted: Planted, little_memory: str) -> dict[str, Any]:
    scene = replace(scene.of_prompts(*range(planted.prompts)), tokens=planted.tokens)
    workers = PretendedWorkers(planted.ranks)
    settings = swapping(little_memory) if planted.swaps else {"block_size": planted.block_size}
    with planted.mistake():
        try:
            engine = await make_engine(scene.path, workers, max_num_seqs=2, max_num_batched_tokens=32, **settings)
            answer = await answers(engine, workers, scene)
            if planted.meets_anew:
                await workers.meet()
                answer = await answers(engine, workers, scene)
        except Exception as failure:  # noqa: BLE001  of any kind, wherever the engine was
            return {"said": _first_cause(failure)}
    waits = workers.costs["replayed"].places.get("sync", {})
    return {"said": workers.refusal, "waits": waits, "tokens": [each.token_ids for each in answer]}


def _first_cause(failure: BaseException) -> str:
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return f"{type(failure).__name__}: {failure}"
