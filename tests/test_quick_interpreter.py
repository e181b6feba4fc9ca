"""Triton's interpreter, made quick: it computes and refuses what it did before, and rounds as a GPU does."""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

from dataclasses import replace

import pytest
import torch

from intarsia.kernels.toolchain import triton as gpu

pytestmark = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))

if gpu.missing() is None:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    from intarsia.tests import quick_interpreter

    @triton.jit
    def _add(x, y):
        return x + y

    @triton.jit
    def _sums(x_ptr, out_ptr, step, SIZE: tl.constexpr):
        places = tl.arange(0, SIZE)
        numbers = tl.load(x_ptr + places)
        tl.store(out_ptr + places, _add(numbers, step))

    @triton.jit
    def _narrow(x_ptr, out_ptr, SIZE: tl.constexpr):
        places = tl.arange(0, SIZE)
        tl.store(out_ptr + places, tl.load(x_ptr + places).to(tl.bfloat16))

    @triton.jit
    def _multiply(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
        places = SIZE * tl.arange(0, SIZE)[:, None] + tl.arange(0, SIZE)
        tl.store(out_ptr + places, tl.dot(tl.load(x_ptr + places), tl.load(y_ptr + places)))


@pytest.fixture(autouse=True)
def quick() -> None:
    quick_interpreter.install()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_sums_are_those_of_torch(dtype: torch.dtype):
    x = torch.arange(8, dtype=dtype)
    out = torch.empty_like(x)
    _sums[(1,)](x, out, 3, SIZE=8)
    assert torch.equal(out, x + 3)


def test_numbers_become_those_of_bfloat16_that_torch_makes_of_them():
    torch.manual_seed(seed := torch.seed() % 2**32)
    print("seed:", seed)
    x = torch.randint(-(2**31), 2**31, (4096,)).int().view(torch.float32)
    x[:8] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, 1 + 2**-8])
    out = torch.empty(4096, dtype=torch.bfloat16)
    _narrow[(1,)](x, out, SIZE=4096)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out[~x.isnan()], x[~x.isnan()].bfloat16())


def test_tiles_of_bfloat16_are_multiplied_as_numbers():
    x, y = (torch.randn(16, 16).bfloat16() for _ in range(2))
    out = torch.empty(16, 16)
    _multiply[(1,)](x, y, out, SIZE=16)
    torch.testing.assert_close(out, x.float() @ y.float())


def test_a_sum_that_leaves_its_32_bits_is_refused_where_mistakes_are_looked_for(monkeypatch: pytest.MonkeyPatch):
    x = torch.full((8,), 2**31 - 2, dtype=torch.int32)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):
        _sums[(1,)](x, torch.empty_like(x), 3, SIZE=8)


def test_after_a_launch_the_language_has_no_meaning_outside_of_programs_again():
    before = tl.load
    x = torch.zeros(8)
    _sums[(1,)](x, torch.empty_like(x), 1, SIZE=8)
    assert tl.load is before
    with pytest.raises(ValueError, match=r"Did you forget to add @triton\.jit"):
        tl.load(x)
