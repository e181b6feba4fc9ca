"""Weights in fewer bits: products in C++ have the bits of products with the same numbers in full."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from intarsia.kernels.products import Codes, NativeLinear, PackedCodes, PackedWeights, side_by_side, stacked
from intarsia.kernels.products.codes import CodeKind, in_fewer_bits

pytestmark = pytest.mark.skipif(NativeLinear.lacks() is not None, reason="there is no C++ compiler")

SCALES = {
    "float32": lambda t: t,
    "bfloat16": lambda t: t.bfloat16(),
    "float16": lambda t: t.half(),
    "e4m3": lambda t: t.to(torch.float8_e4m3fn),
    "power": lambda t: (t * 1000).to(torch.uint8),
    "whole": lambda t: (t * 1000 - 60).to(torch.int8),
}
SMALL_KINDS = CodeKind.INT2, CodeKind.INT3, CodeKind.INT4, CodeKind.INT5, CodeKind.INT6
DTYPES = torch.float32, torch.bfloat16
ROWS = 1, 3, 6, 7, 40, 200


def random_codes(
    kind: CodeKind, shape: tuple[int, ...], columns: int, scale: str = "float32", seed: int = 0, **more: Any
) -> Codes:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    *outer, inputs = shape
    groups = -(-inputs // columns)
    codes = torch.randint(0, 256, (*outer, inputs * kind.low_bits // 8), dtype=torch.uint8, generator=generator)
    if kind is CodeKind.E4M3:
        codes = torch.where(codes & 127 == 127, torch.zeros_like(codes), codes)  # is no number
    scales = SCALES[scale](torch.rand(*outer, groups, generator=generator) * 0.1 + 0.02)
    if kind.high_bits:
        plane = (*outer, -(-inputs * kind.high_bits // 8))
        more["high"] = torch.randint(0, 256, plane, dtype=torch.uint8, generator=generator)
    return Codes(kind, codes, scales, columns, **more)


def codes_in_blocks(kind: CodeKind, rows: int, inputs: int, seed: int = 0) -> Codes:
    """With whole scales and leasts of 32 columns, and a factor of both for each 256."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 64, (rows, -(-inputs // 32)), dtype=torch.int8, generator=generator)
    blocks = [torch.rand(rows, -(-inputs // 256), generator=generator).half() for _ in range(2)]
    two_levels = {"block_scale": blocks[0], "block_least": blocks[1], "block_groups": 8}
    return random_codes(kind, (rows, inputs), 32, "whole", seed, least=whole, **two_levels)


def check_products(codes: Codes, dtype: torch.dtype) -> None:
    numbers = codes.numbers(dtype)
    outputs, inputs = numbers.shape
    bias = torch.randn(1, outputs)
    packed, plain = PackedCodes(codes, dtype, bias), PackedWeights(numbers.unsqueeze(0), bias)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        torch.testing.assert_close(packed.product(x), plain.product(x), rtol=0, atol=0)
    some = torch.tensor([outputs - 1, 0, outputs // 2])
    torch.testing.assert_close(packed.rows(some), numbers[some], rtol=0, atol=0)
    torch.testing.assert_close(packed.codes().numbers(dtype), numbers, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", CodeKind)
def test_products_with_codes_have_the_bits_of_products_with_their_numbers(
    kind: CodeKind, scale: str, dtype: torch.dtype
):
    check_products(random_codes(kind, (150, 224), 32, scale), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_points_factors_and_groups_that_begin_before_the_first_column_keep_the_bits(dtype: torch.dtype):
    zero = torch.randint(0, 16, (70, 3), dtype=torch.uint8)
    plain = random_codes(CodeKind.INT4, (70, 96), 32, zero=zero)
    check_products(plain, dtype)
    cut = plain.cut(1, 16, 80)
    assert cut is not None and cut.offset == 16
    check_products(cut, dtype)
    for divides in (False, True):
        factor = torch.rand(70) + 0.5
        more = {"factor": factor, "divides": divides}
        codes = random_codes(CodeKind.E2M1, (70, 96), 16, "e4m3", **more)
        check_products(codes, dtype)
        some = codes.some_rows(5, 50).numbers(dtype)
        torch.testing.assert_close(some, codes.numbers(dtype)[5:50], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_leasts_and_scales_of_two_levels_keep_the_bits(kind: CodeKind, dtype: torch.dtype):
    plain = codes_in_blocks(kind, 150, 608)  # the last block is a part of one
    check_products(plain, dtype)
    for start, stop in ((0, 256), (48, 320), (296, 608)):
        cut = plain.cut(1, start, stop)
        assert cut is not None
        check_products(cut, dtype)
        torch.testing.assert_close(cut.numbers(dtype), plain.numbers(dtype)[:, start:stop], rtol=0, atol=0)
    some = plain.cut(0, 30, 100)
    assert some is not None
    torch.testing.assert_close(some.numbers(dtype), plain.numbers(dtype)[30:100], rtol=0, atol=0)


def test_a_product_is_rounded_before_the_least_is_subtracted():
    codes = codes_in_blocks(CodeKind.INT5, 64, 256)
    assert codes.least is not None
    scale, least = codes.whole_scale().double(), codes.whole_least().double()
    meant = (codes.centred() * scale.repeat_interleave(32, 1)).float() - least.repeat_interleave(32, 1).float()
    torch.testing.assert_close(codes.numbers(torch.float32), meant, rtol=0, atol=0)
    found = PackedCodes(codes, torch.float32).rows(torch.arange(64))
    torch.testing.assert_close(found, meant, rtol=0, atol=0)


@pytest.mark.parametrize("kind", (CodeKind.INT2, CodeKind.INT3, CodeKind.INT5, CodeKind.INT6))
def test_columns_whose_high_bits_lie_in_one_byte_are_not_parted(kind: CodeKind):
    codes = random_codes(kind, (64, 64), 32)
    assert codes.cut(1, 2, 64) is None and codes.cut(1, 0, 62) is None


@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_codes_in_fewer_bits_are_opened_as_they_were(kind: CodeKind):
    whole = torch.randint(0, 1 << kind.bits, (9, 44), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    codes, high = in_fewer_bits(kind, whole)
    opened = Codes(kind, codes, torch.ones(9, 1), 44, high=high).numbers(torch.float32)
    torch.testing.assert_close(opened, whole.float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_with_leasts_and_blocks_are_joined_and_stacked(dtype: torch.dtype):
    parts = [codes_in_blocks(CodeKind.INT5, 70, 512, seed) for seed in (1, 2)]
    numbers = [part.numbers(dtype) for part in parts]
    joined, experts = side_by_side(parts), stacked(parts)
    assert joined is not None and experts is not None
    check_products(joined, dtype)
    torch.testing.assert_close(joined.numbers(dtype), torch.cat(numbers), rtol=0, atol=0)
    torch.testing.assert_close(experts.numbers(dtype), torch.stack(numbers), rtol=0, atol=0)
    torch.testing.assert_close(PackedCodes(experts, dtype).codes().numbers(dtype), torch.stack(numbers), rtol=0, atol=0)
    assert side_by_side([parts[0], random_codes(CodeKind.INT5, (70, 512), 32)]) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_odd_number_of_columns_in_bytes_keeps_the_bits(dtype: torch.dtype):
    check_products(random_codes(CodeKind.INT8, (65, 33), 34), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_in_another_order_give_the_same_products(dtype: torch.dtype):
    codes = random_codes(CodeKind.INT4, (64, 64), 32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    turned = codes.sorted_columns(order)
    packed, numbers = PackedCodes(turned, dtype), turned.numbers(dtype)
    x = torch.randn(5, 64).to(dtype)
    torch.testing.assert_close(packed.product(x), PackedWeights(numbers.unsqueeze(0)).product(x), rtol=1e-2, atol=1e-2)


def test_two_columns_of_one_byte_are_not_parted():
    assert random_codes(CodeKind.INT4, (64, 64), 32).cut(1, 3, 40) is None


def test_weights_that_are_packed_alike_are_joined_and_others_are_not():
    one, two = (random_codes(CodeKind.INT4, (64, 64), 32, seed=seed) for seed in (1, 2))
    joined = side_by_side([one, two])
    assert joined is not None
    both = torch.cat([one.numbers(torch.float32), two.numbers(torch.float32)])
    torch.testing.assert_close(joined.numbers(torch.float32), both, rtol=0, atol=0)
    assert side_by_side([one, random_codes(CodeKind.INT4, (64, 64), 16)]) is None
    assert side_by_side([one, random_codes(CodeKind.INT8, (64, 64), 32)]) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_meet_the_weights_of_their_experts(dtype: torch.dtype):
    codes = stacked([random_codes(CodeKind.E2M1, (96, 64), 32, "power", seed=seed) for seed in range(3)])
    assert codes is not None
    packed, plain = PackedCodes(codes, dtype), PackedWeights(codes.numbers(dtype))
    x, first = torch.randn(9, 64).to(dtype), torch.tensor([0, 4, 4, 9])
    torch.testing.assert_close(packed.grouped_product(x, first), plain.grouped_product(x, first), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_narrower_processors_have_the_bits_of_products_with_the_numbers(capability: str):
    """In a process of its own, whose kernels are compiled for such a processor."""
    if os.environ.get("ATEN_CPU_CAPABILITY"):
        pytest.skip("this is such a process")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env=os.environ | {"ATEN_CPU_CAPABILITY": capability}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:]
