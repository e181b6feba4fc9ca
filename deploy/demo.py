"""`intarsia demo`: the main job once, end to end, in under a minute.

A tiny hybrid checkpoint with random weights is served by a controller and two tensor-parallel workers on a local Ray;
a gRPC client asks twice and streams the answers; a report tells what happened in the pool.
"""

import asyncio
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..controller.launch import RunningEngine
from ..controller.request import SamplingParams
from .banner import print_banner
from .client import Client, Usage
from .demo_model import WORDS, make_demo_checkpoint
from .serve import ServerSettings, serving
from .settings import engine_settings

PROMPT = " ".join(WORDS.split()[:90])
NEW_TOKENS = 48


def run() -> None:
    """Print the demo to standard output."""
    asyncio.run(_run())


async def _run() -> None:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="intarsia-") as folder:
        _say(console, "making a tiny hybrid checkpoint with random weights (10 sliding layers, 2 full ones)")
        model = await asyncio.to_thread(make_demo_checkpoint, Path(folder) / "tiny-hybrid")
        _say(console, "starting Ray, the controller and 2 tensor-parallel workers")
        settings = engine_settings(str(model), tensor_parallel_size=2, kv_cache_memory="8MiB")
        async with serving(settings, ServerSettings(port=0, grpc_port=0)) as (engine, listening):
            address = listening.grpc
            print_banner(engine.client.info, *listening)
            _say(console, f"a gRPC client sends a prompt of {len(PROMPT.split())} words and streams the answer")
            first = await asyncio.to_thread(_ask, address, console)
            _say(console, "the same prompt again, now out of the prefix cache")
            second = await asyncio.to_thread(_ask, address, console)
            _say(console, "what happened")
            console.print(await _report(engine, first, second))
        _say(console, "everything is shut down")


def _ask(address: str, console: Console) -> tuple[Usage, float]:
    """Stream one answer to the screen. Returns its usage and the seconds it took."""
    started = time.perf_counter()
    usage = None
    console.print("... " + " ".join(PROMPT.split()[-12:]), style="dim", end=" ")
    with Client(address) as client:
        for chunk in client.generate(PROMPT, SamplingParams(temperature=0.9, seed=1, max_tokens=NEW_TOKENS)):
            console.print(chunk.text, end="", soft_wrap=True, markup=False)
            usage = chunk.usage
    console.print("\n(random weights: real words, no sense)", style="dim")
    assert usage is not None
    return usage, time.perf_counter() - started


async def _report(engine: RunningEngine, *answers: tuple[Usage, float]) -> Table:
    stats, count = await engine.stats(), await engine.recount()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for number, (usage, seconds) in enumerate(answers, start=1):
        table.add_row(
            f"request {number}",
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} new ones "
            f"in {seconds:.2f} s: {usage.completion_tokens / seconds:.0f} tokens/s",
        )
    groups = engine.client.info.groups
    kinds = ", ".join(f"{sum(g.kind == kind for g in groups)} {kind}" for kind in dict.fromkeys(g.kind for g in groups))
    table.add_row("groups", f"{len(groups)} ({kinds}), {groups[0].block_tokens} tokens per block")
    table.add_row(
        "pool",
        f"{count.usable} large pages: {count.held} held, {count.kept} free and kept for later prompts, "
        f"{count.blank} blank",
    )
    controller_us = (stats["plan_us"] + stats["commit_us"]) / stats["steps"]
    table.add_row(
        "steps",
        f"{stats['steps']}: each {stats['run_us'] / stats['steps'] / 1000:.1f} ms on the workers, "
        f"{controller_us:.0f} µs in the controller",
    )
    return table


def _say(console: Console, text: str) -> None:
    console.print(f"\n[bold cyan]▸[/bold cyan] {text}")
