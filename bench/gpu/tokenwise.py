"""What a layer does to each token by itself: norms, rotary positions, gates, alone and in the chain of one layer; and
what chooses its experts.

Floors are of bytes: all of these read and write, and compute next to nothing. Beside our kernels stand the same
operations as `reference.py` writes them, in as few of torch's as it takes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from intarsia.kernels.routing import Routing, Scoring
from intarsia.kernels.routing import reference as routing_reference
from intarsia.kernels.routing import triton as our_routing
from intarsia.kernels.tokenwise import Activation, Gating, Norm, Places, Rotary, reference
from intarsia.kernels.tokenwise import triton as ours

from .device import Bench, rotating
from .lines import WRONG
from .parts import Case, Row
from .shapes import LAYERS, Layer

TOKENS = (1, 64, 2048)
TINY_TOKENS = (1, 2, 3)
BLOCK_TOKENS = 16
ALLOWED = 3e-2
"""Of the largest number, in bfloat16; the two round at other places."""


ROUTERS = {
    "gpt-oss": (128, Routing(4, Scoring.SOFTMAX, is_of_chosen=True)),
    "qwen3-next": (512, Routing(10, Scoring.SOFTMAX, least=0.0)),
    "deepseek-v3": (256, Routing(8, Scoring.SIGMOID, groups=8, most_groups=4, least=1e-20, scale=2.5)),
}
"""Name -> experts, and how they are chosen."""


class World:
    """Numbers of some tokens, on their way through a layer."""

    def __init__(self, layer: Layer, tokens: int, bench: Bench, seed: int):
        bench.seed(f"{layer.name} {tokens} {seed}")
        dtype = bench.dtype(torch.bfloat16)
        draw = partial(bench.random, dtype=dtype)
        self.layer, self.tokens = layer, tokens
        self.x, self.added = draw(tokens, layer.width), draw(tokens, layer.width)
        self.norm = Norm(bench.random(layer.width).abs(), 1e-6)
        self.gate_up = draw(tokens, 2 * layer.half)
        self.qkv = draw(tokens, (layer.heads + 2 * layer.kv_heads) * layer.head_dim)
        head_norm = Norm(bench.random(layer.head_dim).abs(), 1e-6) if layer.has_head_norms else None
        self.head_norms = head_norm, head_norm
        angles = bench.random(tokens, layer.head_dim // 2).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        pages = draw(tokens // BLOCK_TOKENS + 1, BLOCK_TOKENS, layer.kv_heads, 2 * layer.head_dim)
        places = torch.arange(tokens, device=bench.device)
        self.places = Places(pages, places // BLOCK_TOKENS, places % BLOCK_TOKENS)

    def norms(self, operations: Any) -> Tensor:
        total, normed = operations.add_norm(self.x, self.added, self.norm, self.norm)
        return torch.cat((total, normed), dim=-1)

    def gated(self, operations: Any) -> Tensor:
        return operations.gate(self.gate_up, Gating(Activation[self.layer.gate]))

    def rotated(self, operations: Any, qkv: Tensor | None = None, **places: Places) -> Tensor:
        """In place, so a check is given a copy."""
        layer, qkv = self.layer, self.qkv if qkv is None else qkv
        shape = layer.heads, layer.kv_heads, layer.head_dim
        operations.prepare_heads(
            qkv, *shape, self.head_norms, self.cos, self.sin, Rotary.HALVES, layer.head_dim, **places
        )
        return qkv

    def chain(self) -> None:
        """What a layer launches beside its products and attention."""
        ours.add_norm(self.x, self.added, self.norm, self.norm)
        self.rotated(ours, places=self.places)
        ours.add_norm(self.x, self.added, self.norm, self.norm)
        self.gated(ours)

    @property
    def norm_bytes(self) -> float:
        return 4.0 * self.x.numel() * self.x.element_size()

    @property
    def gate_bytes(self) -> float:
        return 1.5 * self.gate_up.numel() * self.gate_up.element_size()

    @property
    def head_bytes(self) -> float:
        return 2.0 * self.qkv.numel() * self.qkv.element_size()

    @property
    def chain_bytes(self) -> float:
        return 2 * self.norm_bytes + self.head_bytes + self.gate_bytes


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    found = []
    for layer in LAYERS:
        for told, tokens in zip(TOKENS, TINY_TOKENS if is_rehearsed else TOKENS, strict=True):
            shape = layer.tiny() if is_rehearsed else layer
            title = f"{layer.name}, {told} tokens"
            found.append(Case(title, partial(_measure, shape, tokens), partial(_touch, shape, tokens)))
    for router, (experts, routing) in ROUTERS.items():
        for told, tokens in zip(TOKENS, TINY_TOKENS if is_rehearsed else TOKENS, strict=True):
            routed = partial(_routed, experts, routing, tokens)
            found.append(Case(f"routing of {router}, {told} tokens", partial(_measure_routing, routed), routed))
    return found


def _routed(experts: int, routing: Routing, tokens: int, bench: Bench) -> tuple[Tensor, Routing]:
    """Logits, and how they are read. Launches the kernel."""
    bench.seed(f"routing {experts} {tokens}")
    logits = bench.random(tokens, experts)
    if routing.scoring is not Scoring.SOFTMAX:
        routing = routing._replace(bias_E=bench.random(experts))
    our_routing.route(logits, routing)
    return logits, routing


def _measure_routing(routed: Callable[[Bench], tuple[Tensor, Routing]], bench: Bench) -> Iterator[Row]:
    yield bench.attempt({"operation": "routing"}, lambda: _timed_routing(*routed(bench), bench))


def _timed_routing(logits: Tensor, routing: Routing, bench: Bench) -> Row:
    found, wanted = (
        torch.zeros_like(logits).scatter_(1, experts, shares.to(logits.dtype)).double()
        for shares, experts in (each.route(logits, routing) for each in (our_routing, routing_reference))
    )
    off = float((found - wanted).abs().max())
    row: Row = {"off": f"{off:.1e}"} | ({} if off <= ALLOWED else {WRONG: f"shares are off by {off:.1e}"})
    timing, plain = (bench.time([partial(each.route, logits, routing)]) for each in (our_routing, routing_reference))
    return {**row, **timing.row(), "torch_us": plain.us}


def _touch(layer: Layer, tokens: int, bench: Bench) -> None:
    world = World(layer, tokens, bench, 0)
    world.chain()
    world.rotated(ours)


def _measure(layer: Layer, tokens: int, bench: Bench) -> Iterator[Row]:
    sizes = World(layer, tokens, bench, 0).chain_bytes
    worlds = list(rotating(bench, sizes, lambda n: World(layer, tokens, bench, n)))
    first = worlds[0]
    operations: dict[str, tuple[Callable[..., Tensor], float]] = {
        "norms": (World.norms, first.norm_bytes),
        "heads": (World.rotated, first.head_bytes),
        "gate": (World.gated, first.gate_bytes),
    }
    for name, (work, size) in operations.items():
        yield bench.attempt({"operation": name}, partial(_timed, work, size, worlds, bench))
    yield bench.attempt({"operation": "chain of a layer"}, partial(_chain, worlds, bench))


def _timed(work: Callable[..., Tensor], size: float, worlds: list[World], bench: Bench) -> Row:
    copy = {"qkv": worlds[0].qkv.clone()} if work is World.rotated else {}
    found = work(worlds[0], ours, **copy).double()
    copy = {"qkv": worlds[0].qkv.clone()} if work is World.rotated else {}
    wanted = work(worlds[0], reference, **copy).double()
    off = float((found - wanted).abs().max()) / max(1e-30, float(wanted.abs().max()))
    row: Row = {"off": f"{off:.1e}"} | ({} if off <= ALLOWED else {WRONG: f"off by {off:.1e} of the largest number"})
    places = [{"places": world.places} if work is World.rotated else {} for world in worlds]
    timing = bench.time([partial(work, world, ours, **place) for world, place in zip(worlds, places, strict=True)])
    plain = bench.time([partial(work, world, reference) for world in worlds])
    return {**row, **timing.row(), **bench.rates(timing.us, size), "torch_us": plain.us}


def _chain(worlds: list[World], bench: Bench) -> Row:
    timing = bench.time([world.chain for world in worlds])
    return {**timing.row(), **bench.rates(timing.us, worlds[0].chain_bytes), **bench.kernel_row(worlds[0].chain)}
