import pytest
import torch
from torch import Tensor, nn

from intarsia.kernels.products import NativeLinear, PackedLinear
from intarsia.workers.cpu.linear import hold_linears, merge_linears, pack_linears, products_left_out, settle_linears

CPU = torch.device("cpu")


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8, bias=False)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 24), (1, 7, 24), (300, 24), (2, 19, 24), (1, 0, 24)])
def test_packed_products_are_the_plain_ones(dtype: torch.dtype, shape: tuple[int, ...]):
    plain, packed = model(dtype), model(dtype)
    pack_linears(packed, CPU)
    assert all(isinstance(layer, PackedLinear) for layer in packed)
    inputs = torch.randn(shape).to(dtype)
    torch.testing.assert_close(packed(inputs), plain(inputs))


def test_a_layer_cut_by_its_weight_alone_is_packed_as_cut():
    linear = nn.Linear(24, 40, bias=False)
    share = linear.weight.detach()[:16].clone()
    linear.weight = nn.Parameter(share, requires_grad=False)  # as a worker takes its part
    pack_linears(nn.Sequential(linear), CPU)
    inputs = torch.randn(1, 37, 24)
    torch.testing.assert_close(linear(inputs), inputs @ share.T)


def test_a_packed_module_keeps_its_hooks_and_can_say_its_weight():
    packed, heard = model(), []
    packed[0].register_forward_hook(lambda *_: heard.append(1))
    pack_linears(packed, CPU)
    packed(torch.randn(2, 24))
    assert heard == [1]
    assert isinstance(packed[0], PackedLinear)
    torch.testing.assert_close(packed[0].weight, model()[0].weight, rtol=0, atol=0)
    assert "weight" not in dict(packed[0].named_parameters())


def test_merged_layers_are_the_layers_side_by_side():
    linears = [nn.Linear(24, 40), nn.Linear(24, 8, bias=False), nn.Linear(24, 3)]
    inputs = torch.randn(5, 24)
    wanted = torch.cat([linear(inputs) for linear in linears], dim=-1)
    pack_linears(linears[0], CPU)
    torch.testing.assert_close(merge_linears(linears)(inputs), wanted)


def test_what_is_held_gives_zeros_where_products_are_left_out_and_is_packed_when_it_is_settled():
    if reason := NativeLinear.lacks():
        pytest.skip(reason)
    held, x = model(), torch.randn(2, 24)
    hold_linears(held, CPU)
    with products_left_out(held):
        assert held(x).shape == (2, 8) and not held(x).any()
    with pytest.raises(AssertionError, match="settle"):
        held(x)
    settle_linears(held)
    torch.testing.assert_close(held(x), model()(x))


def test_held_layers_are_packed_once_when_they_are_merged():
    if reason := NativeLinear.lacks():
        pytest.skip(reason)
    linears, x = [nn.Linear(24, outputs).requires_grad_(False) for outputs in (64, 40)], torch.randn(5, 24)
    wanted = torch.cat([linear(x) for linear in linears], dim=-1)
    hold_linears(nn.Sequential(*linears), CPU)
    torch.testing.assert_close(merge_linears(linears)(x), wanted)
    assert all("packed" not in vars(linear) for linear in linears)


# -- weights that several use ----------------------------------------------------------------------------------------


class ScaledEmbedding(nn.Embedding):
    """As transformers writes one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(3.0).to(self.weight.dtype)


def tied(embedding: nn.Embedding) -> nn.ModuleDict:
    modules = nn.ModuleDict({"embed": embedding, "head": nn.Linear(24, 40, bias=False), "other": nn.Linear(4, 4)})
    modules["head"].weight = embedding.weight
    return modules.requires_grad_(False)


@pytest.mark.parametrize("kind", [nn.Embedding, ScaledEmbedding])
def test_an_embedding_looks_its_rows_up_in_the_packed_weight_of_the_output(kind: type[nn.Embedding]):
    if reason := NativeLinear.lacks():
        pytest.skip(reason)
    torch.manual_seed(0)
    modules, heard = tied(kind(40, 24)), []
    modules["embed"].register_forward_hook(lambda *_: heard.append(1))
    tokens, hidden = torch.tensor([[3, 39, 0, 3]]), torch.randn(1, 4, 24)
    embedded, logits = modules["embed"](tokens), modules["head"](hidden)
    pack_linears(modules, CPU)
    assert torch.equal(modules["embed"](tokens), embedded)
    torch.testing.assert_close(modules["head"](hidden), logits)
    assert isinstance(modules["embed"], kind)
    assert len(heard) == 2
    assert not list(modules["embed"].parameters())
    assert modules["embed"].weight.is_meta  # it has no numbers to compute with


def test_a_weight_that_others_compute_with_is_left_alone():
    modules = nn.ModuleDict({"first": nn.Linear(24, 24), "second": nn.Linear(24, 24)})
    modules["first"].weight = modules["second"].weight
    pack_linears(modules, CPU)
    assert not any(isinstance(child, PackedLinear) for child in modules.values())


def test_nothing_is_packed_for_another_device_or_dtype():
    for module, device in ((model(), torch.device("cuda")), (model(torch.float64), CPU)):
        pack_linears(module, device)
        assert not isinstance(module[0], PackedLinear)
