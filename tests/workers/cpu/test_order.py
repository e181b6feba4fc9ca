"""Which order a CPU's sums have, what is told of it, and what is refused."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from intarsia.errors import InvalidSetting
from intarsia.kernels.paged_attention import FlashBackend, TritonBackend
from intarsia.kernels.products import NativeLinear
from intarsia.kernels.products.ways import Way
from intarsia.proto.worker import ModelSettings
from intarsia.tests.local import LocalWorkers, make_engine
from intarsia.workers.cpu import order
from intarsia.workers.cpu.order import SumOrder, check_sums, sum_order

CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(NativeLinear.lacks() is not None, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("same_bits", [False, True])
def test_a_machine_whose_own_products_are_as_fast_has_one_order_anyway(
    same_bits: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(order, "way_of", lambda dtype: Way(None, 0.9))
    assert sum_order(torch.bfloat16, CPU, same_bits) == SumOrder(True)


@needs_compiler
def test_a_machine_whose_torch_is_much_faster_goes_its_way_and_says_so_unless_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(order, "way_of", lambda dtype: Way(256, 3.1))
    found = sum_order(torch.bfloat16, CPU, same_bits=False)
    assert (found.is_one, found.torch_from_rows) == (False, 256)
    assert found.note is not None
    assert "256 rows" in found.note and "3.10 times" in found.note and "--same-bits" in found.note
    assert sum_order(torch.bfloat16, CPU, same_bits=True) == SumOrder(True)


def test_without_a_compiler_torch_computes_and_people_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(NativeLinear, "lacks", lambda: "could not be compiled: there is no C++ compiler (g++)")
    found = sum_order(torch.float32, CPU, same_bits=False)
    assert not found.is_one
    assert found.note is not None
    assert "no C++ compiler" in found.note
    with pytest.raises(InvalidSetting, match="no C\\+\\+ compiler") as refusal:
        sum_order(torch.float32, CPU, same_bits=True)
    assert refusal.value.field == "same_bits"


@pytest.mark.parametrize(("dtype", "device"), [(torch.float16, "cpu"), (torch.bfloat16, "mps")])
def test_the_same_bits_are_refused_where_there_is_no_such_order(dtype: torch.dtype, device: str):
    with pytest.raises(InvalidSetting, match="same_bits"):
        sum_order(dtype, torch.device(device), same_bits=True)
    assert not sum_order(dtype, torch.device(device), same_bits=False).is_one


@pytest.mark.parametrize("other", ["enforce_eager", "torch_compile"])
def test_the_same_bits_need_our_kernels(other: str):
    settings: dict[str, Any] = {other: True}
    with pytest.raises(InvalidSetting, match=other):
        ModelSettings("model", same_bits=True, **settings)


@needs_compiler
@pytest.mark.parametrize(("same_bits", "first"), [(False, 64), (True, float("inf"))])
def test_products_of_many_rows_go_torchs_way_where_that_is_faster(
    same_bits: bool, first: float, tiny: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(order, "way_of", lambda dtype: Way(64, 2.0))
    workers = LocalWorkers()
    engine = asyncio.run(make_engine(tiny("gemma3").path, workers, same_bits=same_bits))
    assert workers.worker._model is not None
    linears = [each for each in workers.worker._model.module.modules() if isinstance(each, NativeLinear)]
    assert linears
    assert {each.torch_from_rows for each in linears} == {first}
    assert any("2.00 times" in note for note in engine.info.notes) is not same_bits


def test_sums_of_torch_refuse_the_same_bits_on_a_gpu():
    attention: Any = SimpleNamespace(name="triton", capabilities=TritonBackend.capabilities)

    def forward() -> None:
        x = torch.randn(3, 8)
        torch.softmax(x * 2, -1)  # of short rows, each by a warp of its own
        torch.arange(4).sum()  # whole numbers
        torch.dot(x.mean(-1), torch.randn(3))

    with pytest.raises(InvalidSetting, match=r"are computed by torch's dot, mean, whose sums") as refusal:
        check_sums(attention, forward)
    assert refusal.value.field == "same_bits"
    check_sums(attention, lambda: torch.randn(3, 8).relu())


def test_attention_that_cuts_its_sums_by_the_step_refuses_the_same_bits_on_a_gpu():
    backend: Any = SimpleNamespace(name="flash", capabilities=FlashBackend.capabilities)
    with pytest.raises(InvalidSetting, match="attention backend 'flash' cuts its sums"):
        check_sums(backend, lambda: None)


def test_layers_that_choose_tokens_refuse_the_same_bits_on_a_gpu():
    able: Any = SimpleNamespace(name="triton", capabilities=TritonBackend.capabilities)
    with pytest.raises(InvalidSetting, match="choose tokens by torch's products"):
        check_sums(able, lambda: None, chooses=True)


def test_several_ranks_on_gpus_are_refused_the_same_bits():
    with pytest.raises(InvalidSetting, match="2 ranks add up what each has"):
        sum_order(torch.bfloat16, torch.device("cuda"), same_bits=True, ranks=2)
