import pytest
import torch
from torch import nn

from intarsia.kernels.products import OneDnnLinear, compile_products
from intarsia.kernels.products.onednn import padded_rows


@pytest.fixture
def model() -> nn.Sequential:
    if reason := OneDnnLinear.lacks():
        pytest.skip(reason)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8, bias=False)).requires_grad_(False)
    for layer in layers:
        assert isinstance(layer, nn.Linear)
        OneDnnLinear.take_over(layer)
    return layers


def test_products_are_compiled_before_requests_come_without_what_hooks_do(
    model: nn.Sequential, capfd: pytest.CaptureFixture[str]
):
    heard = []
    model[0].register_forward_hook(lambda *_: heard.append(1))
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        compile_products(model, most_rows=40)
        assert "cache_miss" in capfd.readouterr().out
        model(torch.randn(1, 39, 24))
        assert "cache_miss" not in capfd.readouterr().out
    assert heard == [1]


def test_steps_of_any_number_of_tokens_make_products_of_few_shapes():
    padded = [padded_rows(rows) for rows in range(2049)]
    assert len(set(padded)) <= 62
    assert all(rows <= size <= rows * 5 / 4 and size - rows < 64 for rows, size in enumerate(padded))
