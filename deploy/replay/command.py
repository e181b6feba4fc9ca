"""`intarsia replay` for people and programs: which kind of trace it is, and how the answers are printed."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ...errors import InvalidSetting
from ...kvcache.plan import MemoryPlan
from ..settings.sizes import parse_bytes
from ..terminal.banner import human_bytes
from ..tools.model_layers import ModelLayers, model_layers
from .lru import replay_lru
from .operations import OperationRunner
from .requests import TraceResult, plan_for, replay_requests
from .traces import TraceRequest, detect, json_objects, read_trace

DEFAULT_MODEL = "gemma-3-27b"

UNLIMITED = "unlimited"

OPTIMUM = "optimum"
"""In place of a policy: what the best one could do."""


def run(
    path: Path, *, form: str | None, strategy: str | None, policy: str | None, as_json: bool, **of_requests: Any
) -> None:
    """Replay a trace of either kind. of_requests: what else `replay_trace` takes."""
    if is_operations(path, form):
        replay_operations(path, as_json=as_json, strategy=strategy, policy=policy)
        return
    strategy, policy = strategy or "auto", policy or "worth"
    replay_trace(path, form=form, strategy=strategy, policy=policy, as_json=as_json, **of_requests)


def replay_operations(path: Path, *, as_json: bool, strategy: str | None, policy: str | None) -> None:
    """Print one answer per operation. Raises `InvalidSetting` for a header or a line that cannot be read."""
    lines = json_objects(path, "trace")
    first = next(lines, None)
    if first is None:
        raise InvalidSetting(f"{path} is empty; its first line must be a header", field="trace")
    try:
        runner = OperationRunner(first[1], strategy, policy)
    except InvalidSetting as refusal:
        raise InvalidSetting(f"line {first[0]} of {path}: {refusal}", field=refusal.field) from None
    console = Console(highlight=False)
    if not as_json:
        plan = runner.manager.plan
        groups = ", ".join(f"{group.reach.name} ({len(group.layers)} layers)" for group in plan.groups)
        console.print(f"strategy {plan.strategy}: {groups}; {plan.usable_blocks:,} large pages")
    for number, operation in lines:
        answer = {"line": number} | runner.run(operation)
        if as_json:
            print(json.dumps(answer), flush=True)
        else:
            console.print(_line(answer), soft_wrap=True, markup=False)


def replay_trace(
    path: Path,
    *,
    model: str | None,
    kv_memory: str,
    strategy: str,
    policy: str,
    block_size: int | None,
    limit: int | None,
    longest_prompt: int | None,
    form: str | None,
    rule: str | None,
    blocks: int | None,
    forecast: bool,
    as_json: bool,
) -> None:
    """Print hit rates and what was lost. Raises `InvalidSetting`, naming the field."""
    if block_size is not None and block_size < 1:
        raise InvalidSetting(f"block_size must be at least 1 token, got {block_size}", field="block_size")
    requests = list(read_trace(path, form, block_size or 16, longest_prompt))[:limit]
    if not requests:
        raise InvalidSetting(f"{path} holds no requests", field="trace")
    if rule is not None:
        _print_rule(requests, rule, blocks, as_json)
        return
    layers = model_layers(model or DEFAULT_MODEL)
    memory = None if kv_memory == UNLIMITED else parse_bytes(kv_memory, "kv_memory")
    if memory is not None and memory < 1:
        raise InvalidSetting(f"kv_memory must be positive, got {memory}", field="kv_memory")
    if policy == OPTIMUM:
        plan = plan_for(requests, layers, memory, block_size, strategy)
        _print_optimum(_settings(layers, memory, plan, policy), requests, plan, as_json)
        return
    result, manager = replay_requests(
        requests,
        layers,
        memory,
        block_tokens=block_size,
        strategy=strategy,
        policy=policy,
        forecast=forecast,
        progress=_with_bar,
    )
    settings = _settings(layers, memory, manager.plan, policy)
    if as_json:
        print(json.dumps(settings | result.to_json(), indent=2))
    else:
        _print_result(settings, result)


def _settings(layers: ModelLayers, memory: int | None, plan: MemoryPlan, policy: str) -> dict[str, Any]:
    return {
        "model": layers.model,
        "kv_memory": plan.memory_bytes if memory is None else memory,
        "strategy": plan.strategy,
        "policy": policy,
        "block_size": plan.block_tokens,
    }


def is_operations(path: Path, form: str | None) -> bool:
    return (form or detect(path)) == "operations"


def _print_rule(requests: list[TraceRequest], rule: str, blocks: int | None, as_json: bool) -> None:
    if rule not in ("r1", "r2"):
        raise InvalidSetting(f"rule must be r1 or r2, got {rule!r}", field="rule")
    if blocks is not None and blocks < 1:
        raise InvalidSetting(f"blocks must be at least 1, got {blocks}", field="blocks")
    result = replay_lru(requests, blocks, full_blocks_only=rule == "r2")
    answer = {"rule": rule, "blocks": blocks, "requests": len(requests), **result._asdict()}
    print(json.dumps(answer) if as_json else f"{result.hit_blocks:,} blocks found, {result.evictions:,} evicted")


def _print_optimum(
    settings: Mapping[str, Any], requests: Sequence[TraceRequest], plan: MemoryPlan, as_json: bool
) -> None:
    """What the best policy could find, of the whole trace and of its second half alone."""
    from .optimum import optimum  # numpy takes a moment, and no other policy needs it

    whole, half = optimum(requests, plan), optimum(requests, plan, len(requests) // 2)
    rates = {
        "planned_rate": whole.planned_rate,
        "bound_rate": whole.bound_rate,
        "planned_rate_second_half": half.planned_rate,
        "bound_rate_second_half": half.bound_rate,
    }
    if as_json:
        answer = {"requests": len(requests), "tokens": whole.tokens, **rates}
        print(json.dumps({**settings, **answer}, indent=2))
        return
    table = _table(settings)
    table.add_row("prompts", f"{len(requests):,} with {whole.tokens:,} tokens")
    for what, first in (("a plan", "planned"), ("no policy", "bound")):
        said = "finds" if first == "planned" else "finds more than"
        table.add_row(
            what, f"{said} {rates[f'{first}_rate']:.1%} of the tokens "
                  f"({rates[f'{first}_rate_second_half']:.1%} of the 2nd half's, if only those count)"
        )  # fmt: skip
    Console(highlight=False).print(table)


def _print_result(settings: Mapping[str, Any], result: TraceResult) -> None:
    found, table = result.to_json(), _table(settings)
    table.add_row("prompts", f"{result.requests:,} with {result.tokens:,} tokens, in {result.seconds:.1f} s")
    table.add_row(
        "found", f"{found['hit_rate']:.1%} of the tokens ({found['hit_rate_second_half']:.1%} in the 2nd half)"
    )
    for scale, rate in (result.forecast or {}).items():
        table.add_row(f"with {scale:g}x the memory", f"{rate:.1%} in the 2nd half, as forecast")
    for cause, tokens in sorted(result.lost_tokens.items(), key=lambda item: -item[1]):
        table.add_row("lost", f"{tokens:,} tokens: {cause.replace('_', ' ')}")
    table.add_row("evicted", f"{result.evictions:,} blocks")
    table.add_row("written", f"{human_bytes(result.bytes_written)}; not written thanks to hits: "
                             f"{human_bytes(result.bytes_saved)}")  # fmt: skip
    if result.refused:
        table.add_row("refused", f"{result.refused:,} prompts that do not fit the memory alone")
    Console(highlight=False).print(table)


def _table(settings: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("model", f"{settings['model']}, {human_bytes(settings['kv_memory'])}, {settings['strategy']}")
    table.add_row("cache", f"blocks of {settings['block_size']} tokens, policy {settings['policy']}")
    return table


def _with_bar(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Shown on a terminal only, and on stderr: stdout is for the result."""
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = len(requests) if isinstance(requests, list) else None
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        yield from progress.track(requests, total=total)


def _line(answer: Mapping[str, Any]) -> str:
    what = f"{answer['line']:>5}  {answer['op']} {answer.get('id', answer.get('name')) or ''}".ljust(28)
    said = []
    if "hit_tokens" in answer:
        said.append(f"{answer['hit_tokens']:,} tokens found")
    said += [f"{tokens:,} lost ({cause.replace('_', ' ')})" for cause, tokens in answer.get("lost_tokens", {}).items()]
    if "added" in answer:
        said.append(f"{answer['added']:,} added")
    if answer.get("refused"):
        said.append(f"refused: {', '.join(answer['refused'][:8])}")
    for kind, figures in answer.get("timings", {}).items():
        said.append(f"{kind} {figures['median_us']:,.1f} us (p99 {figures['p99_us']:,.1f}, {figures['count']:,}x)")
    said.append(f"in use {'+'.join(map(str, answer['blocks_in_use_per_group']))}, free {answer['free_blocks']:,}")
    if "error" in answer:
        said.append(f"{'until' if answer['ok'] else 'REFUSED'}: {answer['error']}")
    return f"{what} {'; '.join(said)}"
