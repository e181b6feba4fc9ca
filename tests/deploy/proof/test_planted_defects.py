"""Mistakes that an engine could make with a family, planted one by one: each proof finds its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from intarsia.deploy.proof.prove import prove
from intarsia.kvcache.reach import Chunked, Full, Sliding
from intarsia.workers import tensor_parallel
from intarsia.workers.checkpoint import layer_specs
from intarsia.workers.layers import adapters, attention, delta, latent, states
from intarsia.workers.models import load, weights
from intarsia.workers.tensor_parallel import Cut, Style

Plant = Callable[[pytest.MonkeyPatch], None]

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 4096}


def reach(kind: str, of: Callable[[Any], Any]) -> Plant:
    return lambda patch: patch.setitem(layer_specs.REACH_OF, kind, of)


def attends_with(**changed: Any) -> Plant:
    """Constants of attention that are other ones, or left out."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        make = attention.LayerParams

        def other(scale: float, softcap: Any = None, sinks: Any = None) -> Any:
            return make(**{"scale": scale, "softcap": softcap, "sinks": sinks} | changed)

        patch.setattr(attention, "LayerParams", other)

    return plant


def begins(is_new: bool) -> Plant:
    """Every row's state begins anew in each step, or none's does."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from intarsia.workers import runner

        make = runner.state_batch

        def other(*given: Any) -> Any:
            batch = make(*given)
            return replace(batch, is_new=np.full_like(batch.is_new, is_new))

        patch.setattr(runner, "state_batch", other)

    return plant


def with_config(change: Callable[[Any], None]) -> Plant:
    """The engine reads the config otherwise than transformers does."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        read = load._read_config

        def other(settings: Any) -> Any:
            config = read(settings)
            change(config)
            return config

        patch.setattr(load, "_read_config", other)

    return plant


def of_class(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


def style(name: str, other: Style) -> Plant:
    return lambda patch: patch.setitem(tensor_parallel.STYLES, name, other)


def other_neighbours(patch: pytest.MonkeyPatch) -> None:
    made = latent.LatentAttention.__init__

    def other(self: Any, *given: Any) -> None:
        made(self, *given)
        self._has_neighbours = not self._has_neighbours

    patch.setattr(latent.LatentAttention, "__init__", other)


def without_latent_scales(patch: pytest.MonkeyPatch) -> None:
    made = latent.LatentAttention.__init__

    def other(self: Any, *given: Any) -> None:
        made(self, *given)
        self._query_scale = self._latent_scale = 1.0

    patch.setattr(latent.LatentAttention, "__init__", other)


def _first_of_kind(config: Any, kinds: list[str]) -> dict[int, int]:
    """Not the last layer of the kind that has keys and values of its own."""
    first = len(kinds) - config.num_kv_shared_layers
    return {index: kinds.index(kinds[index]) for index in range(first, len(kinds))}


def _theta(config: Any) -> None:
    config.rope_parameters = config.rope_parameters | {"rope_theta": 500.0}


def _unstretched(config: Any) -> None:
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}


WINDOWS = "mistral", "cohere2_moe", "mimo_v2_flash"
DEFECTS: dict[str, tuple[str, int, Plant]] = {
    # -- what a token sees ---------------------------------------------------------------------------------------------
    **{f"a window one too long, {name}": (name, 1, reach("sliding_attention", lambda c: Sliding(c.sliding_window + 1)))
       for name in WINDOWS},
    **{f"a window one too short, {name}": (name, 1, reach("sliding_attention", lambda c: Sliding(c.sliding_window - 1)))
       for name in WINDOWS},
    "no window": ("afmoe", 1, reach("sliding_attention", lambda c: Full())),
    "a window where none is": ("afmoe", 1, reach("full_attention", lambda c: Sliding(c.sliding_window))),
    "a chunk one too long": (
        "llama4_text", 1, reach("chunked_attention", lambda c: Chunked(c.attention_chunk_size + 1))),
    "chunks taken for windows": (
        "llama4_text", 1, reach("chunked_attention", lambda c: Sliding(c.attention_chunk_size))),
    "shared layers read another one's": ("gemma3n_text", 1, of_class(layer_specs, "_sources", _first_of_kind)),
    "too few key-value heads": ("mimo_v2_flash", 1, of_class(layer_specs, "LAYERS_OF", {})),
    # -- how it is weighed ---------------------------------------------------------------------------------------------
    "no sinks": ("gpt_oss", 1, attends_with(sinks=None)),
    "no sinks in windows": ("mimo_v2_flash", 1, attends_with(sinks=None)),
    "no sinks of Granite": ("granite_swa", 1, attends_with(sinks=None)),
    "no soft cap": ("gemma2", 1, attends_with(softcap=None)),
    "queries not scaled": ("qwen2", 1, attends_with(scale=1.0)),
    "queries scaled by another size": ("granite", 1, attends_with(scale=16**-0.5)),
    "queries not scaled by their positions": (
        "llama4_text", 1, of_class(adapters, "patch_query_scale", lambda module: None)),
    # -- positions -----------------------------------------------------------------------------------------------------
    "other frequencies": ("qwen2", 1, with_config(_theta)),
    "positions not stretched": ("qwen3", 1, with_config(_unstretched)),
    "rotated halves for neighbours": ("deepseek_v3", 1, other_neighbours),
    "rotated neighbours for halves": ("youtu", 1, other_neighbours),
    "latents not scaled": ("longcat_flash", 1, without_latent_scales),
    # -- states --------------------------------------------------------------------------------------------------------
    "a state begins anew in each step": ("olmo_hybrid", 1, begins(True)),
    "a state begins with another's": ("bamba", 1, begins(False)),
    "a convolution begins anew in each step": ("lfm3", 1, begins(True)),
    "states are not turned round": ("olmo_hybrid", 1, of_class(
        delta.SeparateGatedDeltaNet, "_inputs", delta.GatedDeltaNet._inputs)),
    "a convolution without its function": ("olmo_hybrid", 1, of_class(
        states.Mixer, "_convolve", lambda self, x: self._convolve_by(states.CONVOLUTION, x))),
    # -- several ranks -------------------------------------------------------------------------------------------------
    "a bias on each rank": ("phi", 2, style("rowwise", Style({"weight": Cut(1)}, "sum_outputs"))),
    "experts not added up": ("mixtral", 2, style("moe_tp_experts", Style({}))),
    "heads not cut": ("granitemoe", 2, of_class(weights, "plan_by_structure", lambda model: {})),
    "halves of gate and up cut as one": ("glm4", 2, style("packed", Style({"weight": Cut(0)}))),
}  # fmt: skip
"""Name -> family, ranks, and what is planted."""

STRETCHED = {"positions not stretched": {"rope_parameters": YARN, "max_position_embeddings": 32_768}}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    family, ranks, plant = DEFECTS[name]
    CONFIG_MAPPING[family](**STRETCHED.get(name, {})).save_pretrained(tmp_path)
    plant(monkeypatch)
    verdict = prove(tmp_path, (ranks,))
    print(name, "|", verdict.reason)
    assert not verdict.is_right


def test_defects_are_thirty_and_more():
    assert len(DEFECTS) >= 30
