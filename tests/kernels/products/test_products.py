import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from intarsia.kernels.products import LINEAR_KINDS, NativeLinear, PackedLinear, PackedWeights
from intarsia.kernels.products.reference import grouped_product, product

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=LINEAR_KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[PackedLinear]:
    if reason := request.param.lacks():
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def kind_for(kind: type[PackedLinear], dtype: torch.dtype) -> type[PackedLinear]:
    if dtype not in kind.dtypes:
        pytest.skip(f"this processor has no product of {kind.__name__} in {dtype}")
    return kind


def layer(inputs: int, outputs: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    tolerance = 2e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs, outputs", [(24, 40), (1, 1), (7, 64), (640, 65), (65, 130), (2500, 70)])
def test_a_product_of_any_shape_is_the_reference(
    kind_for: type[PackedLinear], dtype: torch.dtype, inputs: int, outputs: int
):
    torch.manual_seed(0)
    linear = layer(inputs, outputs, dtype, bias=outputs % 2 == 0)
    weight = linear.weight.clone()
    packed = kind_for.take_over(linear)
    for rows in (0, 1, 2, 5, 6, 7, 13, 31, 200, 401):
        x = torch.randn(rows, inputs).to(dtype)
        assert_close(packed(x), product(x, weight, packed.bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_layout_are_taken(kind_for: type[PackedLinear], dtype: torch.dtype):
    torch.manual_seed(0)
    linear = layer(24, 40, dtype)
    weight, packed = linear.weight.clone(), kind_for.take_over(linear)
    for x in (torch.randn(1, 7, 24), torch.randn(2, 3, 5, 24), torch.randn(9, 48)[:, 24:], torch.randn(24, 9).T):
        x = x.to(dtype)
        assert_close(packed(x), product(x.flatten(0, -2), weight, packed.bias).view(*x.shape[:-1], 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_any_others_and_with_any_threads(dtype: torch.dtype, threads: int):
    if reason := NativeLinear.lacks():
        pytest.skip(reason)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    for inputs, outputs in ((640, 200), (576, 190), (2049, 64), (5000, 30)):  # panels that threads halve, too
        packed = NativeLinear.take_over(layer(inputs, outputs, dtype))
        x = torch.randn(700, inputs).to(dtype)
        torch.set_num_threads(1)
        alone = torch.cat([packed(x[r : r + 1]) for r in range(len(x))])
        torch.set_num_threads(threads)
        for rows in (2, 3, 4, 5, 6, 7, 8, 11, 16, 32, 100, 193, 700):
            first = random.randrange(len(x) - rows + 1)
            assert torch.equal(packed(x[first : first + rows]), alone[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_weights_of_their_own_are_computed_in_one_call(dtype: torch.dtype, threads: int):
    if reason := NativeLinear.lacks():
        pytest.skip(reason)
    torch.manual_seed(0)
    weights, biases = torch.randn(5, 70, 24).to(dtype), torch.randn(5, 70).to(dtype)
    x = torch.randn(9, 24).to(dtype)
    group_of = torch.tensor([0, 0, 2, 2, 2, 2, 2, 2, 2, 4, 4])
    row_of = torch.tensor([3, 0, 8, 7, 6, 5, 4, 3, 2, 1, 1])
    first_row = torch.tensor([0, 2, 2, 9, 9, 11])
    packed = PackedWeights(weights, biases)
    found = packed.grouped_product(x, first_row, row_of)
    assert_close(found, grouped_product(x[row_of], weights, biases, group_of))
    alone = PackedWeights(weights[2:3], biases[2:3]).product(x)
    assert torch.equal(found[2:9], alone[row_of[2:9]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row_and_output(dtype: torch.dtype):
    if reason := NativeLinear.lacks():
        pytest.skip(reason)
    packed = NativeLinear.take_over(layer(33, 70, dtype))
    x = torch.randn(8, 33).to(dtype)
    wanted = packed(x)
    x[3] = float("nan")
    found = packed(x)
    assert found[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [24, 33])
def test_the_weight_can_be_told_as_it_was(kind_for: type[PackedLinear], dtype: torch.dtype, inputs: int):
    linear = layer(inputs, 70, dtype)
    weight = linear.weight.clone()
    packed = kind_for.take_over(linear)
    assert torch.equal(packed.weight, weight)
    numbers = torch.tensor([69, 0, 3, 3])
    assert torch.equal(packed.rows(numbers), weight[numbers])
    assert "weight" not in dict(packed.named_parameters())


def test_a_bfloat16_product_is_no_further_from_the_truth_than_torchs():
    if reason := NativeLinear.lacks():
        pytest.skip(reason)
    torch.manual_seed(0)
    linear = layer(2048, 512, torch.bfloat16, bias=False)
    x, weight = torch.randn(64, 2048).bfloat16(), linear.weight.clone()
    truth = x.double() @ weight.double().T
    torchs = (nn.functional.linear(x, weight).double() - truth).square().mean().sqrt()
    ours = (NativeLinear.take_over(linear)(x).double() - truth).square().mean().sqrt()
    assert ours <= torchs * 1.01
