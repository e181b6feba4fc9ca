import pytest
import torch

from intarsia.errors import InvalidSetting, UnsupportedModel
from intarsia.kernels.paged_attention import Capabilities, Needs, select_backend, torch_sdpa

CPU = torch.device("cpu")
FLOAT = Needs(torch.float32, key_dim=64, value_dim=64)


def test_first_backend_that_covers_the_needs_is_taken():
    assert select_backend(FLOAT, CPU).name == "torch"
    assert select_backend(Needs(torch.float64, 64, 64), CPU).name == "reference"


def test_backend_is_taken_by_name():
    assert select_backend(FLOAT, CPU, "reference").name == "reference"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidSetting, match="no attention backend 'warp'; there are torch, reference"):
        select_backend(FLOAT, CPU, "warp")


def test_needs_nobody_covers_name_each_backend_and_why():
    with pytest.raises(UnsupportedModel, match=r"torch takes .* not torch\.int8; reference takes .* not torch\.int8"):
        select_backend(Needs(torch.int8, 64, 64), CPU)


def test_needs_not_covered_by_the_named_backend_are_refused():
    with pytest.raises(UnsupportedModel, match=r"torch takes .* not torch\.float64"):
        select_backend(Needs(torch.float64, 64, 64), CPU, "torch")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"devices": ("cuda",)}, "runs on cuda, not on cpu"),
        ({"max_head_dim": 32}, "takes heads of up to 32 numbers, not 64"),
        ({"window": False}, "has no window"),
        ({"softcap": False}, "has no softcap"),
        ({"sinks": False}, "has no sinks"),
    ],
)
def test_refusal_says_what_is_lacking(limits: dict, reason: str):
    able = {"devices": ("cpu",), "dtypes": (torch.float32,)}
    needs = Needs(torch.float32, 64, 64, window=True, softcap=True, sinks=True)
    assert Capabilities(**(able | limits)).refusal(needs, CPU) == reason
    assert torch_sdpa.TorchBackend.capabilities.refusal(needs, CPU) is None
