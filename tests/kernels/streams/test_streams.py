"""The C++ and the Triton kernels of residual streams compute what a few lines of torch compute."""

from types import ModuleType

import pytest
import torch

from intarsia.kernels.streams import Mixing, cpu, operations_of, reference, triton
from intarsia.tests.kernels.natives import natives

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


native = natives(cpu, triton)


def mixing(streams: int, channels: int, rounds: int = 20, *, is_last: bool = False) -> Mixing:
    weights = streams if is_last else (2 + streams) * streams
    product = torch.randn(weights, streams * channels) * (streams * channels) ** -0.5
    return Mixing(product, torch.randn(weights), torch.rand(1 if is_last else 3) + 0.5, 1e-6, 1e-6, rounds)


@pytest.mark.parametrize("is_last", [False, True], ids=["before a block", "after the last"])
@pytest.mark.parametrize("shape", [(1, 4, 64), (5, 2, 40), (19, 4, 72), (0, 4, 16), (3, 8, 33), (2, 1, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_streams_become_one_as_in_the_reference(
    native: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], is_last: bool
):
    torch.manual_seed(0)
    streams, mixed = (torch.randn(shape) * 3).to(dtype), mixing(*shape[1:], is_last=is_last)
    ours, theirs = native.collapse(streams, mixed), reference.collapse(streams, mixed)
    torch.testing.assert_close(ours[0], theirs[0], rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    for our, their in zip(ours[1:], theirs[1:], strict=True):
        if their is None:
            assert our is None
        else:
            torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


def test_a_mixture_has_rows_and_columns_that_sum_up_to_one(native: ModuleType):
    torch.manual_seed(1)
    _, _, mixed = native.collapse(torch.randn(4, 4, 32), mixing(4, 32))
    assert mixed is not None
    torch.testing.assert_close(mixed.sum(1), torch.ones(4, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(mixed.sum(2), torch.ones(4, 4), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_any_company(native: ModuleType, dtype: torch.dtype, rows_alone: None):
    torch.manual_seed(2)
    streams, mixed = torch.randn(40, 4, 56).to(dtype), mixing(4, 56)
    together = native.collapse(streams, mixed)
    for few in (slice(0, 1), slice(3, 20), slice(39, 40)):
        for ours, all_of_them in zip(native.collapse(streams[few], mixed), together, strict=True):
            assert torch.equal(ours, all_of_them[few])


def test_there_is_one_for_each_kind_of_device():
    assert operations_of("cpu") is (cpu if cpu.is_available() else None)
    assert operations_of("meta") is None
