"""How modules are cut among ranks: by what they consist of. `families.py` has what is not seen in that.

transformers' plans are not read: many are for experts alone, and leave attention whole. Here each rank keeps its own
heads in its pages, so attention must be cut. Of families that the tests do not know, what comes of it is proven before
it is served (`deploy/proof/`).
"""

from typing import Any

from torch import nn

from ..tensor_parallel import Cut, Section, Style, is_fused, is_fused_of_groups, is_multi_query, is_stacked

ATTENTION_OUTPUTS = "o_proj", "out_proj", "dense", "c_proj"
MLPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("fc1",), "fc2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("c_fc",), "c_proj"),
)
"""Linears of an MLP whose outputs are cut, and the one whose inputs are then."""

TOWER = "vision_model"

HEADS_OF_THREE = {"query_key_value", "dense"}
"""Attention of which one linear gives out a query, a key and a value of each head, one head after the other."""

GATES = {"g_proj", "gate_proj"}
"""Of what attention gives out: a number for each head, or for each of its columns."""

MIXTURES = {"r_proj"}
"""By which each head mixes profiles."""

OF_OTHERS = {"q_proj"}, {"q_proj", "k_proj"}
"""What gives queries, keys and values where a layer reads another's, and where keys are values too."""

LATENT = {"kv_b_proj", "o_proj"}
"""Attention over one latent that is whole on every rank."""

FOR_EACH_HEAD = "sinks", "gate_bias"
"""Parameters with a number for each head."""

NORMS_OVER_HEADS = {"q_norm": "q_proj", "k_norm": "k_proj"}


def plan_by_structure(model: nn.Module, knows_attention: bool = False) -> dict[str, str]:
    """Module path -> style, as in `families.py`. Empty if no attention is seen that can be cut.

    knows_attention: whether something else says how attention is cut"""
    plan: dict[str, str] = {}
    has_attention = knows_attention
    for path, module in model.named_modules():
        if TOWER in path.split("."):  # which is whole on every rank
            continue
        attention = _attention(path, module)
        has_attention |= bool(attention)
        plan |= attention or _mlp(path, module) or _experts(path, module)
    return plan if has_attention else {}


def cut_fused(model: nn.Module) -> dict[str, Style]:
    """Module path -> style, of linears that give out queries, keys and values side by side."""
    styles: dict[str, Style] = {}
    for path, module in model.named_modules():
        here: Any = module
        if is_fused(here):
            heads, each = here.num_key_value_heads, here.head_dim
            keys = Section(heads * each, kv_heads=heads)
            cut = Cut(0, (Section(keys.size * here.num_key_value_groups), keys, keys))
            styles[f"{path}.qkv_proj"] = Style({"weight": cut, "bias": cut})
        elif is_multi_query(here):
            cut = Cut(0, (Section(here.embed_dim), Section(2 * here.kv_dim, is_cut=False)))
            styles[f"{path}.c_attn"] = Style({"weight": cut, "bias": cut})
        elif is_fused_of_groups(here):
            keys = Section(here.num_key_value_heads * here.head_dim, kv_heads=here.num_key_value_heads)
            styles[f"{path}.Wqkv"] = Style({"weight": Cut(0, (Section(here.hidden_size), keys, keys))})
        elif is_stacked(here):  # each expert is a run of rows
            runs = Cut(0, (Section(here.ffn_hidden_size),) * here.moe_num_experts)
            styles[path] = Style(dict.fromkeys(("w1", "v1", "w2"), runs))
    return styles


def _linears(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if isinstance(child, nn.Linear)}


def _attention(path: str, module: Any) -> dict[str, str]:
    linears = _linears(module)
    if is_fused(module):
        return {f"{path}.o_proj": "rowwise"}  # the others: see `cut_fused`
    if linears >= LATENT:
        inward = [name for name in ("q_proj", "q_b_proj", "q_gate_proj", "kv_b_proj") if name in linears]
        inward += sorted(GATES & linears)
        plan = {f"{path}.{name}": "colwise" for name in inward} | {f"{path}.o_proj": "rowwise"}
        if hasattr(module, "softmax_scaling"):
            plan[f"{path}.softmax_scaling"] = "head_scales"
        return plan | _of_each_head(path, module)
    if is_fused_of_groups(module):
        return {f"{path}.out_proj": "rowwise"}  # the other: see `cut_fused`
    if linears >= {"Wqkv", "out_proj"} and not hasattr(module, "num_key_value_heads"):  # as many keys as queries
        return {f"{path}.Wqkv": "thirds", f"{path}.out_proj": "rowwise"}
    has_one_key = getattr(module, "multi_query", False) and not getattr(module, "new_decoder_architecture", False)
    if linears >= HEADS_OF_THREE and not has_one_key:
        return {f"{path}.query_key_value": "colwise", f"{path}.dense": "rowwise"}
    if hasattr(module, "lambda_q1"):  # pairs of heads, of both halves
        return {f"{path}.{name}": "packed" for name in ("q_proj", "k_proj", "v_proj")} | {f"{path}.o_proj": "rowwise"}
    output = next((name for name in ATTENTION_OUTPUTS if name in linears), None)
    is_whole = {"q_proj", "k_proj", "v_proj"} <= linears
    if output is None or not (is_whole or linears - GATES - {output} in OF_OTHERS):
        return {}
    inward = [name for name in ("q_proj", "k_proj", "v_proj") if name in linears]
    inward += sorted((GATES | MIXTURES) & linears)
    plan = {f"{path}.{name}": "colwise" for name in inward} | {f"{path}.{output}": "rowwise"}
    for norm, projection in NORMS_OVER_HEADS.items():
        weight = getattr(getattr(module, norm, None), "weight", None)
        if weight is None or weight.numel() == getattr(module, "head_dim", 0):  # each head's is the same
            continue
        if weight.shape == (getattr(module, projection).out_features,):
            plan[f"{path}.{norm}"] = "norm_over_ranks"
        elif weight.dim() == 2:  # each head its own: [heads,head size]
            plan[f"{path}.{norm}"] = "colwise"
    plan |= _of_each_head(path, module)
    if hasattr(module, "attn_sub_norm"):
        plan[f"{path}.attn_sub_norm"] = "norm_over_ranks"
    return plan


def _of_each_head(path: str, module: Any) -> dict[str, str]:
    has_any = any(isinstance(getattr(module, name, None), nn.Parameter) for name in FOR_EACH_HEAD)
    return {path: "sinks"} if has_any else {}


def _mlp(path: str, module: nn.Module) -> dict[str, str]:
    if path.rpartition(".")[2].startswith("router"):  # it is small, and whole on every rank
        return {}
    linears = _linears(module)
    for inward, outward in MLPS:
        if {*inward, outward} <= linears:
            plan = {f"{path}.{name}": "colwise" for name in inward} | {f"{path}.{outward}": "rowwise"}
            return plan | ({f"{path}.ffn_sub_norm": "norm_over_ranks"} if hasattr(module, "ffn_sub_norm") else {})
    if {"gate_up_proj", "down_proj"} <= linears:
        return {f"{path}.gate_up_proj": "packed", f"{path}.down_proj": "rowwise"}
    return {}


def _experts(path: str, module: Any) -> dict[str, str]:
    """Of parameters [experts,outputs,inputs]; or of rows of all experts, one expert after the other."""
    if is_stacked(getattr(module, "mlp", None)):
        return {path: "moe_tp_experts"}
    parameters = dict(module.named_parameters(recurse=False))
    down = parameters.get("down_proj")
    if down is None or down.dim() != 3 or getattr(module, "is_transposed", False):
        return {}
    separate = {name: "colwise" for name in ("gate_proj", "up_proj") if name in parameters}
    up = {"gate_up_proj": "packed_colwise"} if "gate_up_proj" in parameters else separate
    whole = {path: "moe_tp_experts"}
    if getattr(module, "has_post_expert_norm", False):  # which needs all of each expert's output
        whole = {path: "expert_parts", f"{path}.post_expert_norm": "summed_inputs"}
    return whole | {f"{path}.{name}": how for name, how in {**up, "down_proj": "rowwise"}.items()}
