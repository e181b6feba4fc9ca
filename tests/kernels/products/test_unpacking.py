"""Weights in fewer bits on a GPU, in Triton's interpreter: products have the bits of those with the numbers in full."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from intarsia.kernels.products import Codes, OrderedTritonCodes, TritonCodes, TritonWeights, stacked, unpacking
from intarsia.kernels.products import triton as products
from intarsia.kernels.products.codes import CodeKind
from intarsia.kernels.products.unpacking import KINDS, SCALE_KINDS, run_of
from intarsia.kernels.toolchain import triton as gpu
from intarsia.tests.kernels.products.test_codes import SCALES, codes_in_blocks, random_codes

pytestmark = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))

DTYPES = torch.float32, torch.bfloat16, torch.float16
ROWS = 1, 3, 17, 100
TAKEN_KINDS = sorted(KINDS)
TAKEN_SCALES = [name for name, of in SCALES.items() if of(torch.ones(1)).dtype in SCALE_KINDS]


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts every few inputs, in products of a few tiles."""
    monkeypatch.setattr(products, "LEAST_CUT", 64)
    monkeypatch.setattr(products, "PROGRAMS", 4)


def check_products(codes: Codes, dtype: torch.dtype, rows: tuple[int, ...] = ROWS) -> None:
    numbers = codes.numbers(dtype)
    outputs, inputs = numbers.shape
    bias = torch.randn(1, outputs).to(dtype)
    packed, plain = OrderedTritonCodes(codes, dtype, bias), TritonWeights(numbers.unsqueeze(0), bias)
    for count in rows:
        x = torch.randn(count, inputs).to(dtype)
        torch.testing.assert_close(packed.product(x), plain.product(x), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(packed.codes().numbers(dtype), numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", TAKEN_SCALES)
@pytest.mark.parametrize("kind", TAKEN_KINDS)
def test_products_with_codes_have_the_bits_of_products_with_their_numbers(
    kind: CodeKind, scale: str, dtype: torch.dtype
):
    check_products(random_codes(kind, (150, 224), 32, scale), dtype, (1, 70))


@pytest.mark.parametrize("columns", [2, 16, 40, 64, 128, 1000])
@pytest.mark.parametrize("shape", [(1, 64), (130, 96), (257, 322)])
def test_groups_of_any_size_in_weights_of_any_shape_keep_the_bits(columns: int, shape: tuple[int, int]):
    for kind in (CodeKind.INT4, CodeKind.E4M3):
        check_products(random_codes(kind, shape, columns), torch.float16)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kind", TAKEN_KINDS)
def test_every_code_is_opened_exactly_and_rounded_once(kind: CodeKind):
    """A row of x that has a one shows a column's numbers. Codes that are no number are seen, too."""
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scale = torch.tensor([1.0, 1 / 3, 1e-6, 1.1e4]).view(4, 1)
    codes = Codes(kind, every, scale, 1024)
    columns = codes.shape[1]
    for dtype in DTYPES:
        numbers = codes.numbers(dtype)
        for column in range(0, columns, 16):
            picked = replace(codes, codes=every[:, column * kind.bits // 8 : (column + 16) * kind.bits // 8])
            found = OrderedTritonCodes(picked, dtype).product(torch.eye(16, dtype=dtype))
            wanted = numbers[:, column : column + 16].T
            is_number = wanted.isfinite().all(0)
            assert torch.equal(found[:, is_number], wanted[:, is_number])
            assert found[:, ~is_number].isnan().any(0).all()


def test_every_power_of_two_is_the_scale_that_it_stands_for():
    powers = torch.arange(256, dtype=torch.uint8).view(256, 1)
    codes = Codes(CodeKind.E2M1, torch.full((256, 32), 0x22, dtype=torch.uint8), powers, 64)
    found = TritonCodes(codes, torch.float32).product(torch.eye(64)[:1])[0]
    torch.testing.assert_close(found, codes.numbers(torch.float32)[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_points_factors_and_groups_that_begin_before_the_first_column_keep_the_bits(dtype: torch.dtype):
    zero = torch.randint(0, 16, (70, 3), dtype=torch.uint8)
    plain = random_codes(CodeKind.INT4, (70, 96), 32, zero=zero, middle=1)
    check_products(plain, dtype)
    for start, stop in ((16, 80), (2, 96), (32, 64)):
        cut = plain.cut(1, start, stop)
        assert cut is not None and cut.offset == start % 32
        check_products(cut, dtype)
    for divides in (False, True):
        more: dict[str, Any] = {"factor": torch.rand(70) + 0.5, "divides": divides}
        check_products(random_codes(CodeKind.E2M1, (70, 96), 16, "e4m3", **more), dtype)


def test_inputs_that_are_cut_keep_the_bits_of_a_row_in_any_company(few_programs: None, rows_alone: None):
    codes = random_codes(CodeKind.INT4, (100, 200), 40, middle=8)
    check_products(codes, torch.float16, (1, 64, 65, 600))
    packed, x = OrderedTritonCodes(codes, torch.float32), torch.randn(400, 200)
    alone = packed.product(x[299:300])
    assert torch.equal(packed.product(x)[299:300], alone)
    assert torch.equal(packed.product(x[290:310])[9:10], alone)


@pytest.mark.parametrize("kind", [CodeKind.INT4, CodeKind.UINT8])
def test_columns_in_another_order_meet_the_columns_of_x_that_are_theirs(kind: CodeKind):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    turned = random_codes(kind, (64, 96), 32, middle=7).sorted_columns(order)
    packed, x = TritonCodes(turned, torch.float32), torch.randn(5, 96)
    torch.testing.assert_close(packed.product(x), x @ turned.numbers(torch.float32).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("picks", [False, True])
@pytest.mark.parametrize(
    ("kind", "columns", "scale"),
    [(CodeKind.E2M1, 32, "power"), (CodeKind.INT4, 40, "float16"), (CodeKind.E4M3, 400, "float32")],
)
def test_rows_meet_the_weights_of_their_experts(
    kind: CodeKind, columns: int, scale: str, picks: bool, dtype: torch.dtype, few_programs: None
):
    """The second expert, and the last, have no rows."""
    each = [random_codes(kind, (70, 200), columns, scale, seed, factor=torch.rand(70)) for seed in range(4)]
    codes = stacked(each)
    assert codes is not None
    biases = torch.randn(4, 70).to(dtype)
    packed, plain = OrderedTritonCodes(codes, dtype, biases), TritonWeights(codes.numbers(dtype), biases)
    first, x = torch.tensor([0, 4, 4, 90, 90]), torch.randn(40 if picks else 90, 200).to(dtype)
    token = torch.randint(0, 40, (90,)) if picks else None
    found, wanted = (weights.grouped_product(x, first, token) for weights in (packed, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(packed.codes().numbers(dtype), codes.numbers(dtype), rtol=0, atol=0)


def check_few(codes: Codes, dtype: torch.dtype) -> None:
    """One row and two, whose sums are exact but for float32's: their numbers are not rounded to the dtype."""
    numbers = codes.numbers(torch.float32).double()
    *_, outputs, inputs = numbers.shape
    biases = torch.randn(1, outputs).to(dtype)
    packed = TritonCodes(codes, dtype, biases)
    for count in (1, 2):
        x = torch.randn(count, inputs).to(dtype)
        found, wanted = packed.product(x).double(), x.double() @ numbers.T + biases.double()
        allowed = 2e-6 if dtype is torch.float32 else 1e-3
        torch.testing.assert_close(found, wanted, rtol=0, atol=allowed * float(wanted.abs().max()))
        assert torch.equal(packed.product(x[-1:]), packed.product(x)[-1:])


@pytest.mark.parametrize("scale", TAKEN_SCALES)
@pytest.mark.parametrize("kind", TAKEN_KINDS)
def test_one_row_and_two_have_the_sums_of_the_numbers(kind: CodeKind, scale: str):
    check_few(random_codes(kind, (20, 96), 32, scale), torch.float16 if scale == "power" else torch.float32)


@pytest.mark.parametrize("columns", [2, 8, 16, 40, 128, 1000])
@pytest.mark.parametrize("kind", [CodeKind.INT4, CodeKind.E4M3])
def test_one_row_and_two_know_groups_of_any_size_and_cuts(
    kind: CodeKind, columns: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unpacking, "LEAST_FEW_CUT", 64)
    check_few(random_codes(kind, (70, 130), columns), torch.float32)


def test_one_row_and_two_know_zero_points_factors_orders_and_groups_that_begin_before_the_first_column():
    zero = torch.randint(0, 16, (20, 3), dtype=torch.uint8)
    plain = random_codes(CodeKind.INT4, (20, 96), 32, zero=zero, middle=1)
    cut = plain.cut(1, 2, 96)
    assert cut is not None
    for codes in (plain, cut, random_codes(CodeKind.INT8, (20, 96), 32, zero=zero)):
        check_few(codes, torch.float32)
    for divides in (False, True):
        more: dict[str, Any] = {"factor": torch.rand(20) + 0.5, "divides": divides, "middle": 1}
        check_few(random_codes(CodeKind.E2M1, (20, 96), 16, "e4m3", **more), torch.float32)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    check_few(plain.sorted_columns(order), torch.float32)


@pytest.mark.parametrize("kind", TAKEN_KINDS)
def test_experts_of_one_row_or_two_each_have_the_sums_of_their_numbers(kind: CodeKind):
    dtype = torch.float32
    codes = stacked([random_codes(kind, (20, 130), 40, "float32", seed) for seed in range(4)])
    assert codes is not None
    biases = torch.randn(4, 20).to(dtype)
    packed, numbers = TritonCodes(codes, dtype, biases), codes.numbers(torch.float32).double()
    groups = torch.tensor([0, 0, 1, 3, 3])
    first, x, token = torch.tensor([0, 2, 3, 3, 5]), torch.randn(3, 130).to(dtype), torch.tensor([2, 0, 1, 0, 2])
    found = packed.grouped_product(x, first, token).double()
    wanted = torch.einsum("ni,noi->no", x[token].double(), numbers[groups]) + biases[groups].double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TAKEN_KINDS)
def test_many_rows_meet_the_expanded_weight_as_a_whole_and_in_parts(
    kind: CodeKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(TritonCodes, "expanded_from_rows", 5)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    for codes in (random_codes(kind, (300, 200), 40), random_codes(kind, (300, 200), 40).sorted_columns(order)):
        bias, x = torch.randn(1, 300).to(dtype), torch.randn(9, 200).to(dtype)
        packed, numbers = TritonCodes(codes, dtype, bias), codes.numbers(dtype)
        assert torch.equal(packed.expanded(dtype, 0, 300), numbers)
        assert torch.equal(packed.expanded(dtype, 128, 300), numbers[128:])
        wanted = F.linear(x, numbers, bias[0])
        assert torch.equal(packed.product(x), wanted)
        monkeypatch.setattr(unpacking, "EXPANDED_BYTES", 1)
        torch.testing.assert_close(packed.product(x), wanted, rtol=1e-5, atol=1e-3)
        monkeypatch.undo()
        monkeypatch.setattr(TritonCodes, "expanded_from_rows", 5)


def test_what_is_held_is_what_was_packed_but_for_the_last_block():
    codes = random_codes(CodeKind.INT4, (100, 1000), 40, zero=torch.zeros(100, 25, dtype=torch.uint8))
    assert codes.nbytes <= TritonCodes(codes, torch.float16).nbytes <= 1.05 * codes.nbytes


def test_a_run_shares_a_scale_wherever_it_begins():
    asked = {(32, 0, 96): 32, (32, 16, 96): 16, (40, 0, 96): 8, (128, 0, 4096): 64, (4096, 0, 4096): 64, (34, 2, 96): 2}
    assert {each: run_of(*each, 64) for each in asked} == asked


def test_what_the_kernel_does_not_read_is_not_taken():
    codes = random_codes(CodeKind.INT4, (8, 64), 32)
    assert TritonCodes.takes(codes)
    assert not TritonCodes.takes(replace(codes, columns=33))
    assert not TritonCodes.takes(replace(codes, scale=codes.scale.double()))


def test_codes_that_the_kernel_does_not_know_are_refused():
    usual = random_codes(CodeKind.INT4, (64, 256), 32)
    assert TritonCodes.takes(usual)
    assert not TritonCodes.takes(replace(usual, least=usual.scale))
    assert not TritonCodes.takes(replace(usual, block_scale=torch.ones(64, 1).half(), block_groups=8))
    assert not TritonCodes.takes(codes_in_blocks(CodeKind.INT4, 64, 256))
    assert not any(TritonCodes.takes(random_codes(kind, (64, 256), 32)) for kind in CodeKind if kind not in KINDS)
    assert not TritonCodes.takes(random_codes(CodeKind.INT4, (64, 256), 32, "whole"))
