"""What is computed in fewer calls, and that it is what the model computes."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from intarsia.kernels.tokenwise import cpu as native
from intarsia.proto.request import SamplingParams
from intarsia.tests.conftest import TinyModel
from intarsia.tests.local import LocalWorkers, complete, make_engine
from intarsia.tests.models import make_checkpoint
from intarsia.tests.workers.models.test_load import granite
from intarsia.workers.cpu.fused import FusedAttention, FusedMLP, FusedNorm, Watch, fuse

pytestmark = pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")

FUSED = {  # attention, MLPs, norms
    "gemma3": (6, 6, 25), "gemma2": (4, 4, 17), "ministral": (4, 4, 9), "gpt_oss": (4, 0, 9), "llama": (3, 3, 7),
    "qwen3": (3, 3, 7), "smollm3": (4, 4, 9), "cohere2": (4, 4, 0), "olmo3": (4, 4, 9), "exaone4": (4, 4, 9),
    "llama4": (0, 4, 9), "bamba": (2, 4, 9), "ministral3": (0, 3, 7), "qwen3_next": (0, 4, 11),
}  # fmt: skip
"""Families of every kind. Llama 4, Ministral 3 and Qwen3-Next do more to queries, or to what attention gives."""


def fused_model(path: Path, **settings: Any) -> nn.Module:
    workers = LocalWorkers()
    asyncio.run(make_engine(path, workers, **settings))
    assert workers.worker._model is not None
    return workers.worker._model.module


def counts(model: nn.Module) -> tuple[int, ...]:
    found = Counter(type(module) for module in model.modules())
    return tuple(found[kind] for kind in (FusedAttention, FusedMLP, FusedNorm))


@pytest.mark.parametrize("family", FUSED)
def test_what_a_family_computes_as_we_can_is_found(family: str, tiny: Callable):
    assert counts(fused_model(tiny(family).path)) == FUSED[family]


def test_every_part_of_a_model_is_as_written_when_that_is_wanted(tiny: Callable):
    assert counts(fused_model(tiny("gemma3").path, enforce_eager=True)) == (0, 0, 0)


def test_a_family_nobody_tested_is_as_written(tmp_path: Path):
    assert counts(fused_model(granite(tmp_path), allow_generic=True)) == (0, 0, 0)


def test_nothing_is_even_tried_on_another_device(tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    """C++ that is given addresses of a GPU's memory ends the process."""
    model = fused_model(tiny("gemma3").path, enforce_eager=True)
    monkeypatch.setattr(native, "is_available", lambda: pytest.fail("it was asked for"))
    attention: Any = None
    fuse(Watch(model, attention), torch.device("cuda"))
    assert counts(model) == (0, 0, 0)


def test_without_a_compiler_every_part_is_as_written(tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert counts(fused_model(tiny("gemma3").path)) == (0, 0, 0)


def prompt_logprobs(model: TinyModel, **settings: Any) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    async def ask() -> list[Any]:
        return await complete(await make_engine(model.path, **settings), model.prompts, params)

    answers = asyncio.run(ask())
    return torch.tensor([entry.logprob for answer in answers for entry in answer.prompt_logprobs if entry])


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "cohere2", "olmo3", "bamba"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_answers_are_as_near_to_float32_as_those_of_the_model_as_written(family: str, dtype: str, tiny: Callable):
    exact = prompt_logprobs(tiny(family), dtype="float32", enforce_eager=True)
    torch.testing.assert_close(prompt_logprobs(tiny(family), dtype="float32"), exact, rtol=0, atol=1e-3)

    def error(**settings: Any) -> float:
        return float((prompt_logprobs(tiny(family), dtype=dtype, **settings) - exact).abs().mean())

    assert error() <= 2 * error(enforce_eager=True)


def test_modules_that_do_a_little_more_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each of these differs from what we compute in one step, with the same parts under the same names."""
    from transformers.models.llama import modeling_llama

    mlp, attention, norm = (getattr(modeling_llama, f"Llama{name}") for name in ("MLP", "Attention", "RMSNorm"))
    plain = {kind: kind.forward for kind in (mlp, attention, norm)}
    path = make_checkpoint("llama", tmp_path / "llama")
    assert counts(fused_model(path)) == (3, 3, 7)

    def scaled_up(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.001)

    def scaled_down(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain[mlp](self, x) * 1.001

    def other_values(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = plain[attention](self, hidden_states, *args, **kwargs)
        return output * 1.001, weights

    def shifted(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return plain[norm](self, hidden_states) + 0.001

    for kind, forward, left in (
        (mlp, scaled_up, (3, 0, 7)),
        (mlp, scaled_down, (3, 0, 7)),
        (attention, other_values, (0, 3, 7)),
        (norm, shifted, (3, 3, 0)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", forward)
            assert counts(fused_model(path)) == left
