"""Experts by products of our own: each token's row meets the weights of its experts, all in one call.

transformers lets others compute the experts of a layer, by a function that is named in the config. Ours computes what
`grouped_mm` does there, and a token's result depends on that token alone. On a GPU long prompts go torch's way, unless
the same bits are asked for: there its grouped product is the faster one.

What chooses the experts, the router, is a product as well, ours on a CPU and for the same bits. Its weight is a
parameter that a function of torch multiplies with, so it is a tensor that knows how.
"""

import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, grouped_mm_experts_forward

from ...kernels.products import (
    ExpandedCodes,
    GroupedProducts,
    NativeLinear,
    PackedWeights,
    TritonWeights,
    grouped_products,
)
from ...kernels.routing import Operations as RoutingOperations
from ...kernels.routing import Routing, Scoring
from ...kernels.routing import operations_of as routing_of
from ...kernels.tokenwise import Activation, Gating, Operations, operations_of
from ...kernels.tokenwise import cpu as native
from .fused_table import ACTIVATIONS, GATED_EXPERTS, GatingKind

IMPLEMENTATION = "intarsia"
"""The name that transformers looks our function up by."""


Weights = PackedWeights | TritonWeights | ExpandedCodes


WITHOUT_SWITCH = {"Step3p7Experts"}
"""Classes that transformers computes itself, always, expert by expert: gated ones without biases."""

TORCH_FROM_ROWS = 16_384
"""Rows of a GPU's step, one for each token and expert of it, from which torch's grouped product is taken: on an H100 it
takes 1.15 times as long as ours for 8,192 rows, 0.96 times for 16,384, in a dozen launches more."""


class _Ways(NamedTuple):
    """How they are computed on a device."""

    products: GroupedProducts
    tokenwise: Operations
    routing: RoutingOperations
    is_one_order: bool  # a row's result depends on that row alone, always

    def torch_from_rows(self, dtype: torch.dtype) -> float:
        """torch has a grouped product of its own for one kind of numbers."""
        return math.inf if self.is_one_order or dtype != torch.bfloat16 else TORCH_FROM_ROWS


class _Experts(NamedTuple):
    up: Weights
    down: Weights
    ways: _Ways
    gating: Gating | None  # None: the module's own function does it
    torch_from_rows: float


def pack_experts(model: nn.Module, device: torch.device, same_bits: bool = False) -> None:
    """Take over the experts of all layers that transformers lets others compute, on a CPU with a compiler and on a GPU;
    and where a row's result is to depend on that row alone, the routers. Elsewhere nothing happens."""
    products, tokenwise, routing = grouped_products(device), operations_of(device.type), routing_of(device.type)
    if products is None or tokenwise is None or routing is None:
        return
    ways = _Ways(products, tokenwise, routing, is_one_order=device.type == "cpu" or same_bits)
    for module in list(model.modules()):
        if type(module).__name__ == "Llama4TextMoe":
            _take_llama4(module, ways)
        elif type(module).__name__ in WITHOUT_SWITCH:
            _take_without_switch(module, ways)
        elif _has_experts(module, ways):
            _take_experts(module, ways)
        elif not ways.is_one_order:
            continue
        elif isinstance(gate := getattr(module, "shared_expert_gate", None), NativeLinear):
            gate.__class__ = _Gate
        elif _is_router(module):
            module.weight = _RoutingWeight.of(module._parameters.pop("weight"), ways)  # type: ignore[assignment]


def _has_experts(module: Any, ways: _Ways) -> bool:
    if not (hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")):
        return False
    if "down_proj" in vars(module).get("kept", {}):
        return True
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3 and down.dtype in ways.products.linear.dtypes


def _take_experts(module: Any, ways: _Ways) -> None:
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    kept = vars(module).get("kept", {})
    torch_from_rows = math.inf if kept else ways.torch_from_rows(module.down_proj.dtype)
    up, down = (_packed(module, name, ways, keeps=torch_from_rows < math.inf) for name in names)
    module.packed = _Experts(up, down, ways, _gating(module), torch_from_rows)
    if hasattr(module, "config"):
        module.config._experts_implementation = IMPLEMENTATION


def _take_without_switch(module: Any, ways: _Ways) -> None:
    module.has_gate = True
    module.has_bias = module.is_transposed = module.has_post_expert_norm = False
    if _has_experts(module, ways):
        _take_experts(module, ways)
        module.forward = partial(_experts_forward, module)


def _gating(module: Any) -> Gating | None:
    kind = GATED_EXPERTS.get(type(module).__name__)
    if kind is None and module.has_gate and type(module)._apply_gate is _default_apply_gate:
        kind = GatingKind()
    activation = ACTIVATIONS.get(type(module.act_fn).__name__) if hasattr(module, "act_fn") else Activation.SILU
    return None if kind is None or activation is None else kind.of(module, activation)


def _packed(module: Any, name: str, ways: _Ways, *, keeps: bool) -> Weights:
    """keeps: the module's parameters, for torch; they then look at the memory in which ours lie"""
    bias = module._parameters.pop(f"{name}_bias").detach() if module.has_bias else None
    kept = vars(module).get("kept", {}).pop(name, None)
    if kept is not None:
        return kept.weights(bias)
    weights = module._parameters.pop(name).detach()
    if module.is_transposed:
        weights = weights.transpose(1, 2).contiguous()
    if keeps:
        theirs = {name: weights.transpose(1, 2) if module.is_transposed else weights, f"{name}_bias": bias}
        for each, tensor in theirs.items():
            if tensor is not None:
                module.register_parameter(each, nn.Parameter(tensor, requires_grad=False))
    return ways.products.weights(weights, bias)


def _experts_forward(module: Any, hidden_TD: Tensor, experts_TK: Tensor, shares_TK: Tensor) -> Tensor:
    """Returns [T,D]: of each token its experts' outputs, by their shares."""
    packed: _Experts = module.packed
    if experts_TK.numel() >= packed.torch_from_rows:
        return grouped_mm_experts_forward(module, hidden_TD, experts_TK, shares_TK)
    rows = packed.ways.products.sort_rows(experts_TK, packed.up.groups)
    up = packed.up.grouped_product(hidden_TD, rows.first, rows.token)
    down = packed.down.grouped_product(_gated(module, up), rows.first)
    if module.has_post_expert_norm:
        down = module.post_expert_norm(down)
    return packed.ways.products.combine(down, rows.place_TK, shares_TK)


def _gated(module: Any, up: Tensor) -> Tensor:
    packed: _Experts = module.packed
    if packed.gating is not None:
        return packed.ways.tokenwise.gate(up, packed.gating)
    return module._apply_gate(up) if module.has_gate else module.act_fn(up)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)


# -- Llama 4, which has experts of another form --------------------------------------------------------------------


def _take_llama4(module: Any, ways: _Ways) -> None:
    """Inputs, not outputs, are multiplied by their share. transformers computes all experts of every token, and those
    that were not chosen with inputs of zero; ours computes the chosen ones."""
    experts, router = module.experts, module.router
    kept = vars(experts).get("kept", {})
    if "down_proj" not in kept and experts.down_proj.dtype not in ways.products.linear.dtypes:
        return
    up, down = (
        kept.pop(name).weights(None)
        if name in kept
        else ways.products.weights(experts._parameters.pop(name).detach().mT)
        for name in ("gate_up_proj", "down_proj")
    )
    scores_of = ways.products.linear.take_over(router) if ways.is_one_order else partial(nn.Linear.forward, router)
    tokenwise = ways.tokenwise
    gating = Gating(ACTIVATIONS[type(experts.act_fn).__name__])
    routing = Routing(module.top_k, Scoring.SIGMOID, is_of_chosen=True)

    def experts_forward(hidden_TD: Tensor, experts_TK: Tensor, shares_TK: Tensor) -> Tensor:
        rows = ways.products.sort_rows(experts_TK, up.groups)
        share_N = torch.empty_like(shares_TK.flatten()).scatter_(0, rows.place_TK.flatten(), shares_TK.flatten())
        gate_up = up.grouped_product(hidden_TD[rows.token] * share_N.unsqueeze(1), rows.first)
        out = down.grouped_product(tokenwise.gate(gate_up, gating), rows.first)
        return ways.products.combine(out, rows.place_TK, torch.ones_like(shares_TK, dtype=torch.float32))

    def forward(hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        logits_TE = scores_of(hidden_TD)
        shares_TK, experts_TK = ways.routing.route(logits_TE, routing)
        return module.shared_expert(hidden_TD) + experts(hidden_TD, experts_TK, shares_TK), logits_TE

    experts.forward = experts_forward  # still called as a module: a hook of it adds up what the ranks have
    module.forward = forward


# -- routers ---------------------------------------------------------------------------------------------------------


def _is_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    is_product = type(module).__name__.endswith(("Router", "TopKGating")) and not isinstance(module, nn.Linear)
    return is_product and weight is not None and weight.dim() == 2 and weight.dtype in NativeLinear.dtypes


class _RoutingWeight(Tensor):
    """A weight that torch's `linear` multiplies by our product; anything else sees the numbers as they are."""

    plain: Tensor
    packed: Weights | None  # once it was multiplied with
    converted: dict[Any, Any]  # by what was asked for
    ways: _Ways

    @classmethod
    def of(cls, weight: Tensor, ways: _Ways) -> "_RoutingWeight":
        plain = weight.detach()
        routing: Any = plain.as_subclass(cls)
        routing.plain, routing.packed, routing.converted, routing.ways = plain, None, {}, ways
        return routing

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1], cls):
            x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
            return weight.product(x, bias)
        if function in (Tensor.type, Tensor.float, Tensor.to) and isinstance(args[0], cls):
            return args[0].convert(function, *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def convert(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Some routers widen their weight before each product. It is widened once."""
        asked = (function, *args, *kwargs.items())
        if asked not in self.converted:
            with torch._C.DisableTorchFunctionSubclass():
                result = function(self, *args, **kwargs)
            is_other = isinstance(result, Tensor) and result is not self
            self.converted[asked] = _RoutingWeight.of(result, self.ways) if is_other else result
        return self.converted[asked]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            weight = self.plain.unsqueeze(0)
            self.packed = self.ways.products.weights(weight, None if bias is None else bias.unsqueeze(0))
        logits = self.packed.product(x.flatten(0, -2)).view(*x.shape[:-1], len(self))
        return logits.as_subclass(_RoutingLogits) if self.ways.tokenwise is native else logits


class _RoutingLogits(Tensor):
    """What some routers take the sigmoid of: each of its numbers by itself. Anything else makes plain tensors of it."""

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    def sigmoid(self) -> Tensor:
        return native.activate(self.as_subclass(Tensor), Activation.SIGMOID)


class _Gate(NativeLinear):
    """One number for each token, of which the module takes the sigmoid."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).as_subclass(_RoutingLogits)
