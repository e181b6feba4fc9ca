"""Which way of multiplying weights in fewer bits is taken, and why another is refused."""

from pathlib import Path

import pytest
import torch

from intarsia.errors import InvalidSetting
from intarsia.kernels.products import Codes, IntegerCodesLinear, NativeCodesLinear, TritonCodesLinear
from intarsia.kernels.products.codes import CodeKind
from intarsia.kernels.toolchain import triton as gpu
from intarsia.proto.worker import ModelSettings
from intarsia.workers.models.kept import keeper_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")

needs_triton = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))


@pytest.mark.parametrize(
    ("device", "kind"),
    [pytest.param(CUDA, TritonCodesLinear, marks=needs_triton), pytest.param(CPU, NativeCodesLinear)],
)
def test_auto_takes_the_way_of_the_device(device: torch.device, kind: type, tmp_path: Path):
    if kind.lacks() is not None:
        pytest.skip(kind.lacks())
    keeper = keeper_of(ModelSettings(str(tmp_path)), torch.bfloat16, device)
    assert keeper is not None and keeper.kind is kind and keeper.device == device


@pytest.mark.parametrize(
    ("asked", "device", "why"),
    [
        ("triton", CPU, "the model runs on cpu"),
        ("cpu", CUDA, "the model runs on cuda:0"),
        ("cpu-int8", CUDA, "the model runs on cuda:0"),
    ],
)
def test_a_way_of_another_device_is_refused(asked: str, device: torch.device, why: str, tmp_path: Path):
    with pytest.raises(InvalidSetting, match=f"packed_products '{asked}' cannot be had: {why}"):
        keeper_of(ModelSettings(str(tmp_path), packed_products=asked), torch.bfloat16, device)


@needs_triton
def test_triton_is_refused_for_numbers_that_it_does_not_multiply(tmp_path: Path):
    with pytest.raises(InvalidSetting, match=r"not torch\.float64"):
        keeper_of(ModelSettings(str(tmp_path), packed_products="triton"), torch.float64, CUDA)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_nothing_is_kept_with_torch_compile(device: torch.device, tmp_path: Path):
    assert keeper_of(ModelSettings(str(tmp_path), torch_compile=True), torch.bfloat16, device) is None


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", [CodeKind.INT8, CodeKind.E4M3])
@pytest.mark.parametrize("asked", ["auto", "cpu", "cpu-int8"])
def test_inputs_are_rounded_where_it_is_asked_or_meant_and_can_be(
    asked: str, kind: CodeKind, rounds: bool, tmp_path: Path
):
    if reason := IntegerCodesLinear.lacks():
        pytest.skip(reason)
    keeper = keeper_of(ModelSettings(str(tmp_path), packed_products=asked), torch.bfloat16, CPU)
    codes = Codes(kind, torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 2), 32, rounds_inputs=rounds)
    is_rounded = kind is CodeKind.INT8 and (asked == "cpu-int8" or (asked == "auto" and rounds))
    assert keeper is not None
    assert keeper.kind_for(codes) is (IntegerCodesLinear if is_rounded else NativeCodesLinear)
