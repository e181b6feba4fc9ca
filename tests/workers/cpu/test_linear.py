import pytest
import torch
from torch import nn

from intarsia.workers.cpu.linear import PackedLinear, compile_products, most_rows_within, pack_linears, padded_rows

CPU = torch.device("cpu")


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8, bias=False)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 24), (1, 7, 24), (300, 24), (2, 19, 24), (1, 0, 24)])
def test_packed_products_are_the_plain_ones(dtype: torch.dtype, shape: tuple[int, ...]):
    plain, packed = model(dtype), model(dtype)
    pack_linears(packed, CPU)
    inputs = torch.randn(shape).to(dtype)
    torch.testing.assert_close(packed(inputs), plain(inputs))


def test_products_are_compiled_before_requests_come_without_what_hooks_do(capfd: pytest.CaptureFixture[str]):
    packed, heard = model(), []
    packed[0].register_forward_hook(lambda *_: heard.append(1))
    pack_linears(packed, CPU)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        compile_products(packed, most_rows=40)
        assert "cache_miss" in capfd.readouterr().out
        packed(torch.randn(1, 39, 24))
        assert "cache_miss" not in capfd.readouterr().out
    assert heard == [1]


def test_a_layer_cut_by_its_weight_alone_is_packed_as_cut():
    linear = nn.Linear(24, 40, bias=False)
    share = linear.weight.detach()[:16].clone()
    linear.weight = nn.Parameter(share, requires_grad=False)  # as a worker takes its part
    pack_linears(nn.Sequential(linear), CPU)
    inputs = torch.randn(1, 37, 24)
    torch.testing.assert_close(linear(inputs), inputs @ share.T)


def test_steps_of_any_number_of_tokens_make_products_of_few_shapes():
    padded = [padded_rows(rows) for rows in range(2049)]
    assert len(set(padded)) <= 62
    assert all(rows <= size <= rows * 5 / 4 and size - rows < 64 for rows, size in enumerate(padded))


def test_the_most_rows_within_a_size_are_filled_up_to_no_more():
    for size in range(600):
        most = most_rows_within(size)
        assert padded_rows(most) <= size < padded_rows(most + 1)


def test_a_packed_module_keeps_its_hooks_and_can_say_its_weight():
    packed, heard = model(), []
    packed[0].register_forward_hook(lambda *_: heard.append(1))
    pack_linears(packed, CPU)
    packed(torch.randn(2, 24))
    assert heard == [1]
    assert isinstance(packed[0], PackedLinear)
    torch.testing.assert_close(packed[0].weight, model()[0].weight, rtol=0, atol=0)
    assert "weight" not in dict(packed[0].named_parameters())


def test_a_weight_that_others_use_is_left_alone():
    tied = nn.ModuleDict(
        {"embed": nn.Embedding(40, 24), "head": nn.Linear(24, 40, bias=False), "other": nn.Linear(4, 4)}
    )
    tied["head"].weight = tied["embed"].weight
    pack_linears(tied, CPU, leave={"other"})
    assert not any(isinstance(child, PackedLinear) for child in tied.values())


def test_nothing_is_packed_for_another_device_or_dtype():
    for module, device in ((model(), torch.device("cuda")), (model(torch.float64), CPU)):
        pack_linears(module, device)
        assert not isinstance(module[0], PackedLinear)


def test_compiled_products_of_any_number_of_rows_are_one_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    packed = model()
    pack_linears(packed, CPU)
    compiled = torch.compile(packed, backend="eager", dynamic=True)
    for rows in (18, 37, 300):
        inputs = torch.randn(rows, 24)
        torch.testing.assert_close(compiled(inputs), packed(inputs))
