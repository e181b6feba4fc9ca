"""Gates that torch would compute otherwise at a tensor's end."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.deprecation import deprecate_kwarg

from intarsia.kernels.tokenwise import cpu as native
from intarsia.workers.cpu.gates import take_gates

pytestmark = pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")


class Gates(nn.Module):
    """As a family's layers may write them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.sigmoid(x), F.silu(x), x.sigmoid(), F.softplus(x)


class NamedGates(nn.Module):
    """The same without a method of a tensor's."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, ...]:
        return torch.sigmoid(x) * scale, F.silu(x), nn.functional.softplus(x), F.sigmoid(x)


class WrappedGates(NamedGates):
    @deprecate_kwarg("factor", "9.0", new_name="scale")
    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, ...]:
        return torch.sigmoid(x) * scale, F.silu(x)


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1)


Gates.__module__ = NamedGates.__module__ = WrappedGates.__module__ = Sums.__module__ = "transformers.models.toy"


@pytest.mark.parametrize("kind", [Gates, NamedGates, WrappedGates])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_number_of_a_gate_does_not_depend_on_how_many_there_are(dtype: torch.dtype, kind: type[nn.Module]):
    gates, x = kind(), torch.linspace(-9, 9, 331).to(dtype)
    plain = gates(x)
    take_gates(gates)
    all_of_them = gates(x)
    for count in range(1, 80):
        for few, many in zip(gates(x[:count]), all_of_them, strict=True):
            assert torch.equal(few, many[:count]), count
    for ours, theirs in zip(all_of_them, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_modules_without_gates_and_with_a_forward_pass_of_ours_stay_as_they_are():
    sums, ours = Sums(), Gates()
    ours.forward = forward = lambda x: (x, x, x)
    take_gates(nn.ModuleList([sums, ours]))
    assert "forward" not in vars(sums) and ours.forward is forward


@pytest.mark.parametrize("kind", [NamedGates, WrappedGates])
def test_where_functions_are_called_by_name_no_other_call_is_looked_at(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
):
    named, asking = kind(), Gates()
    take_gates(nn.ModuleList([named, asking]))
    monkeypatch.setattr("intarsia.workers.cpu.gates._EachByItself", None)
    x = torch.linspace(-1, 1, 7)
    torch.testing.assert_close(named(x, scale=2.0)[0], 2 * x.sigmoid())
    with pytest.raises(TypeError):
        asking(x)
