"""What is computed in fewer calls, and that it is what the model computes.

The table of `workers/cpu/fused_table.py` is checked by observation (`observer.py`): of all ways in which our calls can
compute a module, the one that the table names must be the nearest; and a module that one of them computes must be in
the table.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from intarsia.kernels.tokenwise import Gating, reference
from intarsia.kernels.tokenwise import cpu as native
from intarsia.kernels.tokenwise import triton as on_gpu
from intarsia.proto.request import SamplingParams
from intarsia.tests.conftest import TinyModel
from intarsia.tests.local import LocalWorkers, complete, make_engine
from intarsia.tests.models import FAMILIES, WITH_IMAGES, make_checkpoint, new_model, prompts_of
from intarsia.tests.tiny_configs import granite4
from intarsia.tests.workers.cpu.observer import TOLERANCE, Observer, findings
from intarsia.tests.workers.models.test_load import granite
from intarsia.workers.cpu.fused import fuse
from intarsia.workers.cpu.fused_modules import FusedAttention, FusedLayer, FusedMLP, FusedNorm
from intarsia.workers.cpu.fused_table import ACTIVATIONS, ATTENTIONS, DECODER_LAYERS, GATED_MLPS, NORMS, ROUTERS
from intarsia.workers.models.loaded_model import LoadedModel

pytestmark = pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")

FUSED = {  # attention, MLPs, norms, layers
    "gemma3": (6, 6, 25, 6), "gemma2": (4, 4, 17, 4), "ministral": (4, 4, 9, 4), "gpt_oss": (4, 0, 9, 4),
    "llama": (3, 3, 7, 3), "qwen3": (3, 3, 7, 3), "smollm3": (4, 4, 9, 4), "cohere2": (4, 4, 5, 0),
    "olmo3": (4, 4, 9, 4), "exaone4": (4, 4, 9, 4), "llama4": (0, 4, 9, 0), "bamba": (2, 4, 9, 4),
    "granite4": (1, 0, 9, 0), "nemotron_h": (1, 0, 6, 0), "falcon_h1": (0, 0, 7, 0), "zamba2": (0, 0, 13, 0),
    "jamba": (1, 2, 18, 4), "minimax": (1, 0, 12, 0), "lfm2": (1, 4, 9, 4), "qwen3_next": (0, 4, 11, 4),
    "qwen3_5": (0, 4, 11, 4), "gemma3n": (0, 4, 54, 0), "gemma4_e": (0, 6, 42, 0), "gemma4": (0, 4, 37, 0),
    "deepseek_v3": (0, 3, 13, 3), "deepseek_v32": (0, 3, 13, 3), "glm_moe_dsa": (0, 4, 17, 0),
    "mistral": (3, 3, 7, 3), "ministral3": (3, 3, 7, 3), "mllama": (2, 4, 13, 2), "lfm2_moe": (1, 1, 9, 4),
    "qwen3_5_moe": (0, 4, 11, 4), "kimi_linear": (0, 4, 10, 4), "ling3": (0, 4, 10, 4),
    "recurrent_gemma": (0, 6, 13, 0), "mamba": (0, 0, 4, 0), "zaya": (0, 0, 13, 0), "qwen2": (4, 4, 9, 4),
    "qwen3_moe": (3, 1, 7, 3), "mixtral": (3, 0, 7, 3), "phi3": (3, 3, 7, 3), "olmo2": (3, 3, 7, 3),
    "glm4_moe": (3, 3, 7, 3), "minimax_m2": (3, 0, 7, 3), "minimax_m3": (2, 4, 17, 4), "mimo_v2_flash": (0, 1, 9, 4),
    "step3p7": (0, 4, 17, 4), "lfm3": (0, 6, 33, 6), "olmo_hybrid": (1, 4, 9, 4), "afmoe": (0, 4, 25, 4),
    "muse_glimmer": (0, 4, 17, 4), "mistral4": (0, 3, 13, 3), "mistral_large4": (0, 4, 12, 0),
    "deepseek_v4": (0, 4, 22, 0), "glm5_next": (0, 4, 13, 0),
}  # fmt: skip
"""Of the tiny checkpoint of each family, in float32. It may grow."""

NEAR = 2e-4
"""Two ways that differ by less are one: in float32 it does not matter when a norm rounds."""

# -- the table -------------------------------------------------------------------------------------------------------


def loaded(path: Path, **settings: Any) -> LoadedModel:
    workers = LocalWorkers()
    asyncio.run(make_engine(path, workers, **settings))
    assert workers.worker._model is not None
    return workers.worker._model


def observed(path: Path, dtype: str) -> Observer:
    """Of the longest prompt, in one step."""
    prompts, images = prompts_of(path.name)
    workers = LocalWorkers()

    async def watch() -> Observer:
        engine = await make_engine(path, workers, dtype=dtype, enforce_eager=True)
        assert workers.worker._model is not None
        seen = Observer(workers.worker._model)
        with seen.watching():
            await complete(engine, prompts[-1:], SamplingParams(temperature=0, max_tokens=1), images[-1:])
        return seen

    return asyncio.run(watch())


@torch.inference_mode()
def complaints(path: Path, dtype: str) -> tuple[list[str], nn.Module]:
    """What the table says otherwise than was observed; and the model, fused by the table."""
    seen = observed(path, dtype)
    model = seen.model.module
    found = list(findings(seen))
    written_as = {name: type(module).__name__ for name, module in model.named_modules()}
    fuse(model, seen.model.attention, seen.model.device)
    tolerance = TOLERANCE[getattr(torch, dtype)]
    wrong = []
    fused = dict(model.named_modules())
    for name, kind, least, error in found:
        module = fused.get(name)  # None: a norm of queries or keys, inside of its attention now
        if module is None:
            continue
        if not isinstance(module, kind):
            if least <= tolerance:
                wrong.append(f"{name}, a {written_as[name]}, could be a {kind.__name__}")
        elif error(module) > min(tolerance, least + NEAR):
            wrong.append(f"{name}, a {written_as[name]}, is no such {kind.__name__}")
    return wrong, model


def counts(model: nn.Module) -> tuple[int, ...]:
    kinds = FusedAttention, FusedMLP, FusedNorm, FusedLayer
    return tuple(sum(isinstance(module, kind) for module in model.modules()) for kind in kinds)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_of_a_family_what_is_observed(family: str, dtype: torch.dtype, tmp_path: Path):
    path = make_checkpoint(family, tmp_path / family)
    wrong, model = complaints(path, str(dtype).removeprefix("torch."))
    assert wrong == []
    if dtype is torch.float32:
        assert counts(model) == FUSED[family]


def test_attention_that_rotates_in_some_configs_only_does_so_when_it_is_given_angles(tmp_path: Path):
    torch.manual_seed(0)
    config: Any = granite4()
    config.position_embedding_type = "rope"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "granite4")
    wrong, model = complaints(tmp_path / "granite4", "float32")
    assert (wrong, counts(model)) == ([], FUSED["granite4"])


def test_every_class_of_the_table_belongs_to_a_tested_family():
    met = set()
    for family, make in FAMILIES.items():
        has_images = family in WITH_IMAGES
        model = AutoModelForImageTextToText.from_config(make()) if has_images else new_model(make())
        met |= {type(module).__name__ for module in model.modules()}
    assert {*NORMS, *GATED_MLPS, *ATTENTIONS, *ROUTERS, *DECODER_LAYERS} <= met


@pytest.mark.parametrize("name", ACT2FN)
def test_an_activation_that_the_table_names_computes_what_it_says(name: str):
    activate = ACT2FN[name]
    kind = ACTIVATIONS.get(type(activate).__name__)
    if kind is not None:
        gates = torch.linspace(-6, 6, 100)
        ours = reference.gate(torch.cat((gates, torch.ones(100))), Gating(kind))
        torch.testing.assert_close(activate(gates), ours, rtol=0, atol=1e-5)


def test_modules_that_do_a_little_more_than_the_table_says_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The check itself is checked: each of these differs from what we compute in one step."""
    names = "MLP", "Attention", "RMSNorm", "DecoderLayer"
    mlp, attention, norm, layer = (getattr(modeling_llama, f"Llama{name}") for name in names)
    plain = {kind: kind.forward for kind in (mlp, attention, norm, layer)}
    path = make_checkpoint("llama", tmp_path / "llama")

    def scaled_up(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.001)

    def scaled_down(self: Any, x: Tensor) -> Tensor:
        return plain[mlp](self, x) * 1.001

    def other_values(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = plain[attention](self, hidden_states * 1.001, *args, **kwargs)
        return output, weights

    def shifted(self: Any, hidden_states: Tensor) -> Tensor:
        return plain[norm](self, hidden_states) + 0.001

    def added_twice(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain[layer](self, hidden_states, *args, **kwargs) + 0.001 * hidden_states

    changes = (mlp, scaled_up), (mlp, scaled_down), (attention, other_values), (norm, shifted), (layer, added_twice)
    for kind, forward in changes:
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", forward)
            wrong, _ = complaints(path, "float32")
        # A layer with a part that does something else does so too.
        of_parts = [each for each in wrong if kind is layer or "DecoderLayer" not in each]
        assert of_parts
        assert all(f"a {kind.__name__}, is no such" in each for each in of_parts)


def test_a_class_left_out_of_the_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(GATED_MLPS, "LlamaMLP")
    wrong, _ = complaints(make_checkpoint("llama", tmp_path / "llama"), "float32")
    assert wrong == [f"model.layers.{n}.mlp, a LlamaMLP, could be a FusedMLP" for n in range(3)]


# -- when the table is used ------------------------------------------------------------------------------------------


def test_a_tested_family_is_fused_at_start_up(tmp_path: Path):
    assert counts(loaded(make_checkpoint("gemma3", tmp_path / "gemma3")).module) == FUSED["gemma3"]


def test_every_part_of_a_model_is_as_written_when_that_is_wanted(tiny: Callable):
    assert counts(loaded(tiny("gemma3").path, enforce_eager=True).module) == (0, 0, 0, 0)


def test_an_untested_family_is_as_written(tmp_path: Path):
    assert counts(loaded(granite(tmp_path)).module) == (0, 0, 0, 0)


def test_a_class_of_the_same_name_that_is_not_of_transformers_is_as_written(tmp_path: Path):
    model = loaded(make_checkpoint("llama", tmp_path / "llama"), enforce_eager=True)

    class LlamaMLP(modeling_llama.LlamaMLP):
        pass

    for module in model.module.modules():
        if type(module) is modeling_llama.LlamaMLP:
            module.__class__ = LlamaMLP
    fuse(model.module, model.attention, model.device)
    assert counts(model.module) == (3, 0, 7, 3)


def test_an_activation_we_lack_leaves_its_mlp_as_written(tmp_path: Path):
    model = loaded(make_checkpoint("llama", tmp_path / "llama"), enforce_eager=True)
    next(module for module in model.module.modules() if type(module) is modeling_llama.LlamaMLP).act_fn = nn.ReLU()
    fuse(model.module, model.attention, model.device)
    assert counts(model.module) == (3, 2, 7, 3)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_nothing_in_cpp_is_even_tried_on_another_device(device: str, tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    """C++ that is given addresses of a GPU's memory ends the process."""
    model = loaded(tiny("gemma3").path, enforce_eager=True)
    monkeypatch.setattr(native, "is_available", lambda: pytest.fail("it was asked for"))
    monkeypatch.setattr(on_gpu, "is_available", lambda: False)
    fuse(model.module, model.attention, torch.device(device))
    assert counts(model.module) == (0, 0, 0, 0)


def test_without_a_compiler_every_part_is_as_written(tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert counts(loaded(tiny("gemma3").path).module) == (0, 0, 0, 0)


def prompt_logprobs(model: TinyModel, **settings: Any) -> Tensor:
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
