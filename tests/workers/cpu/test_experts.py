"""Experts and routers as we compute them, beside transformers' own, layer by layer."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from intarsia.kernels.products import NativeLinear
from intarsia.kernels.toolchain import triton as gpu
from intarsia.tests.models import FAMILIES
from intarsia.workers.cpu import experts
from intarsia.workers.cpu.experts import IMPLEMENTATION, pack_experts
from intarsia.workers.cpu.linear import pack_linears

WITH_EXPERTS = (
    "deepseek_v3", "gemma4", "gpt_oss", "granite4", "jamba", "lfm2_moe", "llama4", "minimax", "nemotron_h",
    "qwen3_5_moe", "qwen3_next",
)  # fmt: skip
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def layers_with_experts(family: str, dtype: torch.dtype) -> list[nn.Module]:
    """The modules that own a layer's router and experts."""
    torch.manual_seed(0)
    config: Any = FAMILIES[family]()
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2)
    return [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]


def output(layer: nn.Module, hidden: Tensor) -> Tensor:
    found = layer(hidden)
    return (found if isinstance(found, Tensor) else found[0]).view(hidden.shape[-2:])


@pytest.fixture(autouse=True)
def compiler() -> None:
    if reason := NativeLinear.lacks():
        pytest.skip(reason)


@torch.inference_mode()
@pytest.mark.parametrize("family", [name for name in WITH_EXPERTS if name != "gemma4"])
def test_experts_give_what_transformers_gives_and_each_token_by_itself(family: str):
    layers = layers_with_experts(family, torch.float32)
    assert layers
    for layer, theirs in zip(layers, copy.deepcopy(layers), strict=True):
        hidden = torch.randn(1, 13, next(layer.parameters()).shape[-1])
        pack_linears(layer, CPU)
        pack_experts(layer, CPU)
        found = output(layer, hidden)
        torch.testing.assert_close(found, output(theirs, hidden), rtol=1e-4, atol=1e-4)
        for token in range(hidden.shape[1]):
            assert torch.equal(output(layer, hidden[:, token : token + 1])[0], found[token])


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_weights_of_experts_are_kept_once(family: str):
    for layer in layers_with_experts(family, torch.bfloat16):
        before: Any = [p for p in layer.experts.parameters() if p.dim() == 3]  # type: ignore[union-attr]
        pack_experts(layer, CPU)
        assert before
        assert not [p for p in layer.experts.parameters() if p.dim() == 3]  # type: ignore[union-attr]
        config: Any = getattr(layer.experts, "config", None)
        assert config is None or config._experts_implementation == IMPLEMENTATION


def test_experts_on_another_device_are_left_alone():
    layer = layers_with_experts("gpt_oss", torch.float32)[0]
    pack_experts(layer, torch.device("meta"))
    assert any(parameter.dim() == 3 for parameter in layer.parameters())


@torch.inference_mode()
@pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))
@pytest.mark.parametrize("family", [name for name in WITH_EXPERTS if name != "gemma4"])
def test_experts_of_a_gpu_give_what_transformers_gives(family: str):
    """In Triton's interpreter, and in the layout in which transformers keeps weights."""
    layers = layers_with_experts(family, torch.float32)
    for layer, theirs in zip(layers, copy.deepcopy(layers), strict=True):
        pack_experts(layer, CUDA)
        hidden = torch.randn(1, 13, next(theirs.parameters()).shape[-1])
        torch.testing.assert_close(output(layer, hidden), output(theirs, hidden), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))
def test_experts_of_a_long_prompt_on_a_gpu_go_the_way_of_torch_unless_one_order_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(experts, "TORCH_FROM_ROWS", 40)
    went: list[int] = []
    theirs = experts.grouped_mm_experts_forward

    def counted(module: nn.Module, hidden: Tensor, *asked: Tensor) -> Tensor:
        went.append(len(hidden))
        return theirs(module, hidden, *asked)

    monkeypatch.setattr(experts, "grouped_mm_experts_forward", counted)
    for same_bits, expected in ((False, [30]), (True, [])):
        layer = layers_with_experts("gpt_oss", torch.bfloat16)[0]
        pack_experts(layer, CUDA, same_bits)
        kept = [p for p in layer.experts.parameters() if p.dim() == 3]  # type: ignore[union-attr]
        assert bool(kept) is not same_bits
        went.clear()
        for tokens in (3, 30):
            hidden = torch.randn(1, tokens, layer.experts.hidden_size, dtype=torch.bfloat16)  # type: ignore[union-attr]
            output(layer, hidden)
        assert went == expected
