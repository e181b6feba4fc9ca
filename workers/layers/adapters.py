"""Which modules of transformers have a forward pass of ours, and how their weights are cut: the one place that says so.

Attention that calls a function by name has no entry. transformers finds ours through `PagedAttention.bind`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ..tensor_parallel import STYLES, Cut, Style, TensorParallel
from .attention import PagedAttention
from .compressed import CompressedAttention
from .convolution import AddedConv, ScaledAddedConv, ShortConv, WeighedConv
from .convolved import ConvolvedHeads
from .cross import CrossAttention
from .delta import GatedDeltaNet, KeyedDeltaNet, PackedGatedDeltaNet, SeparateGatedDeltaNet, SmoothGatedDeltaNet
from .indexed import (
    BlockChoosingAttention,
    FusedGateLatentAttention,
    GatedSinkLatentAttention,
    HeadGatedLatentAttention,
    IndexedLatentAttention,
    PooledChoosingAttention,
    PoolingLatentAttention,
    ScaledLatentAttention,
    SharingLatentAttention,
)
from .latent import LatentAttention
from .lightning import Lightning
from .lru import GatedLinearRecurrence
from .mamba import HeadedMamba1, Mamba1, Mamba2
from .ngrams import NGramFeatures
from .own_ways import OWN_WAYS, FirstGptAttention, OwnAttention, is_first_gpt, patch_mpt
from .patches import (
    mix_blocks,
    patch_head_norms,
    patch_identity_experts,
    patch_indexers,
    patch_layer_index,
    patch_logits,
    patch_place,
    patch_query_scale,
    patch_sparsity,
)
from .states import Mixer, PagedStates


class Paged(NamedTuple):
    """What the layers of one model read and write their pages through."""

    attention: PagedAttention
    states: PagedStates
    cross: CrossAttention | None  # None: the model takes no images
    parallel: TensorParallel


MIXERS: dict[str, type[Mixer]] = {
    "BailingHybridDeltaAttention": KeyedDeltaNet,
    "BambaMixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "FalconMambaMixer": Mamba1,
    "Glm5NextTextLinearAttention": KeyedDeltaNet,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "Inkling2DynamicShortConvolution": WeighedConv,
    "Inkling2LoopDynamicShortConvolution": WeighedConv,
    "Inkling2LoopShortConvolution": ScaledAddedConv,
    "Inkling2ShortConvolution": ScaledAddedConv,
    "InklingShortConvolution": AddedConv,
    "JambaMambaMixer": Mamba1,
    "KimiLinearDeltaAttention": KeyedDeltaNet,
    "LaraMiniGatedDeltaNet": SmoothGatedDeltaNet,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm2ShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
    "Mamba2Mixer": Mamba2,
    "MambaMixer": Mamba1,
    "MiniMaxLightningAttention": Lightning,
    "NemotronHMamba2Mixer": Mamba2,
    "OlmoHybridGatedDeltaNet": SeparateGatedDeltaNet,
    "Qwen3NextGatedDeltaNet": PackedGatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "Qwen4ExpTextGatedDeltaNet": GatedDeltaNet,
    "Qwen4ExpTextPLELayer": NGramFeatures,
    "RecurrentGemmaRecurrentBlock": GatedLinearRecurrence,
    "Zamba2MambaMixer": Mamba2,
    "ZambaMambaMixer": HeadedMamba1,
    "ZayaCCAProjection": ConvolvedHeads,
}
"""Class of a state mixer -> ours."""


def _mixer(kind: type[Mixer]) -> "Adapter":
    return lambda module, paged: kind(module, paged.states, paged.parallel)


LATENT: dict[str, type[LatentAttention]] = {
    "AXK1Attention": LatentAttention,
    "AXK2Attention": FusedGateLatentAttention,
    "BailingHybridAttention": LatentAttention,
    "DeepseekV2Attention": LatentAttention,
    "DeepseekV3Attention": LatentAttention,
    "DeepseekV32Attention": IndexedLatentAttention,
    "Dots3NoteTextAttention": HeadGatedLatentAttention,
    "Glm4MoeLiteAttention": LatentAttention,
    "Glm5NextTextAttention": PoolingLatentAttention,
    "GlmMoeDsaAttention": SharingLatentAttention,
    "HYV4Attention": GatedSinkLatentAttention,
    "HYV4VLAttention": GatedSinkLatentAttention,
    "KimiLinearAttention": LatentAttention,
    "LongcatFlashMLA": LatentAttention,
    "MiniCPM3Attention": LatentAttention,
    "Mistral4Attention": LatentAttention,
    "MistralLarge4TextAttention": ScaledLatentAttention,
    "YoutuAttention": LatentAttention,
}
"""Class of attention over one latent for all heads, in the words of DeepSeek's -> ours."""


def _latent(kind: type[LatentAttention]) -> "Adapter":
    return lambda module, paged: kind(module, paged.attention)


def _blocks(module: Any, paged: Paged) -> Callable[..., Any] | None:
    if module.indexer is None:  # a layer that attends to all, by the name of our function
        return None
    return BlockChoosingAttention(module, paged.attention, paged.parallel)


def _cross(module: Any, paged: Paged) -> Callable[..., Any]:
    assert paged.cross is not None, "a model with cross-attention has an encoder"
    return paged.cross.add_layer(module)


def _own_way(kind: type[OwnAttention]) -> "Adapter":
    return lambda module, paged: kind(module, paged.attention, paged.parallel)


def _first_gpt(module: Any, paged: Paged) -> Callable[..., Any] | None:
    return FirstGptAttention(module, paged.attention, paged.parallel) if is_first_gpt(module) else None


Adapter = Callable[[Any, Paged], Callable[..., Any] | None]

ADAPTERS: dict[str, Adapter] = {
    "Attention": _first_gpt,
    **{name: _mixer(kind) for name, kind in MIXERS.items()},
    **{name: _latent(kind) for name, kind in LATENT.items()},
    "DeepseekV4Attention": lambda module, paged: CompressedAttention(module, paged.attention),
    **{
        f"Inkling2{name}AttentionResidual": lambda module, paged: partial(mix_blocks, module)
        for name in ("Block", "LoopBlock", "LoopMessage")
    },
    "MiniMaxM3VLAttention": _blocks,
    **{name: _own_way(kind) for name, kind in OWN_WAYS.items()},
    "MllamaCrossAttentionDecoderLayer": _cross,
    "Qwen4ExpTextAttention": lambda module, paged: PooledChoosingAttention(module, paged.attention),
}
"""Class of a module -> what makes the forward pass that takes the place of its own; None: its own stays."""


def bind(model: nn.Module, paged: Paged) -> None:
    """Let the layers of `model` read and write our pages."""
    patch_logits(model)
    patch_indexers(model)
    patch_mpt(model)
    for path, module in model.named_modules():
        if type(module).__name__ in MIXERS or is_first_gpt(module):
            patch_place(module, path)
        if hasattr(module, "layer_idx"):
            patch_layer_index(module)
            paged.attention.bind(module, patch_query_scale(module))
        patch_sparsity(module, paged.parallel)
        patch_identity_experts(module, paged.parallel)
        patch_head_norms(module, paged.parallel)
        adapter = ADAPTERS.get(type(module).__name__)
        forward = adapter(module, paged) if adapter is not None else None
        if forward is not None:
            module.forward = forward


def cut_mixers(model: nn.Module, ranks: int) -> dict[str, Style]:
    """Module path -> style, of all state mixers of a model and what they consist of."""
    styles: dict[str, Style] = {}
    for path, module in model.named_modules():
        mixer = MIXERS.get(type(module).__name__)
        if mixer is None:
            continue
        own: dict[str, dict[str, Cut]] = {path: {}}  # parameters, by the module that has them
        for full_name, sections in mixer.sections(module, ranks).items():
            inner, _, name = full_name.rpartition(".")
            part = getattr(module.get_submodule(inner), name)
            if isinstance(part, nn.Parameter):
                dim = part.shape.index(sum(section.size for section in sections))
                own.setdefault(f"{path}.{inner}" if inner else path, {})[name] = Cut(dim, tuple(sections))
            else:
                cut = Cut(0, tuple(sections))
                styles[f"{path}.{full_name}"] = Style({"weight": cut, "bias": cut})
        styles |= {owner: Style(cuts) for owner, cuts in own.items()}
        for name in ("out_proj", "o_proj", "x_proj", "linear_out"):
            if hasattr(module, name):
                styles[f"{path}.{name}"] = STYLES["rowwise"]
        for name in mixer.norms_over_ranks:
            styles[f"{path}.{name}"] = STYLES["norm_over_ranks"]
    return styles
