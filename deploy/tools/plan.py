"""`intarsia plan`: what a memory plan brings a model, before anything is loaded. The code an engine starts with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from ...errors import InvalidSetting
from ...kvcache.plan import Group, MemoryPlan, PlanSettings, exact_bytes
from ...kvcache.reach import Keeps
from ...kvcache.strategies import plan_memory
from ..checkpoints.weights import Weights
from ..terminal.banner import human_bytes
from .model_layers import ModelLayers

USUAL_CONTEXTS = (2048, 8192, 32_768, 131_072)

FAR = 1 << 40


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many requests of one length the memory holds."""

    context: int  # tokens of each request
    requests: float
    bound: float  # of any plan: the memory, over what the layers themselves fill
    saved_vs_uniform: float  # share of a request's bytes that keeping every token would have taken on top


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A memory plan and what follows from it."""

    model: ModelLayers
    settings: PlanSettings
    tensor_parallel_size: int
    plan: MemoryPlan
    capacity: tuple[Capacity, ...]
    greatest_context: int  # tokens one request can have when it is alone
    binds: str  # what the greatest context is limited by, in words

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": self.model.model,
            "strategy": plan.strategy,
            "groups": [_group_json(group) for group in plan.groups],
            "buffers": plan.num_buffers,
            "num_blocks": plan.num_blocks,
            "padding_fraction": plan.padding_fraction,
            "capacity": [
                {"context": entry.context, "requests": _down(entry.requests), "bound": _down(entry.bound)}
                for entry in self.capacity
            ],
            "why": [
                {"strategy": cost.strategy, "bytes_per_request": cost.bytes_per_request, "refused": cost.refused}
                for cost in plan.why
            ],
            "saved_vs_uniform": [
                {"context": entry.context, "fraction": entry.saved_vs_uniform} for entry in self.capacity
            ],
            "kv_memory": self.settings.memory_bytes,
            "tensor_parallel_size": self.tensor_parallel_size,
            "expected_tokens": plan.expected_tokens,
            "max_tokens": self.model.max_tokens,
            "encoder_tokens": self.settings.encoder_tokens,
            "greatest_context": self.greatest_context,
            "binds": self.binds,
            "arenas": [{"large_pages": arena.num_pages, "bytes": arena.page_bytes} for arena in plan.arenas],
            "notes": [*plan.notes, *filter(None, [self.model.about_copies])],
            "weights": _weights_json(self.model.weights),
        }


def make_report(
    model: ModelLayers, settings: PlanSettings, contexts: Sequence[int] = (), tensor_parallel_size: int = 1
) -> PlanReport:
    """Plan the memory and ask the plan. contexts: request lengths in tokens; none: usual ones up to the model's own.

    Raises `InvalidSetting`, naming the field.
    """
    if any(context < 1 for context in contexts):
        raise InvalidSetting(f"context lengths must be positive, got {min(contexts)}", field="context")
    if not settings.encoder_tokens and model.encoder_tokens:
        settings = replace(settings, encoder_tokens=model.encoder_tokens)
    plan = plan_memory(model.layers, settings, model.max_tokens)
    longest = model.max_tokens or USUAL_CONTEXTS[-1]
    lengths = sorted(set(contexts)) or sorted({*(c for c in USUAL_CONTEXTS if c < longest), longest})
    greatest, binds = _greatest_context(plan, model.max_tokens)
    return PlanReport(
        model,
        settings,
        tensor_parallel_size,
        plan,
        tuple(_capacity(model, settings, plan, length) for length in lengths),
        greatest,
        binds,
    )


def _capacity(model: ModelLayers, settings: PlanSettings, plan: MemoryPlan, length: int) -> Capacity:
    needed = exact_bytes(model.layers, length, settings.block_tokens, settings.encoder_tokens)
    return Capacity(
        length, plan.concurrency(length), settings.memory_bytes / needed, _saved(model, settings, plan, length)
    )


def _saved(model: ModelLayers, settings: PlanSettings, plan: MemoryPlan, length: int) -> float:
    """The share of bytes saved, of those that a request takes when every layer keeps every token, an encoder's
    included."""
    everything = 0
    for layer in model.layers:
        if layer.shares is None:
            is_state = layer.reach.keeps is Keeps.STATE
            everything += layer.state_bytes if is_state else layer.token_bytes * (length + settings.encoder_tokens)
    held = 0.0
    for group in plan.groups:
        token_bytes = group.content_bytes / group.block_tokens
        match group.reach.keeps:
            case Keeps.STATE:
                held += group.block_bytes
            case Keeps.ENCODER:
                held += settings.encoder_tokens * token_bytes
            case Keeps.TOKENS:
                live = length - group.reach.oldest_needed(length) // group.block_tokens * group.block_tokens
                held += max(1, live) * token_bytes
    padding = held * plan.padding_fraction / (1 - plan.padding_fraction)
    return round(max(0.0, 1 - (held + padding) / everything), 4)


def _greatest_context(plan: MemoryPlan, max_tokens: int | None) -> tuple[int, str]:
    if max_tokens is not None and plan.fits(max_tokens):
        return max_tokens, f"the model's own maximum of {max_tokens:,} tokens"
    low, high = 0, max_tokens or FAR
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan.fits(middle) else (low, middle - 1)
    largest = max(plan.groups, key=lambda group: group.blocks_spanning(max(low, 1), 1) * group.block_bytes)
    return low, f"memory: the {largest.reach.name} layers take most of it"


def _group_json(group: Group) -> dict[str, Any]:
    return {
        "kind": group.reach.kind,
        "window": group.reach.window_tokens,
        "chunk": group.reach.chunk_tokens,
        "layers": list(group.layers),
        "block_tokens": group.block_tokens,
        "page_bytes": group.page_bytes,
        "block_bytes": group.block_bytes,
        "blocks_per_large_page": group.pages_per_large,
        "draft": group.is_draft,
    }


def _weights_json(weights: Weights | str | None) -> dict[str, Any] | None:
    if not isinstance(weights, Weights):
        return None
    return {
        "bytes": weights.by_format(),
        "triton_bytes": weights.with_triton(),
        "expanded_bytes": weights.total(expands=True),
        "dtype": weights.dtype,
    }


def _down(requests: float) -> float:
    return math.floor(requests * 100) / 100


# -- for people --------------------------------------------------------------------------------------------------------


def print_report(report: PlanReport) -> None:
    Console(highlight=False).print(Lines(*_lines(report)))


def _lines(report: PlanReport) -> list[RenderableType]:
    plan, memory = report.plan, report.settings.memory_bytes
    ranks = f" on each of {report.tensor_parallel_size} ranks" if report.tensor_parallel_size > 1 else ""
    lines: list[RenderableType] = [
        Text.assemble((report.model.model, "bold"), f": {human_bytes(memory)} for the cache{ranks}"),
        *_weights_lines(report.model),
        Text(_choice(plan)),
        *(Text(f"note: {note}", style="yellow") for note in (*plan.notes, *filter(None, [report.model.about_copies]))),
        Text(),
        _group_table(report),
        Text(),
        _capacity_table(report),
        Text("at best: what no plan can beat. saved: of a request's bytes when every layer", style="dim"),
        Text("keeps every token.", style="dim"),
        Text(),
        Text(f"One request alone can have {report.greatest_context:,} tokens; the limit is {report.binds}."),
    ]
    shortest = report.capacity[0]
    lines.append(
        Text(f"At most {shortest.requests:,.0f} requests run at once, of {shortest.context:,} tokens each (memory).")
    )
    return lines


def _weights_lines(model: ModelLayers) -> list[RenderableType]:
    weights = model.weights
    if weights is None:
        return []
    if isinstance(weights, str):
        return [Text(f"note: {weights}", style="yellow")]
    beside = ""
    if weights.packed:
        triton = weights.with_triton()
        by_triton = "" if triton == weights.total(expands=False) else f"; on GPUs with Triton: {human_bytes(triton)}"
        beside = f"{by_triton}; where they are expanded: {weights.expanded_in_words()}"
    about = [Text(f"({model.about_weights})", style="dim")] if model.about_weights else []
    return [Text(f"Weights, on all ranks together: {weights.in_words()}{beside}."), *about]


def _choice(plan: MemoryPlan) -> str:
    costs = {cost.strategy: cost.bytes_per_request for cost in plan.why if cost.bytes_per_request is not None}
    others = ", ".join(f"{name} {human_bytes(cost)}" for name, cost in costs.items() if name != plan.strategy)
    own = human_bytes(costs[plan.strategy])
    padding = f"; {plan.padding_fraction:.2%} of it is padding" if plan.padding_fraction >= 0.0001 else ""
    return f"Strategy {plan.strategy}: {own} per request{padding}, averaged over usual lengths and the longest" + (
        f". Others: {others}." if others else "."
    )


def _group_table(report: PlanReport) -> Table:
    table = _table(("group", "right"), ("looks back", "left"), ("layers", "right"), ("a block", "right"),
                   ("in bytes", "right"), ("per large page", "right"))  # fmt: skip
    for number, group in enumerate(report.plan.groups):
        a_block = "the whole state" if group.reach.keeps is Keeps.STATE else f"{group.block_tokens} tokens"
        table.add_row(
            str(number),
            _looks_back(group) + (" (drafter)" if group.is_draft else ""),
            str(len(group.layers)),
            a_block,
            human_bytes(group.block_bytes),
            str(group.pages_per_large),
        )
    return table


def _looks_back(group: Group) -> str:
    if group.reach.window_tokens is not None:
        return f"{group.reach.window_tokens:,} tokens"
    if group.reach.chunk_tokens is not None:
        return f"within chunks of {group.reach.chunk_tokens:,}"
    return {"full": "at everything", "state": "through a state", "cross": "at an encoder's output"}[group.reach.kind]


def _capacity_table(report: PlanReport) -> Table:
    table = _table(("tokens each", "right"), ("requests", "right"), ("at best", "right"), ("saved", "right"))
    for entry in report.capacity:
        table.add_row(
            f"{entry.context:,}", f"{_down(entry.requests):,.2f}", f"{_down(entry.bound):,.2f}",
            f"{entry.saved_vs_uniform:.1%}",
        )  # fmt: skip
    return table


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    return table
