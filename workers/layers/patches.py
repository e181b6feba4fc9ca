"""Modules of transformers that are changed in place, where they are wrong or were written for unpacked batches."""

from collections.abc import Callable
from inspect import signature
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ..tensor_parallel import TensorParallel

LAYER_FROM_CALL = {"Zamba2Attention", "ZambaAttention"}
"""Classes of modules that are told with each call which layer they are: one block of weights is used by several."""

TIMES_AROUND = {
    "DoryAttention", "HrmTextAttention", "Inkling2LoopDynamicShortConvolution", "Inkling2LoopFullAttention",
    "Inkling2LoopShortConvolution", "Inkling2LoopSlidingAttention",
}  # fmt: skip
"""Classes of modules that are gone through several times, each time as another layer."""

TURN_EARLIER = {"Qwen4ExpTextQSAIndexer"}
"""Classes of indexers that turn keys when they choose."""

NORM_FOR_EACH_HEAD = {"StableLmLayerNormPerHead"}
"""Classes of modules with a list of norms."""

SPARSE = {"Gemma3nTextMLP"}
"""Classes of MLPs that drop most of their activations."""


def patch_layer_index(module: Any) -> None:
    """Let the `layer_idx` of such a module be the one it was last called with."""
    own = getattr(module, "layer_idx", None)
    if type(module).__name__ in TIMES_AROUND:

        def count(called: Any, _args: Any, kwargs: Any) -> None:
            called.layer_idx = own + kwargs.get("cycle_offset", kwargs.get("cache_offset", 0))

        module.register_forward_pre_hook(count, with_kwargs=True)
    if type(module).__name__ in LAYER_FROM_CALL:

        def note(called: Any, _args: Any, kwargs: Any) -> None:
            called.layer_idx = kwargs["layer_idx"]

        module.register_forward_pre_hook(note, with_kwargs=True)


def patch_indexers(model: Any) -> None:
    """Let indexers that turn keys of earlier tokens (Qwen4-Exp) reach the model's rotary embedding: what layers are
    given is for the tokens of a step."""
    turning = [module for module in model.modules() if type(module).__name__ in TURN_EARLIER]
    if turning:
        rotary = next(module for path, module in model.named_modules() if path.rpartition(".")[2] == "rotary_emb")
        for indexer in turning:
            object.__setattr__(indexer, "rotary_emb", rotary)  # no part of it


def patch_place(module: Any, path: str) -> None:
    """Let a state mixer know which layer it is of, where its class does not tell it: by its path in the model."""
    if not hasattr(module, "layer_idx"):
        module.layer_idx = next(int(part) for part in path.split(".") if part.isdecimal())


def patch_query_scale(module: Any) -> Callable[[Tensor], Tensor] | None:
    """What the queries of an attention module are multiplied by, given their positions; None: nothing.

    Llama 4 scales the queries of layers without rope by their position, which its module takes to be the place in the
    batch. Tokens here are packed, so the module is told to leave that to us.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return None
    module.attn_temperature_tuning = False

    def scale(positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    return scale


def patch_sparsity(module: Any, parallel: TensorParallel) -> None:
    """Let the sparse MLPs of Gemma 3n take their cutoff from what is on the device, of all ranks' columns.

    They keep only the largest activations of a token, those above a cutoff by mean and deviation (arXiv 2506.06644).
    transformers asks torch for the quantile in each pass: that copies a number to the device, so a GPU is waited for in
    each layer, and the step cannot be recorded. It knows nothing of columns on other ranks either.
    """
    if type(module).__name__ not in SPARSE or module.activation_sparsity == 0:
        return
    quantile = NormalDist().inv_cdf(module.activation_sparsity)

    def cut_off(gate: Tensor) -> Tensor:
        columns = gate.shape[-1] * parallel.size
        mean = gate.float().sum(-1, keepdim=True)
        parallel.add_up(mean)
        mean /= columns
        variance = (gate.float() - mean).pow(2).sum(-1, keepdim=True)
        parallel.add_up(variance)
        return torch.relu(gate - (mean + (variance / columns).sqrt() * quantile).to(gate.dtype))

    module._gaussian_topk = cut_off


def patch_logits(model: Any) -> None:
    """Let a model compute logits for the tokens that need them where its forward pass knows no `logits_to_keep`. Then
    it computes those of all tokens."""
    whole = model.forward
    if "logits_to_keep" in signature(whole).parameters:
        return

    def forward(*args: Any, logits_to_keep: int | Tensor = 0, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        if isinstance(logits_to_keep, Tensor):
            output.logits = output.logits[:, logits_to_keep]
        return output

    model.forward = forward


def patch_identity_experts(module: Any, parallel: TensorParallel) -> None:
    """Let experts that give out what they are given (LongCat-Flash) do so on one rank: the ranks' outputs are added
    up."""
    if hasattr(module, "identity_expert") and parallel.rank > 0:
        module.identity_expert = None  # a module's attribute takes no plain function
        object.__setattr__(module, "identity_expert", torch.zeros_like)


def patch_head_norms(module: Any, parallel: TensorParallel) -> None:
    """Let a rank have the norms of its own heads, where each head has one (StableLM 2 12B)."""
    if type(module).__name__ not in NORM_FOR_EACH_HEAD or parallel.size == 1:
        return
    parts = min(len(module.norms), parallel.size)  # with more ranks than heads, a head lives on several
    each = len(module.norms) // parts
    first = parallel.rank * parts // parallel.size * each
    module.norms = module.norms[first : first + each]


def mix_blocks(
    module: Any, block_states: Tensor, partial_block_states: Tensor, loop_layer_idx: int | None = None
) -> Tensor | tuple[Tensor, ...]:
    """What a layer of Inkling 2 goes on with: a mixture of what its token had after each run of layers before, by each
    of the module's queries. It is no attention to other tokens, though transformers computes it as such.

    loop_layer_idx: of the layer whose queries these are, where the module has those of several

    Shapes  blocks [1,T,B,D]  partial [1,T,D]    returns [1,T,D] float32 of each query; or all in one, [1,T,Q,D]"""
    query = module.query if loop_layer_idx is None else module.query[loop_layer_idx]
    all_1TBD = module.norm(torch.cat((block_states, partial_block_states.unsqueeze(-2)), dim=-2).float())
    query_QD = query.float().view(-1, all_1TBD.shape[-1])
    shares_1TQB = (query_QD @ all_1TBD.mT * query_QD.shape[-1] ** -0.5).softmax(dim=-1)
    mixed_1TQD = shares_1TQB @ all_1TBD
    return mixed_1TQD.unbind(-2) if loop_layer_idx is None else mixed_1TQD


def patch_rotary_dim(model: Any, config: Any) -> None:
    """Let MiniMax rotate as many numbers of a head as its config says. Called when weights are there.

    MiniMax-Text-01 and M1 rotate the first `rotary_dim` of 128 numbers of a head (their own code; SGLang and vLLM
    follow it); transformers rotates all of them and does not read config.json for it.
    """
    rotary_dim = getattr(config, "rotary_dim", None)
    if config.model_type != "minimax" or rotary_dim is None or rotary_dim >= config.head_dim:
        return
    from transformers.models.minimax import modeling_minimax

    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    embedding = model.model.rotary_emb
    embedding.inv_freq = (1.0 / config.rope_parameters["rope_theta"] ** exponents).to(embedding.inv_freq.device)
    # For the whole process, which is right for any other model: where all numbers are rotated both are the same.
    modeling_minimax.apply_rotary_pos_emb = rotate_first


def rotate_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary positions for as many numbers of each head as `cos` has; the others stay. Halves are paired."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        rotated, rest = x[..., :width], x[..., width:]
        low, high = rotated.chunk(2, dim=-1)
        return torch.cat((rotated * cos + torch.cat((-high, low), dim=-1) * sin, rest), dim=-1)

    return rotate(q), rotate(k)
