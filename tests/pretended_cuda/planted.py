"""Mistakes that a pretended device must find. Each is put into the product for one run of an engine.

What is to be named is the place of the mistake: here, or where the product falls over it.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import TritonBackend
from intarsia.kernels.paged_attention import triton as attention
from intarsia.kernels.sampling import TritonSampling
from intarsia.tests.local import make_engine

from .engines import PretendedWorkers, answers
from .scenes import Scene
from .tensors import DeviceTensor

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


@contextmanager
def tokens_are_read_before_they_arrive() -> Iterator[None]:
    with patch.object(DeviceTensor, "cpu", lambda tensor: tensor.to("cpu", non_blocking=True)):
        yield


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
        lengths = kept.setdefault(id(frame), batch.kv_lens)
        return refill(self, frame, replace(batch, kv_lens=lengths), transfer)

    with patch.object(TritonBackend, "refill", with_mistake):
        yield


PLANTED: dict[str, Callable[[], Any]] = {
    mistake.__name__: mistake
    for mistake in (
        lengths_stay_on_the_host,
        attention_reads_a_number,
        attention_makes_a_tensor_of_a_number,
        attention_has_a_shape_of_its_numbers,
        attention_allocates_by_a_length,
        queries_are_of_another_kind,
        one_pinned_buffer_for_all_uploads,
        tokens_are_read_before_they_arrive,
        sampler_adds_a_host_tensor,
        sampler_waits_once_more,
        recorded_steps_keep_their_lengths,
    )
}


def try_all(scene: Scene) -> dict[str, Any]:
    """Of each mistake: what is said of it; if nothing stopped, where a decode step waited, and which tokens came."""
    return {name: asyncio.run(_try(scene, mistake())) for name, mistake in PLANTED.items()}


async def _try(scene: Scene, mistake: Any) -> dict[str, Any]:
    scene = replace(scene.of_prompts(0), tokens=4)
    workers = PretendedWorkers()
    with mistake:
        try:
            engine = await make_engine(scene.path, workers)
            answer = await answers(engine, workers, scene)
        except Exception as failure:  # noqa: BLE001  of any kind, wherever the engine was
            return {"said": _first_cause(failure)}
    waits = workers.costs["replayed"].places.get("sync", {})
    return {"said": workers.refusal, "waits": waits, "tokens": [each.token_ids for each in answer]}


def _first_cause(failure: BaseException) -> str:
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return f"{type(failure).__name__}: {failure}"
