"""Mistakes that an engine could make with a family, planted one by one: each proof finds its own."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from intarsia.deploy.proof.prove import prove
from intarsia.deploy.proof.sweep import LACKING
from intarsia.kernels.paged_attention import Biases
from intarsia.kvcache.reach import Chunked, Full, Sliding
from intarsia.workers import tensor_parallel, worker
from intarsia.workers.checkpoint import layer_specs
from intarsia.workers.layers import (
    adapters,
    attention,
    convolution,
    delta,
    entries,
    indexed,
    latent,
    ngrams,
    own_ways,
    states,
)
from intarsia.workers.models import load, weights
from intarsia.workers.models.structure import plan_by_structure
from intarsia.workers.pages import Pages
from intarsia.workers.runner import ModelRunner
from intarsia.workers.tensor_parallel import Cut, Style, TensorParallel

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


def changed(**fields: Any) -> Plant:
    """The engine has other values in some fields of the config."""

    def change(config: Any) -> None:
        for name, value in fields.items():
            assert getattr(config, name) != value, f"{name} is {value} anyway"
            setattr(config, name, value)

    return with_config(change)


def lost(pattern: str, value: float = 0.0) -> Plant:
    """Weights and buffers of such names are never read: they are what they begin as."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        read, fill = weights._read, weights._fill_buffers
        name_of = re.compile(pattern)
        hit: list[str] = []

        def other(source: Any, name: str, *given: Any) -> Any:
            tensor = read(source, name, *given)
            if not name_of.fullmatch(name):
                return tensor
            hit.append(name)
            return torch.full_like(tensor, value)

        def other_fill(module: Any, sources: Any, device: Any) -> None:
            fill(module, sources, device)
            for name, buffer in module.named_buffers():
                if name_of.fullmatch(name):
                    hit.append(name)
                    buffer.fill_(value)
            assert hit, f"nothing is called {pattern}"

        patch.setattr(weights, "_read", other)
        patch.setattr(weights, "_fill_buffers", other_fill)

    return plant


def of_states(change: Callable[[Any], dict[str, Any]]) -> Plant:
    """Other values in what the states of a group go through in a step."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from intarsia.workers import runner

        make = runner.state_batch

        def other(*given: Any) -> Any:
            batch = make(*given)
            return replace(batch, **change(batch))

        patch.setattr(runner, "state_batch", other)

    return plant


def entries_made(change: Callable[[Any], dict[str, Any]]) -> Plant:
    """Other values in how the entries of a step are made."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        make = entries.EntryAttention._made_in_step

        def other(*given: Any) -> Any:
            making = make(*given)
            return None if making is None else replace(making, **change(making))

        patch.setattr(entries.EntryAttention, "_made_in_step", other)

    return plant


def unseen_windows(applies: Callable[[Any], bool]) -> Plant:
    """Steps of which that is so see all tokens."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        make = ModelRunner._batch

        def other(*given: Any) -> Any:
            batch = make(*given)
            return replace(batch, window_tokens=None) if applies(batch) else batch

        patch.setattr(ModelRunner, "_batch", other)

    return plant


def positions_of_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Tokens are counted through all requests of a step."""
    compute = ModelRunner.logits

    def other(self: Any, tokens_T: Any, positions_T: Any, *given: Any) -> Any:
        return compute(self, tokens_T, torch.arange(len(positions_T)), *given)

    patch.setattr(ModelRunner, "logits", other)


def copied_heads_in_turn(patch: pytest.MonkeyPatch) -> None:
    """With more ranks than key-value heads, neighbours have different ones."""
    ranges = TensorParallel._ranges

    def other(self: Any, what: str, sections: Any, parts: int | None = None) -> Any:
        if parts is None or parts == self.size:
            return ranges(self, what, sections, parts)
        return ranges(TensorParallel(self.rank % parts, parts), what, sections, parts)

    patch.setattr(TensorParallel, "_ranges", other)


def frequencies_of_short_texts(patch: pytest.MonkeyPatch) -> None:
    settle = worker.settle_frequencies
    patch.setattr(worker, "settle_frequencies", lambda module, length: settle(module, 1))


def _turned(config: Any) -> None:
    config.layer_types = [*config.layer_types[1:], config.layer_types[0]]


def _all_rotated(config: Any) -> None:
    config.rope_parameters = config.rope_parameters | {"partial_rotary_factor": 1.0}


def _other_epsilon(config: Any) -> None:
    config.rms_norm_eps = config.rms_norm_eps * 10


def choosing(change: Callable[..., tuple[Any, ...]]) -> Plant:
    """Pools of tokens are chosen otherwise. change: (make keys, tokens of a pool, pools that are chosen) -> others"""

    def plant(patch: pytest.MonkeyPatch) -> None:
        make = indexed.PoolChoice
        patch.setattr(indexed, "PoolChoice", lambda asked, given, *rule: make(asked, given, *change(*rule)))

    return plant


def _turned_as_last(make: Any, size: int, pools: int) -> tuple[Any, ...]:
    return lambda given, has_before, first: make(given, has_before, first + size - 1), size, pools


def _without_last(make: Any, size: int, pools: int) -> tuple[Any, ...]:
    return lambda given, has_before, first: make(given[:, :-1], has_before, first), size, pools


def _through_ends(self: Any, ids_T: torch.Tensor) -> list[torch.Tensor]:
    """Tokens before, also those of what ended before."""
    less = (ids_T - self._table.eos_token_id).float().unsqueeze(-1).expand(-1, len(self._nothing)).contiguous()
    before = self._scan(ngrams.IDS, ngrams.CONVOLUTION, self._shifts, self._nothing, less)
    return [each.long() + self._table.eos_token_id for each in before.unbind(-1)]


_BEFORE = convolution.WeighedConv._before
WINDOWS = "mistral", "cohere2_moe", "mimo_v2_flash"


def without_attention(model: Any, knows_attention: bool) -> dict[str, str]:
    plan = plan_by_structure(model, knows_attention)
    return {path: style for path, style in plan.items() if "self_attn" not in path}


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
    # -- what is chosen, and the tokens before -------------------------------------------------------------------------
    "a pool too many is chosen": ("qwen4_exp_text", 1, choosing(lambda make, size, pools: (make, size, pools + 1))),
    "pools without their last tokens": ("qwen4_exp_text", 1, choosing(_without_last)),
    "pools turned as their last tokens": ("qwen4_exp_text", 1, choosing(_turned_as_last)),
    "n-grams go on where a text ended": ("qwen4_exp_text", 1, of_class(ngrams.NGramFeatures, "_before", _through_ends)),
    "n-grams begin anew in each step": ("qwen4_exp_text", 1, begins(True)),
    "no sinks of queries": ("inkling2_text", 1, of_class(own_ways, "Biases", lambda m, p, sinks: Biases(m, p))),
    "weights of earlier tokens the wrong way round": ("inkling2_text", 1, of_class(
        convolution.WeighedConv, "_before", lambda self, x, earlier: _BEFORE(self, x, earlier)[::-1])),
    "another gate of what comes out": ("qwen4_exp_text", 1, changed(output_gate_type="silu")),
    # -- several ranks -------------------------------------------------------------------------------------------------
    "a bias on each rank": ("phi", 2, style("rowwise", Style({"weight": Cut(1)}, "sum_outputs"))),
    "experts not added up": ("mixtral", 2, style("moe_tp_experts", Style({}))),
    "heads not cut": ("granitemoe", 2, of_class(weights, "plan_by_structure", without_attention)),
    "halves of gate and up cut as one": ("glm4", 2, style("packed", Style({"weight": Cut(0)}))),
    # -- what is kept between steps and requests -----------------------------------------------------------------------
    "a block that is copied stays empty": ("mixtral", 1, of_class(Pages, "copy", lambda self, copies: None)),
    "copies of states stay empty": ("olmo_hybrid", 1, of_class(Pages, "copy", lambda self, copies: None)),
    "states are not saved where prompts part": ("olmo_hybrid", 1, of_states(lambda batch: {"saves": []})),
    "states are saved a token early": ("lfm3", 1, of_states(lambda batch: {
        "saves": [save._replace(tokens=save.tokens - 1) if save.tokens > 1 else save for save in batch.saves]})),
    "requests trade their states": ("bamba", 1, of_states(lambda batch: {"pages": np.roll(batch.pages, 1)})),
    "blocks of a window are given back too early": ("afmoe", 1, of_class(
        Sliding, "oldest_needed", lambda self, length: max(0, length - self.window_tokens + 6))),
    "a prefix is taken up without its window": ("cohere2_moe", 1, of_class(
        Sliding, "oldest_needed", lambda self, length: max(0, length - 1))),
    "no window in prompts": ("afmoe", 1, unseen_windows(lambda batch: batch.query_lens.max() > 1)),
    "no window once all decode": ("mimo_v2_flash", 1, unseen_windows(lambda batch: batch.query_lens.max() == 1)),
    "positions go on through a batch": ("qwen3_moe", 1, positions_of_a_batch),
    # -- layers that come late, and long texts -------------------------------------------------------------------------
    "windows on the layers beside": ("afmoe", 1, with_config(_turned)),
    "no window on layers that come late": ("qwen2", 1, reach("sliding_attention", lambda c: Full())),
    "frequencies of short texts": ("phi3", 1, frequencies_of_short_texts),
    "all of a head is rotated": ("glm4_moe", 1, with_config(_all_rotated)),
    # -- experts -------------------------------------------------------------------------------------------------------
    "shares of experts not normalised": ("qwen3_moe", 1, changed(norm_topk_prob=True)),
    "one expert for two": ("mixtral", 1, changed(num_experts_per_tok=1)),
    "experts chosen from all groups": ("deepseek_v3", 1, changed(n_group=1)),
    "experts not scaled": ("deepseek_v3", 1, changed(routed_scaling_factor=1.0)),
    "experts chosen without their bias": ("glm4_moe", 1, lost(r".*e_score_correction_bias")),
    "no shared experts": ("deepseek_v2", 1, lost(r".*shared_experts\.down_proj\.weight")),
    # -- numbers beside ------------------------------------------------------------------------------------------------
    "no biases of queries": ("qwen2", 1, lost(r".*q_proj\.bias")),
    "no norm of keys": ("olmo2", 1, lost(r".*k_norm\.weight", 1.0)),
    "layers not scaled": ("gemma4_text", 1, lost(r".*layer_scalar", 1.0)),
    "another epsilon": ("seed_oss", 1, with_config(_other_epsilon)),
    "another activation": ("seed_oss", 1, changed(hidden_act="gelu")),
    "logits not scaled": ("cohere2_moe", 1, changed(logit_scale=1.0)),
    "embeddings not scaled": ("granite", 1, changed(embedding_multiplier=1.0)),
    "what a layer adds not scaled": ("granite", 1, changed(residual_multiplier=1.0)),
    # -- entries of several tokens -------------------------------------------------------------------------------------
    "entries without the tokens before": ("deepseek_v4", 1, entries_made(
        lambda making: {"has_before_N": torch.zeros_like(making.has_before_N)})),
    "entries at the places of their second tokens": ("deepseek_v4", 1, entries_made(
        lambda making: {"first_N": making.first_N + 1})),
    "what makes entries is given back too early": ("deepseek_v4", 1, of_class(
        Sliding, "oldest_needed", lambda self, length: max(0, length - self.window_tokens + (
            4 if self.window_tokens == 8 else 1)))),
    "an index that chooses one entry less": ("deepseek_v4", 1, changed(index_topk=11)),
    "no weights of places": ("deepseek_v4", 1, lost(r".*position_bias")),
    "no sinks beside entries": ("deepseek_v4", 1, lost(r".*sinks")),
    "tokens go to the same experts": ("deepseek_v4", 1, lost(r".*tid2eid")),
    "groups of heads not counted": ("deepseek_v4", 2, of_class(weights, "count_own_heads", lambda module: None)),
    # -- several ranks -------------------------------------------------------------------------------------------------
    "norms of a rank's own heads": ("olmo2", 2, style("norm_over_ranks", Style({"weight": Cut(0)}))),
    "key-value heads on the wrong ranks": ("granite", 4, copied_heads_in_turn),
    "the vocabulary's rest is lost": ("qwen2", 2, of_class(
        TensorParallel, "_vocab_part", lambda self, vocab: vocab // self.size)),
}  # fmt: skip
"""Name -> family, ranks, and what is planted."""

LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 48,
    "long_factor": [8.0 + n for n in range(48)],
}  # fmt: skip

FIELDS: dict[str, dict[str, Any]] = {
    "positions not stretched": {"rope_parameters": YARN, "max_position_embeddings": 32_768},
    "frequencies of short texts": {"rope_parameters": LONG, "max_position_embeddings": 131_072},
    "no window on layers that come late": {
        "num_hidden_layers": 32, "use_sliding_window": True, "max_window_layers": 28, "sliding_window": 4096},
    "experts not scaled": {"routed_scaling_factor": 2.5},
    "experts chosen from all groups": {"n_group": 8, "topk_group": 4},
    "shares of experts not normalised": {"norm_topk_prob": False},
    "embeddings not scaled": {"embedding_multiplier": 12.0},
    "what a layer adds not scaled": {"residual_multiplier": 0.22},
    "key-value heads on the wrong ranks": {"num_attention_heads": 32, "num_key_value_heads": 2},
    "the vocabulary's rest is lost": {"vocab_size": 151_937},
}  # fmt: skip
"""Of configs, where their classes leave them at what makes no difference."""


FOUND = re.compile("a log-probability is|another token is said|shape|heads|rows or columns")
"""What a verdict says that found a defect: an answer that differs, or sizes that do not fit."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    family, ranks, plant = DEFECTS[name]
    CONFIG_MAPPING[family](**LACKING.get(family, {}), **FIELDS.get(name, {})).save_pretrained(tmp_path)
    plant(monkeypatch)
    verdict = prove(tmp_path, (ranks,))
    print(name, "|", verdict.reason)
    assert not verdict.is_right
    assert FOUND.search(str(verdict.reason)), "refused, but for another reason than an answer that differs"


def test_defects_are_sixty_and_more_and_fields_are_of_known_ones():
    assert len(DEFECTS) >= 60
    assert set(FIELDS) <= set(DEFECTS)
