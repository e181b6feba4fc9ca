"""Products of our own on a GPU, in Triton's interpreter."""

import pytest
import torch
from torch import Tensor, nn

from intarsia.kernels.products import TritonLinear, TritonWeights, reference
from intarsia.kernels.products import triton as products
from intarsia.kernels.products.triton import combine, cut_inputs, sort_rows
from intarsia.kernels.toolchain import triton as gpu

pytestmark = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts every few inputs, in products of a few tiles."""
    monkeypatch.setattr(products, "LEAST_CUT", 64)
    monkeypatch.setattr(products, "PROGRAMS", 4)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 64), (65, 130), (600, 100)])
@pytest.mark.parametrize("rows", [0, 1, 5, 70, 200])
def test_a_product_of_any_shape_is_the_reference(inputs: int, outputs: int, rows: int, few_programs: None):
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=outputs % 2 == 0).requires_grad_(False)
    weight, bias, x = linear.weight, linear.bias, torch.randn(rows, inputs)
    packed = TritonLinear.take_over(linear)
    assert packed.weight is weight, "others may share it"
    close(packed(x), reference.product(x, weight, bias))
    close(packed(x.view(1, rows, inputs))[0], reference.product(x, weight, bias))


def test_inputs_are_cut_by_the_weight_alone():
    weights = {(5376, 262_208): 5376, (5376, 5376): 896, (21_504, 5376): 3584, (2880, 512): 576, (640, 640): 640}
    assert {weight: cut_inputs(*weight) for weight in weights} == weights


@pytest.mark.parametrize("inputs", [600, 2048])
def test_bits_of_a_row_do_not_depend_on_its_company(inputs: int, few_programs: None, rows_alone: None):
    """A cut each for a program where rows are few, all cuts for one where there are many, tiles of two heights."""
    torch.manual_seed(0)
    weights = TritonWeights(torch.randn(1, 100, inputs), torch.randn(1, 100))
    x = torch.randn(600, inputs)
    alone = [weights.product(x[row : row + 1]) for row in (0, 299)]
    for rows in (2, 64, 65, 600):
        together = weights.product(x[:rows])
        assert torch.equal(together[:1], alone[0])
        assert rows < 300 or torch.equal(together[299:300], alone[1])


@pytest.mark.parametrize("rows", [1, 9, 150])
@pytest.mark.parametrize("picks", [False, True])
def test_rows_of_groups_meet_the_weights_of_their_group(rows: int, picks: bool, few_programs: None):
    torch.manual_seed(rows)
    groups = 5
    weights, biases = torch.randn(groups, 70, 200), torch.randn(groups, 70)
    group_of = torch.randint(0, groups - 1, (rows,)).sort().values  # the last one has none
    first = torch.searchsorted(group_of, torch.arange(groups + 1))
    token = torch.randint(0, 40, (rows,)) if picks else None
    x = torch.randn(40 if picks else rows, 200)
    found = TritonWeights(weights, biases).grouped_product(x, first, token)
    close(found, reference.grouped_product(x if token is None else x[token], weights, biases, group_of))


def test_rows_are_combined_by_their_shares():
    torch.manual_seed(0)
    x, row_of, shares = torch.randn(12, 70), torch.randint(0, 12, (5, 3)), torch.rand(5, 3)
    close(combine(x, row_of, shares), (x[row_of] * shares.unsqueeze(2)).sum(1))


@pytest.mark.parametrize(("tokens", "picks", "groups"), [(1, 1, 1), (1, 4, 32), (64, 4, 32), (70, 8, 100), (300, 2, 7)])
def test_rows_are_sorted_by_their_groups_in_the_order_in_which_they_come(
    tokens: int, picks: int, groups: int, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    picked = torch.stack([torch.randperm(groups)[:picks] for _ in range(tokens)])
    monkeypatch.setattr(products, "SORTED_AT_ONCE", 512)
    for found, wanted in zip(sort_rows(picked, groups), reference.sort_rows(picked, groups), strict=True):
        assert torch.equal(found, wanted)
