"""Tensor parallelism: each rank holds a slice of the weights, in plain modules with plain local tensors.

The plan says which module is cut how: transformers' own, or ours if one is handed in (`models/families.py`). For every
parameter the plan yields the slice this rank reads from the checkpoint; for some modules it yields what happens around
their forward pass. With one rank nothing is cut and nothing is hooked.

    q, k, v, gate, up     colwise    each rank computes its own heads and columns       y_r = x W_r
    gate and up in one    packed     each of the two halves is cut
    o, down               rowwise    partial sums, added up over the ranks              y = sum_r x_r W_r
    norm over all heads   norm       each rank its own heads, by the mean square of all
    embedding             vocab      rows of other ranks count as zero, then summed
    lm_head               gathered   rank 0 puts the vocabulary slices side by side; it alone samples
"""

import re
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import InvalidSetting
from ..kernels.products import CodesLinear, PackedLinear
from .checkpoint.layer_specs import kv_heads_of, layer_config
from .collectives import Collectives


class Section(NamedTuple):
    """Rows or columns of a parameter that belong together: cut among the ranks, or whole on each."""

    size: int
    is_cut: bool = True
    kv_heads: int = 0  # in it, if it is of such: with more ranks than heads, a head lives on several ranks


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut: along `dim`, each of its sections by itself."""

    dim: int
    sections: tuple[Section, ...] = ()  # empty: `halves` of equal size
    halves: int = 1  # or thirds

    def of(self, shape: tuple[int, ...]) -> tuple[Section, ...]:
        return self.sections or (Section(shape[self.dim] // self.halves),) * self.halves


FIRST_RANK = Cut(0)
"""Rank 0 holds the parameter, on other ranks it is zero: a bias that is summed up."""


class Slice(NamedTuple):
    """Which part of a parameter this rank holds: ranges along `dim`, of which the file may hold fewer."""

    dim: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Style:
    """How a module is cut: each of its parameters, and what happens around its forward pass."""

    cuts: Mapping[str, Cut]
    around: str | None = None  # a method of `TensorParallel`


STYLES: dict[str, Style] = {
    "colwise": Style({"weight": Cut(0), "bias": Cut(0)}),
    "rowwise": Style({"weight": Cut(1), "bias": FIRST_RANK}, "sum_outputs"),
    "packed": Style({"weight": Cut(0, halves=2), "bias": Cut(0, halves=2)}),
    "thirds": Style({"weight": Cut(0, halves=3), "bias": Cut(0, halves=3)}),
    "vocab": Style({"weight": Cut(0)}, "embed_own_rows"),
    "colwise_gather_output": Style({"weight": Cut(0), "bias": Cut(0), "logit_scale": Cut(0)}, "gather_outputs"),
    "sinks": Style({"sinks": Cut(0), "gate_bias": Cut(0)}),
    "head_scales": Style({"scale": Cut(0), "bias": Cut(0)}),
    "key_scales": Style({"temp": Cut(0)}),
    # transformers' Conv1D, which holds weights [inputs,outputs]: GPT-2.
    "conv_colwise": Style({"weight": Cut(1), "bias": Cut(0)}),
    "conv_thirds": Style({"weight": Cut(1, halves=3), "bias": Cut(0, halves=3)}),
    "conv_rowwise": Style({"weight": Cut(0), "bias": FIRST_RANK}, "sum_outputs"),
    "channel_scales": Style(dict.fromkeys(("sqk", "s_gate", "suv_gate", "suv_up"), Cut(0))),
    "lengths_over_ranks": Style({}, "take_lengths_over_ranks"),
    "norm_over_ranks": Style({"weight": Cut(0)}, "normalize_over_ranks"),
    "expert_columns": Style(
        {"gate_up_proj": Cut(2), "gate_up_proj_bias": Cut(1), "down_proj": Cut(1), "down_proj_bias": FIRST_RANK},
        "sum_outputs",
    ),
    "moe_tp_experts": Style({}, "sum_outputs"),
    "expert_parts": Style({}),  # whose outputs are summed up elsewhere
    "summed_inputs": Style({}, "sum_inputs"),
}

EXPERT_CUTS: dict[str, Cut] = {
    "colwise": Cut(-2),
    "rowwise": Cut(-1),
    "packed_colwise": Cut(-2, halves=2),
    "packed_rowwise": Cut(-1, halves=2),
}
"""Style of a parameter [experts, .., ..] -> its cut."""

KV_HEADS = {"k_proj", "v_proj", "k_norm", "qk_norm"}
"""Modules with one part per key-value head. With more ranks than heads, a head lives on several ranks."""


class TensorParallel:
    """This process's place among the ranks."""

    def __init__(self, rank: int = 0, size: int = 1, collectives: Collectives | None = None):
        """collectives: what the ranks do together; not needed by one rank alone."""
        self.rank = rank
        self.size = size
        self._collectives = collectives

    @property
    def collectives(self) -> Collectives:
        assert self._collectives is not None, "one rank has no others to talk to"
        return self._collectives

    def share_from_first(self, tensor: Tensor) -> None:
        """Fill `tensor` with rank 0's values, on all ranks."""
        if self.size > 1:
            self.collectives.share_from_first(tensor)

    def add_up(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over the ranks."""
        if self.size > 1:
            self.collectives.all_reduce(tensor)

    # -- which part of a parameter -----------------------------------------------------------------------------------

    def plan(self, model: nn.Module, given: Mapping[str, str], vocabularies: Set[str]) -> dict[str, Style]:
        """Module path -> style, for this model. Empty with one rank.

        given: module path -> name of a style; `*` in a path stands for a number
        vocabularies: names of modules with a row for each token, beside the input's own embedding
        """
        if self.size == 1:
            return {}
        patterns = [(re.compile(re.escape(path).replace(r"\*", r"\d+")), style) for path, style in given.items()]
        outputs = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        styles = {}
        for path, module in model.named_modules():
            # Embeddings are cut by rows, also where the plan says otherwise; an output that shares them is, too.
            style = "vocab" if _is_vocabulary(model, path, module, vocabularies) else _match(patterns, path)
            if path == "lm_head" or module is outputs:
                style = "colwise_gather_output" if isinstance(module, nn.Linear) else None  # or what is before it
            if style is None:
                continue
            styles[path] = STYLES[style]
            # Experts are parameters of one module, each cut in a way of its own.
            if style in ("moe_tp_experts", "expert_parts"):
                names = [name for name, _ in module.named_parameters(recurse=False)]
                hows = {name: how for name in names if (how := _match(patterns, f"{path}.{name}"))}
                styles[path] = replace(styles[path], cuts={name: EXPERT_CUTS[how] for name, how in hows.items()})
        return styles

    def own_parts(self, tensor: Tensor, sections: Sequence[Section], dim: int = -1) -> list[Tensor]:
        """Of each section of a tensor, what this rank has."""
        ranges = self._ranges("tensor", sections)
        return [tensor.narrow(dim, start, stop - start) for start, stop in ranges]

    def slice_of(self, path: str, name: str, shape: tuple[int, ...], style: Style, config: Any) -> Slice | None:
        """This rank's part of parameter `name` of the module at `path`; None: the whole of it."""
        cut = style.cuts.get(name)
        if cut is None:
            return None
        if cut is FIRST_RANK:
            return Slice(0, ((0, shape[0] if self.rank == 0 else 0),))
        dim = cut.dim % len(shape)
        if style.around in ("embed_own_rows", "gather_outputs"):
            part = self._vocab_part(shape[dim])
            return Slice(dim, ((self.rank * part, self.rank * part + part),))
        is_of_kv_heads = path.rsplit(".", 1)[-1] in KV_HEADS and not cut.sections  # a mixer says its sections
        parts = min(_kv_heads(config, path), self.size) if is_of_kv_heads else self.size
        return Slice(dim, self._ranges(f"{path}.{name}", cut.of(shape), parts))

    def _ranges(self, what: str, sections: Sequence[Section], parts: int | None = None) -> tuple[tuple[int, int], ...]:
        """parts: into how many each section is cut; when fewer than ranks, several ranks have the same one."""
        usual = parts or self.size
        ranges, start = [], 0
        for size, is_cut, kv_heads in sections:
            parts = min(kv_heads, self.size) if kv_heads else usual
            index = self.rank * parts // self.size
            if is_cut and size % parts:
                raise InvalidSetting(
                    f"tensor_parallel_size {self.size} does not divide {what}, which has {size} rows or columns",
                    field="tensor_parallel_size",
                    asked=self.size,
                    length=size,
                )
            part = size // parts if is_cut else size
            first = start + (index * part if is_cut else 0)
            ranges.append((first, first + part))
            start += size
        return tuple(ranges)

    def _vocab_part(self, vocab: int) -> int:
        """Rows of the vocabulary on each rank; the last rank's are filled up with zeros."""
        return -(-vocab // self.size)

    # -- around the forward pass of a module -------------------------------------------------------------------------

    def install(self, module: nn.Module, style: Style, whole_shape: tuple[int, ...]) -> None:
        """Hook the module's forward. whole_shape: of its weight, before it was cut."""
        if style.around is not None:
            getattr(self, style.around)(module, whole_shape)

    def sum_outputs(self, module: nn.Module, whole_shape: tuple[int, ...]) -> None:
        def after(_module, _inputs, output: Tensor) -> Tensor:
            self.collectives.all_reduce(output)
            return output

        module.register_forward_hook(after)

    def sum_inputs(self, module: nn.Module, whole_shape: tuple[int, ...]) -> None:
        def before(_module, inputs: tuple[Tensor]) -> None:
            self.collectives.all_reduce(inputs[0])

        module.register_forward_pre_hook(before)

    def normalize_over_ranks(self, module: nn.Module, whole_shape: tuple[int, ...]) -> None:
        """An RMS norm whose input is cut. Heads that live on several ranks all do: the mean stands."""
        norm: Any = module

        def forward(hidden: Tensor) -> Tensor:
            wide = hidden.float()
            squares = wide.pow(2).sum(-1, keepdim=True)
            self.collectives.all_reduce(squares)
            mean = squares / (wide.shape[-1] * self.size)
            return (norm.weight * (wide * torch.rsqrt(mean + norm.variance_epsilon))).to(hidden.dtype)

        module.forward = forward

    def take_lengths_over_ranks(self, module: nn.Module, whole_shape: tuple[int, ...]) -> None:
        """A norm to length 1, without weights, whose input is cut."""
        norm: Any = module

        def forward(hidden: Tensor) -> Tensor:
            wide = hidden.float()
            squares = wide.pow(2).sum(-1, keepdim=True)
            self.collectives.all_reduce(squares)
            return (wide * torch.rsqrt(squares + norm.eps)).to(hidden.dtype)

        module.forward = forward

    def embed_own_rows(self, module: nn.Module, whole_shape: tuple[int, ...]) -> None:
        embedding: Any = module
        embedding.padding_idx = None  # which concerns gradients alone, and may be a row of another rank
        part = self._vocab_part(whole_shape[0])
        start = self.rank * part

        is_foreign = torch.empty(0)

        def before(_module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal is_foreign
            tokens = inputs[0] - start
            is_foreign = (tokens < 0) | (tokens >= part)
            return ((tokens.clamp(0, part - 1)), *inputs[1:])

        def after(_module, _inputs, output: Tensor) -> Tensor:
            self.collectives.all_reduce(output.masked_fill_(is_foreign.unsqueeze(-1), 0))
            return output

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def gather_outputs(self, module: nn.Module, whole_shape: tuple[int, ...]) -> None:
        """On rank 0 the output has its whole width; on other ranks it stays a slice, which is not read."""

        def after(_module, _inputs, output: Tensor) -> Tensor:
            if output.numel() == 0:
                return output
            parts = self.collectives.gather_to_first(output)
            return output if parts is None else torch.cat(parts, dim=-1)[..., : whole_shape[0]]

        module.register_forward_hook(after)


def count_own_heads(module: nn.Module) -> None:
    """Some attention modules shape heads by counts of their own, not by what is there: let these be this rank's."""
    for attention in module.modules():
        here: Any = attention
        for count, projection in (("num_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
            if hasattr(here, count) and hasattr(here, projection) and hasattr(here, "head_dim"):
                linear = getattr(here, projection)
                setattr(here, count, _outputs(linear) // here.head_dim)
        if _is_conv(here):
            here.nf = here.weight.shape[1]
        if _is_conv(getattr(here, "c_attn", None)):
            here.split_size = here.c_attn.weight.shape[1] // 3
        if is_multi_query(here):
            here.embed_dim = _outputs(here.c_attn) - 2 * here.kv_dim
            here.num_heads = here.embed_dim // here.head_dim
        if is_fused(here):
            _count_fused(here)
        if is_fused_of_groups(here):
            _count_of_groups(here)
        if is_stacked(getattr(here, "mlp", None)):
            here.ffn_hidden_size = here.mlp.ffn_hidden_size = len(here.mlp.w1) // here.mlp.moe_num_experts
        if hasattr(here, "query_key_value") and hasattr(here, "num_heads") and hasattr(here, "head_dim"):
            here.num_heads = _outputs(here.query_key_value) // here.head_dim // 3
        if isinstance(attention, nn.Linear) and hasattr(here, "n_groups"):  # of outputs, each with inputs of its own
            here.n_groups = here.n_groups * len(here.weight) // here.out_features


def is_fused(module: Any) -> bool:
    """Does one linear of an attention module give out queries, keys and values side by side, in the way of Phi-3?"""
    has_all = all(hasattr(module, name) for name in ("qkv_proj", "o_proj", "head_dim", "num_key_value_heads", "config"))
    return has_all and isinstance(module.qkv_proj, nn.Linear | PackedLinear)


def _is_conv(module: Any) -> bool:
    return isinstance(module, Conv1D)


def is_multi_query(module: Any) -> bool:
    """Does one linear give out all queries and, behind them, the one key and value of GPT-BigCode?"""
    linear = getattr(module, "c_attn", None)
    return bool(getattr(module, "multi_query", False)) and isinstance(linear, nn.Linear | PackedLinear)


def is_fused_of_groups(module: Any) -> bool:
    """Does one linear give out queries, keys and values side by side, in the way of DBRX?"""
    return hasattr(module, "Wqkv") and hasattr(module, "num_key_value_heads")


def is_stacked(module: Any) -> bool:
    """Are the rows of all its experts one after the other, in the way of DBRX?"""
    return all(hasattr(module, name) for name in ("w1", "v1", "w2", "ffn_hidden_size", "moe_num_experts"))


def _count_of_groups(attention: Any) -> None:
    heads, kv_heads = _own_heads(attention, attention.Wqkv, attention.out_proj)
    attention.num_key_value_heads, attention.num_key_value_groups = kv_heads, heads // kv_heads
    attention.hidden_size = heads * attention.head_dim


def _count_fused(attention: Any) -> None:
    """It asks the config for the count of its query heads, so it gets one of its own."""
    heads, kv_heads = _own_heads(attention, attention.qkv_proj, attention.o_proj)
    attention.num_key_value_heads, attention.num_key_value_groups = kv_heads, heads // kv_heads
    attention.config = copy(attention.config)
    attention.config.num_attention_heads = heads


def _own_heads(attention: Any, fused: Any, output: Any) -> tuple[int, int]:
    """Of queries, which go into the output projection, and of keys. Ranks that share a head of keys have fewer queries
    for each of theirs than the config says."""
    heads = (output.inputs if isinstance(output, CodesLinear) else output.weight.shape[1]) // attention.head_dim
    return heads, (_outputs(fused) // attention.head_dim - heads) // 2


def _outputs(linear: Any) -> int:
    linear = getattr(linear, "linear", linear)  # Moshi's are wrapped
    return linear.outputs if isinstance(linear, PackedLinear) else linear.weight.shape[0]


def _kv_heads(config: Any, path: str) -> int:
    """Of the layer that a module belongs to."""
    layer = re.search(r"\.layers\.(\d+)\.", f".{path}")
    return kv_heads_of(layer_config(config, int(layer[1])) if layer else config)


def _match(patterns: list[tuple[re.Pattern, str]], path: str) -> str | None:
    return next((style for pattern, style in patterns if pattern.fullmatch(path)), None)


def _is_vocabulary(model: Any, path: str, module: nn.Module, vocabularies: Set[str]) -> bool:
    return module is model.get_input_embeddings() or path.rsplit(".", 1)[-1] in vocabularies
