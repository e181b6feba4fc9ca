"""Products in whole numbers: the bits of exact sums, scaled in one order, on any processor and in any company."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from intarsia.kernels.products import Codes, IntegerCodes, IntegerCodesLinear, PackedCodes, side_by_side, stacked
from intarsia.kernels.products import integers as integers_module
from intarsia.kernels.products.codes import CodeKind
from intarsia.kernels.products.reference import NOTHING, integer_product, rounded_inputs
from intarsia.tests.kernels.products.test_codes import SCALES, codes_in_blocks, random_codes

pytestmark = pytest.mark.skipif(IntegerCodesLinear.lacks() is not None, reason="there is no C++ compiler")

KINDS = [kind for kind in CodeKind if kind is not CodeKind.E4M3]
DTYPES = torch.float32, torch.bfloat16
ROWS = 1, 2, 3, 6, 7, 16, 17, 40, 200

MOST_ERROR = 0.012
"""Of a product of random numbers, relative to what it would be without rounding: half a step of 1/127 of the largest of
32 inputs, whose mean square is 1/12 of a step's square; 0.0056 of a normal input's."""

NARROWER = {
    "AVX-512 VNNI": ("", ("-mno-amx-tile",)),
    "AVX-512": ("", ("-mno-avx512vnni",)),
    "AVX2 VNNI": ("avx2", ()),
    "AVX2": ("avx2", ("-mno-avxvnni",)),
    "plain": ("default", ()),
}
"""Processors by what they lack: ATEN_CPU_CAPABILITY, and what is left out beside it."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def fuses() -> bool:
    """Whether this processor rounds a product and its sum once."""
    return integers_module.instructions() != "plain"


def check(codes: Codes, dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = ROWS) -> None:
    """The bits of the reference, the weight's numbers as they were, and the codes."""
    assert IntegerCodes.takes(codes)
    outputs, inputs = codes.shape
    generator = torch.Generator().manual_seed(outputs + inputs)
    bias = torch.randn(1, outputs, generator=generator)
    packed, numbers = IntegerCodes(codes, dtype, bias), codes.numbers(dtype)
    for count in rows:
        x = torch.randn(count, inputs, generator=generator).to(dtype)
        wanted = integer_product(codes, x, fuses()) + bias.to(dtype).float()
        torch.testing.assert_close(packed.product(x), wanted.to(dtype), rtol=0, atol=0)
    some = torch.tensor([outputs - 1, 0, 0, outputs // 2])
    torch.testing.assert_close(packed.rows(some), numbers[some], rtol=0, atol=0)
    torch.testing.assert_close(packed.rows(torch.arange(outputs)), numbers, rtol=0, atol=0)
    torch.testing.assert_close(packed.codes().numbers(dtype), numbers, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 32, 96, 224])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_has_the_bits_of_exact_sums_scaled_in_order(kind: CodeKind, columns: int, dtype: torch.dtype):
    check(random_codes(kind, (150, 224), columns), dtype)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", [CodeKind.INT4, CodeKind.INT8])
def test_scales_of_all_kinds_of_numbers_keep_the_bits(kind: CodeKind, scale: str):
    check(random_codes(kind, (70, 160), 32, scale), rows=(1, 9))


@pytest.mark.parametrize("columns", [16, 32, 64])
@pytest.mark.parametrize("kind", [CodeKind.INT4, CodeKind.UINT8])
def test_zero_points_are_taken_off(kind: CodeKind, columns: int):
    print("seed 5")
    groups, generator = -(-224 // columns), torch.Generator().manual_seed(5)
    zero = torch.randint(0, 1 << kind.bits, (70, groups), dtype=torch.uint8, generator=generator)
    check(random_codes(kind, (70, 224), columns, zero=zero))
    check(random_codes(kind, (70, 224), columns, zero=zero, middle=1))


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("kind", [CodeKind.E2M1, CodeKind.INT8])
def test_a_factor_of_rows_is_applied_to_their_sums(kind: CodeKind, divides: bool):
    factor = torch.rand(70, generator=torch.Generator().manual_seed(2)) + 0.5
    check(random_codes(kind, (70, 96), 16, "e4m3", factor=factor, divides=divides))


@pytest.mark.parametrize("kind", [CodeKind.INT2, CodeKind.INT3, CodeKind.INT4, CodeKind.INT5, CodeKind.INT6])
def test_leasts_and_scales_of_two_levels_keep_the_bits_in_slices_too(kind: CodeKind):
    whole = codes_in_blocks(kind, 150, 608)  # the last block is a part of one
    check(whole)
    for dim, start, stop in ((1, 0, 256), (1, 64, 320), (1, 288, 608), (0, 30, 100)):
        cut = whole.cut(dim, start, stop)
        assert cut is not None
        check(cut, rows=(1, 7))


@pytest.mark.parametrize("inputs", [1, 31, 33, 65, 250])
def test_any_number_of_columns_of_a_byte_goes(inputs: int):
    check(random_codes(CodeKind.INT8, (65, inputs), inputs + inputs % 2))
    check(random_codes(CodeKind.INT8, (65, inputs), 32))


@pytest.mark.parametrize("outputs", [1, 63, 64, 65, 129])
def test_any_number_of_outputs_goes(outputs: int):
    check(random_codes(CodeKind.INT4, (outputs, 64), 32))


def test_slices_that_begin_within_a_group_keep_the_bits():
    whole = random_codes(CodeKind.INT4, (70, 256), 128)
    for start, stop in ((32, 224), (16, 144), (64, 256)):
        cut = whole.cut(1, start, stop)
        assert cut is not None and cut.offset == start
        check(cut)


def test_columns_in_another_order_are_put_in_order_as_they_are_rounded():
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    codes = random_codes(CodeKind.INT4, (64, 96), 32).sorted_columns(order)
    assert not IntegerCodes(codes, torch.float32).is_padded
    check(codes)


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize("kind", [CodeKind.INT8, CodeKind.UINT8])
def test_the_largest_codes_and_inputs_do_not_overflow(kind: CodeKind, value: int):
    codes = random_codes(kind, (64, 64), 64)
    codes = replace(codes, codes=torch.full_like(codes.codes, 128 if kind is CodeKind.INT8 and not value else value))
    packed = IntegerCodes(codes, torch.float32)
    for sign in (-1, 1):
        x = torch.full((3, 64), 1.0 * sign)
        torch.testing.assert_close(packed.product(x), integer_product(codes, x, fuses()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_that_of_inputs_of_eight_bits(kind: CodeKind):
    print("seed 7")
    middle = 0 if kind in (CodeKind.E2M1, CodeKind.INT8) else 1 << (kind.bits - 1)
    codes = random_codes(kind, (200, 2048), 32, seed=7, middle=middle)
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(7))
    truth = x.double() @ codes.numbers(torch.float32).double().T
    found = IntegerCodes(codes, torch.float32).product(x).double()
    assert (found - truth).norm() / truth.norm() < MOST_ERROR


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "columns"), [(CodeKind.INT4, 32), (CodeKind.INT6, 16), (CodeKind.INT8, 2080)])
def test_a_row_has_the_same_bits_among_any_others_and_with_any_threads(
    kind: CodeKind, columns: int, dtype: torch.dtype, threads: int
):
    seed = random.randrange(2**31)
    codes = random_codes(kind, (200, 2080), columns, seed=seed)
    packed = IntegerCodes(codes, dtype)
    x = torch.randn(200, 2080, generator=torch.Generator().manual_seed(seed)).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([packed.product(x[r : r + 1]) for r in range(len(x))])
    torch.set_num_threads(threads)
    for rows in (*range(2, 14), 16, 32, 100, 200):
        first = random.randrange(len(x) - rows + 1)
        assert torch.equal(packed.product(x[first : first + rows]), alone[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_meet_the_weights_of_their_experts(dtype: torch.dtype, threads: int):
    parts = [random_codes(CodeKind.E2M1, (96, 64), 32, "power", seed=seed) for seed in range(3)]
    codes = stacked(parts)
    assert codes is not None
    packed = IntegerCodes(codes, dtype)
    x, first = torch.randn(7, 64, generator=torch.Generator().manual_seed(3)).to(dtype), torch.tensor([0, 4, 4, 9])
    row_of = torch.tensor([3, 0, 6, 5, 4, 3, 2, 1, 1])
    found = packed.grouped_product(x, first, row_of)
    wanted = [integer_product(parts[0], x[row_of[:4]], fuses()), integer_product(parts[2], x[row_of[4:]], fuses())]
    torch.testing.assert_close(found, torch.cat(wanted).to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(packed.codes().numbers(dtype), codes.numbers(dtype), rtol=0, atol=0)


def test_what_is_not_finite_stays_in_its_row():
    packed = IntegerCodes(random_codes(CodeKind.INT4, (70, 96), 32), torch.float32)
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(4))
    wanted = packed.product(x)
    x[3, 5], x[6, 40] = torch.nan, torch.inf
    found = packed.product(x)
    assert found[3].isnan().all() and not found[6].isfinite().any()
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(found[others], wanted[others])


def test_inputs_of_zero_and_of_nearly_nothing_give_nothing():
    packed = IntegerCodes(random_codes(CodeKind.INT4, (70, 64), 32), torch.float32)
    for value in (0.0, NOTHING / 2):
        assert not packed.product(torch.full((2, 64), value)).any()


def test_inputs_are_rounded_to_the_nearest_of_their_block():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0] + [0.0] * 27 + [1.0] * 8])
    rounded = rounded_inputs(x)
    assert rounded.bytes_RK[0, :6].tolist() == [127, 0, 2, -2, -127, 0]
    assert rounded.bytes_RK[0, 32:].tolist() == [127] * 8 + [0] * 24
    torch.testing.assert_close(rounded.scale_RB, torch.tensor([[1.0, 1 / 127]]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "columns", "offset"), [(CodeKind.E4M3, 32, 0), (CodeKind.INT8, 24, 0), (CodeKind.INT4, 32, 8)]
)
def test_other_kinds_and_groups_are_left_to_products_in_floats(kind: CodeKind, columns: int, offset: int):
    codes = random_codes(kind, (64, 96), columns, offset=offset)
    assert not IntegerCodes.takes(codes) and PackedCodes.takes(codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_by_torch_are_those_of_the_numbers(dtype: torch.dtype, with_bias: bool):
    generator = torch.Generator().manual_seed(8)
    codes = random_codes(CodeKind.INT4, (200, 64), 32, seed=8)
    linear = nn.Linear(64, 200, bias=with_bias).to(dtype).requires_grad_(False)
    packed = IntegerCodesLinear.hold(linear, codes, dtype)
    packed.settle()
    packed.torch_from_rows = 4
    x = torch.randn(2, 3, 64, generator=generator).to(dtype)
    wanted = nn.functional.linear(x, codes.numbers(dtype), linear.bias)
    torch.testing.assert_close(packed(x), wanted)
    few: Tensor = packed(x[:1])
    assert few.shape == (1, 3, 200) and not torch.equal(few, wanted[:1])


def test_codes_that_were_packed_are_joined():
    parts = [IntegerCodes(codes_in_blocks(CodeKind.INT5, 70, 512, seed), torch.float32).codes() for seed in (1, 2)]
    joined = side_by_side(parts)
    assert joined is not None
    check(joined, rows=(1, 7))


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROWER)
def test_narrower_processors_have_the_same_bits(name: str):
    """In a process of its own, whose kernels are compiled for such a processor."""
    if os.environ.get("INTARSIA_NARROWER"):
        pytest.skip("this is such a process")
    capability, flags = NARROWER[name]
    script = (
        "import sys, pytest\n"
        "from intarsia.kernels.toolchain import cpp\n"
        f"cpp.NARROWER[{capability!r}] = (*cpp.NARROWER.get({capability!r}, ()), *{flags!r})\n"
        "from intarsia.kernels.products import integers\n"
        "print(integers.instructions())\n"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not slow', {__file__!r}]))\n"
    )
    environment = os.environ | {"INTARSIA_NARROWER": name}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    if capability:
        environment["ATEN_CPU_CAPABILITY"] = capability
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    assert name in ("AVX-512 VNNI", "AVX-512", "AVX2 VNNI") or done.stdout.startswith(f"{name}\n"), done.stdout[:100]
