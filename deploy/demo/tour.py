"""`intarsia demo`: the main job once, end to end, in under a minute.

A tiny hybrid model that was trained on a dictionary of hackers' slang is served by a controller and two tensor-parallel
workers on a local Ray. A gRPC client lets it go on with a sentence, and asks again; a report tells what happened in the
pool.
"""

import asyncio
import time

from rich.console import Console
from rich.table import Table

from ...controller.info import CacheState
from ...controller.launch import RunningEngine
from ...controller.request import SamplingParams
from ..banner import counted, print_banner
from ..client import Client, Usage
from ..serve import ServerSettings, serving
from ..settings import engine_settings
from . import DEMO

PROMPT = (
    "Hackers, as a rule, love wordplay and are very conscious and inventive in their use of language. Some terms are "
    "older than the machines they were made for, and some were coined last week. In the beginning there was a computer "
    "which"
)

OTHER_END = "In the early days of computing, programmers"

SAMPLING = SamplingParams(temperature=0.3, seed=1, max_tokens=160)


def run() -> None:
    """Print the demo to standard output."""
    asyncio.run(_run())


async def _run() -> None:
    console = Console(highlight=False)
    _say(console, "starting Ray, the controller and 2 tensor-parallel workers for the tiny model that comes along")
    settings = engine_settings(DEMO, tensor_parallel_size=2, kv_cache_memory="2MiB")
    async with serving(settings, ServerSettings(port=0, grpc_port=0)) as served:
        print_banner(served.engine.client.info, *served.at)
        _say(console, f"a gRPC client sends {len(PROMPT)} bytes, and the model goes on")
        first = await asyncio.to_thread(_ask, served.at.grpc, PROMPT, console)
        _say(console, "the same prompt again: now it is in the cache, and the answer is the same")
        second = await asyncio.to_thread(_ask, served.at.grpc, PROMPT, console)
        _say(console, "the same beginning and another end: all layers take up what they have of it")
        third = await asyncio.to_thread(_ask, served.at.grpc, PROMPT[: PROMPT.index("In the")] + OTHER_END, console)
        _say(console, "what happened")
        console.print(await _report(served.engine, first, second, third))
    _say(console, "everything is shut down. Go on with: intarsia serve demo")


def _ask(address: str, prompt: str, console: Console) -> tuple[Usage, float]:
    """Stream one answer to the screen. Returns its usage and the seconds it took."""
    started = time.perf_counter()
    usage = None
    console.print("... " + prompt[prompt.rindex(". ") + 2 :], style="dim", end="")
    with Client(address) as client:
        for chunk in client.generate(prompt, SAMPLING):
            console.print(chunk.text, end="", soft_wrap=True, markup=False)
            usage = chunk.usage
    console.print()
    assert usage is not None
    return usage, time.perf_counter() - started


async def _report(engine: RunningEngine, *answers: tuple[Usage, float]) -> Table:
    stats, count, cache = await engine.stats(), await engine.recount(), await engine.client.cache_state()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for number, (usage, seconds) in enumerate(answers, start=1):
        table.add_row(
            f"request {number}",
            f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them reused; {usage.completion_tokens} new "
            f"ones in {seconds:.2f} s: {usage.completion_tokens / seconds:.0f} tokens/s",
        )
    prompts, reused = stats["prompt_tokens"], stats["cached_tokens"]
    table.add_row("reuse", f"{reused} of {prompts} prompt tokens came out of the cache ({reused / prompts:.0%})")
    for line in _groups(engine, cache):
        table.add_row(*line)
    table.add_row(
        "pool",
        f"{count.usable} large pages: {count.held} held, {count.kept} kept for later prompts, {count.blank} blank; "
        "counted block by block",
    )
    controller_us = (stats["plan_us"] + stats["commit_us"]) / stats["steps"]
    table.add_row(
        "steps",
        f"{stats['steps']}: each {stats['run_us'] / stats['steps'] / 1000:.1f} ms on the workers, "
        f"{controller_us:.0f} µs in the controller",
    )
    return table


def _groups(engine: RunningEngine, cache: CacheState) -> list[tuple[str, str]]:
    pairs = zip(engine.client.info.groups, cache.groups, strict=True)
    return [
        (
            f"group {number}",
            f"{group.kind}, {counted(len(group.layers), 'layer')}: {state.known_blocks} blocks of "
            f"{group.block_tokens} tokens kept",
        )
        for number, (group, state) in enumerate(pairs)
    ]


def _say(console: Console, text: str) -> None:
    console.print(f"\n[bold cyan]▸[/bold cyan] {text}")
