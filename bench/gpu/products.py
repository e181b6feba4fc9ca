"""Products with constant weights: torch's beside ours, alone and of experts.

Few rows are what decode steps have: there the weights' bytes are the floor. Experts are whole layers, from the experts
that the router chose to the sum of what they gave.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .device import Bench, rotating
from .lines import WRONG
from .parts import Case, Row

DTYPE = torch.bfloat16
ALLOWED = 3e-2
"""Of the largest number, in 16 bits."""
ROWS, TINY_ROWS = (1, 16, 64, 256), (1, 2, 3, 5)


class Weight(NamedTuple):
    name: str
    outputs: int
    inputs: int

    def tiny(self) -> "Weight":
        return self._replace(outputs=40, inputs=24)


WEIGHTS = (
    Weight("llama-3.1-8b qkv", 6144, 4096),
    Weight("llama-3.1-8b out", 4096, 4096),
    Weight("llama-3.1-8b gate and up", 28_672, 4096),
    Weight("llama-3.1-8b down", 4096, 14_336),
    Weight("gemma-3-27b gate and up", 43_008, 5376),
    Weight("gemma-3-27b down", 5376, 21_504),
)


class Experts(NamedTuple):
    name: str
    model: str  # transformers' name of its kind
    sizes: dict[str, Any]  # of its config
    picks: int

    def tiny(self) -> "Experts":
        small = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48}
        counts = {"num_local_experts": 4, "num_experts": 4}
        sizes = {name: {**small, **counts}.get(name, value) for name, value in self.sizes.items()}
        return self._replace(sizes=sizes, picks=2)


EXPERTS = (
    Experts(
        "gpt-oss-20b", "gpt_oss", {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}, picks=4
    ),
    Experts(
        "qwen3-30b-a3b",
        "qwen3_moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_local_experts": 128},
        picks=8,
    ),
)
TOKENS, TINY_TOKENS = (1, 16, 64, 256, 1024, 4096), (1, 2, 3, 4, 5, 6)


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    rows, tokens = (TINY_ROWS, TINY_TOKENS) if is_rehearsed else (ROWS, TOKENS)
    found = []
    for weight in WEIGHTS:
        shape = weight.tiny() if is_rehearsed else weight
        found.append(Case(weight.name, partial(_multiply, shape, rows), partial(_touch, shape, rows)))
    for experts in EXPERTS:
        layer = experts.tiny() if is_rehearsed else experts
        work, touch = partial(_choose, layer, tokens), partial(_touch_experts, layer, tokens)
        found.append(Case(f"experts of {experts.name}", work, touch))
    return found


# -- one weight --------------------------------------------------------------------------------------------------------


def _drawn(weight: Weight, bench: Bench) -> Tensor:
    return bench.random(1, weight.outputs, weight.inputs, dtype=bench.dtype(DTYPE)) / weight.inputs**0.5


def _touch(weight: Weight, rows: tuple[int, ...], bench: Bench) -> None:
    from intarsia.kernels.products import TritonWeights

    ours = TritonWeights(_drawn(weight, bench))
    for count in rows:
        ours.product(bench.random(count, weight.inputs, dtype=bench.dtype(DTYPE)))


def _multiply(weight: Weight, rows: tuple[int, ...], bench: Bench) -> Iterator[Row]:
    from intarsia.kernels.products import TritonWeights

    size = 2.0 * weight.outputs * weight.inputs
    drawn = list(rotating(bench, size, lambda n: _drawn(weight, bench)))
    for count in rows:
        x = bench.random(count, weight.inputs, dtype=bench.dtype(DTYPE))
        flops = 2.0 * count * weight.outputs * weight.inputs
        ways = {
            "torch": [partial(F.linear, x, each[0]) for each in drawn],
            "triton": [partial(TritonWeights(each).product, x) for each in drawn],
        }
        wanted = ways["torch"][0]().double()
        for name, calls in ways.items():
            yield bench.attempt({"rows": count, "way": name}, partial(timed, calls, wanted, size, flops, bench))


def timed(calls: list[Any], wanted: Tensor, size: float, flops: float, bench: Bench) -> Row:
    off = float((calls[0]().double() - wanted).abs().max()) / max(1e-30, float(wanted.abs().max()))
    wrong = {} if off <= ALLOWED else {WRONG: f"off by {off:.1e} of the largest number"}
    timing = bench.time(calls)
    rates = bench.rates(timing.us, size, flops, DTYPE)
    return {"off": f"{off:.1e}", **timing.row(), **rates, **bench.kernel_row(calls[0]), **wrong}


# -- experts -----------------------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """Experts as transformers has them, with random weights, and a router that chooses at random."""

    def __init__(self, asked: Experts, bench: Bench):
        super().__init__()
        from transformers import AutoConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config: Any = AutoConfig.for_model(asked.model, **asked.sizes)
        kind: Any = {"gpt_oss": GptOssExperts, "qwen3_moe": Qwen3MoeExperts}[asked.model]
        with torch.device("meta"):
            self.experts = kind(config)
        for name, parameter in list(self.experts.named_parameters()):
            drawn = bench.random(*parameter.shape, dtype=bench.dtype(DTYPE)) / config.hidden_size**0.5
            setattr(self.experts, name, nn.Parameter(drawn, requires_grad=False))
        self.count, self.picks, self.width = self.experts.num_experts, asked.picks, config.hidden_size
        self.bench = bench

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.bench.random(tokens, self.width, dtype=self.bench.dtype(DTYPE))
        scores, chosen = self.bench.random(tokens, self.count).softmax(-1).topk(self.picks)
        return hidden, chosen, (scores / scores.sum(-1, keepdim=True)).to(hidden.dtype)

    def weight_bytes(self, chosen: Tensor) -> float:
        """Of the experts that some token chose."""
        size = sum(p.numel() * p.element_size() for p in self.experts.parameters() if p.dim() == 3)
        return size * len(chosen.unique()) / self.count


def _packed(asked: Experts, bench: Bench) -> _Layer:
    from intarsia.workers.cpu.experts import pack_experts

    layer = _Layer(asked, bench)
    pack_experts(layer, bench.device)
    return layer


def _touch_experts(asked: Experts, tokens: tuple[int, ...], bench: Bench) -> None:
    layer = _packed(asked, bench)
    for count in tokens:
        layer.experts(*layer.inputs(count))


def _choose(asked: Experts, tokens: tuple[int, ...], bench: Bench) -> Iterator[Row]:
    from transformers.integrations.moe import grouped_mm_experts_forward

    from intarsia.workers.cpu import experts

    layer = _packed(asked, bench)
    packed: Any = layer.experts.packed
    layer.experts.packed = packed._replace(torch_from_rows=float("inf"))  # what is measured is where torch is faster
    theirs = _Layer(asked, bench) if bench.is_rehearsed else layer  # whose float32 is not kept for torch
    for count in tokens:
        inputs = layer.inputs(count)
        flops = 2.0 * count * asked.picks * layer.weight_bytes(torch.arange(layer.count)) / layer.count / 2
        size = layer.weight_bytes(inputs[1]) if not bench.is_rehearsed else 1.0
        ways = {
            "torch": [partial(grouped_mm_experts_forward, theirs.experts, *inputs)],
            "triton": [partial(experts._experts_forward, layer.experts, *inputs)],
        }
        wanted = ways["torch" if not bench.is_rehearsed else "triton"][0]().double()
        for name, calls in ways.items():
            if not (bench.is_rehearsed and name == "torch"):  # whose grouped product is of another kind there
                yield bench.attempt({"tokens": count, "way": name}, partial(timed, calls, wanted, size, flops, bench))
