"""`intarsia demo`: the main job once, end to end.

A hybrid model is served by a controller and two tensor-parallel workers on a local Ray: Gemma 3 270M where it is
installed, else a tiny one that was trained on a dictionary of hackers' slang. A gRPC client lets it go on with a text,
and asks again; a report tells what happened in the pool. MODEL=tiny in the environment asks for the tiny one.
"""

import asyncio
import os
import time
from importlib.util import find_spec
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ...proto.request import SamplingParams
from ...proto.status import CacheState
from ..checkpoints.real_models import installed_files
from ..client import Client, Usage
from ..demo import DEMO, TOY
from ..settings.options import engine_settings
from ..start.launch import RunningEngine
from ..start.serve import ServerSettings, serving
from ..terminal.banner import counted, print_banner

CAPITALS = (
    "France Paris, Spain Madrid, Portugal Lisbon, Germany Berlin, Austria Vienna, Hungary Budapest, Poland Warsaw, "
    "Greece Athens, Turkey Ankara, Egypt Cairo, Kenya Nairobi, Ghana Accra, Senegal Dakar, Morocco Rabat, "
    "Ethiopia Addis Ababa, Uganda Kampala, Zambia Lusaka, Angola Luanda, Canada Ottawa, Cuba Havana, Peru Lima, "
    "Chile Santiago, Ecuador Quito, Colombia Bogota, Uruguay Montevideo, Paraguay Asuncion, China Beijing, "
    "Nepal Kathmandu, Thailand Bangkok, Vietnam Hanoi, Cambodia Phnom Penh, Indonesia Jakarta, Malaysia Kuala Lumpur, "
    "Mongolia Ulaanbaatar, Iran Tehran, Iraq Baghdad, Jordan Amman, Lebanon Beirut, Finland Helsinki, "
    "Norway Oslo, Denmark Copenhagen, Iceland Reykjavik, Ireland Dublin, Belgium Brussels, Romania Bucharest, "
    "Bulgaria Sofia, Serbia Belgrade, Croatia Zagreb, Albania Tirana, Ukraine Kyiv, Latvia Riga, Estonia Tallinn, "
    "Lithuania Vilnius, Georgia Tbilisi, Armenia Yerevan, Russia Moscow, Cyprus Nicosia, India New Delhi, "
    "Sweden Stockholm, Tunisia Tunis, Switzerland Bern, Slovakia Bratislava, Slovenia Ljubljana, Bolivia Sucre, "
    "Venezuela Caracas, Australia Canberra, Pakistan Islamabad, Somalia Mogadishu, Namibia Windhoek"
)
"""More than a window of Gemma 3 sees, once each is a line."""


class Play(NamedTuple):
    """What is shown with a model."""

    model: str  # as `serve` takes it
    about: str
    memory: str
    prompt: str
    other_end: str  # instead of the prompt's last sentence, which begins at `end_at`
    end_at: str
    sampling: SamplingParams
    note: str = ""  # of what the model says


TINY = Play(
    DEMO,
    "the tiny model that comes along",
    "2MiB",
    "Hackers, as a rule, love wordplay and are very conscious and inventive in their use of language. Some terms are "
    "older than the machines they were made for, and some were coined last week. In the beginning there was a computer "
    "which",
    "In the early days of computing, programmers",
    "In the",
    SamplingParams(temperature=0.3, seed=1, max_tokens=160),
    f"it is {TOY}",
)

GEMMA = Play(
    "gemma-3-270m",
    "Gemma 3 270M, which looks through windows of 512 tokens",
    "64MiB",
    "".join(
        f"The capital of {country} is {capital}.\n"
        for country, _, capital in (pair.partition(" ") for pair in CAPITALS.split(", "))
    )
    + "The capital of Italy is",
    "The capital of Japan is",
    "The capital of Italy",
    SamplingParams(temperature=0, max_tokens=24),
)


def choose() -> Play:
    """Gemma 3, unless MODEL=tiny says otherwise or it is not installed."""
    is_there = installed_files(GEMMA.model) is not None and find_spec("gguf") is not None
    return GEMMA if is_there and os.environ.get("MODEL") != "tiny" else TINY


def run() -> None:
    """Print the demo to standard output."""
    asyncio.run(_run())


async def _run() -> None:
    console = Console(highlight=False)
    play = choose()
    if play.note:
        console.print(play.note, style="dim")
    _say(console, f"starting Ray, the controller and 2 tensor-parallel workers for {play.about}")
    settings = engine_settings(play.model, tensor_parallel_size=2, kv_cache_memory=play.memory)
    async with serving(settings, ServerSettings(port=0, grpc_port=0)) as served:
        print_banner(served.engine.client.info, *served.at)
        _say(console, f"a gRPC client sends {len(play.prompt):,} bytes, and the model goes on")
        first = await asyncio.to_thread(_ask, served.at.grpc, play, play.prompt, console)
        _say(console, "the same prompt again: now it is in the cache, and the answer is the same")
        second = await asyncio.to_thread(_ask, served.at.grpc, play, play.prompt, console)
        _say(console, "the same beginning and another end: all layers take up what they have of it")
        other = play.prompt[: play.prompt.index(play.end_at)] + play.other_end
        third = await asyncio.to_thread(_ask, served.at.grpc, play, other, console)
        _say(console, "what happened")
        console.print(await _report(served.engine, first, second, third))
    _say(console, f"everything is shut down. Go on with: intarsia serve {play.model}")


def _ask(address: str, play: Play, prompt: str, console: Console) -> tuple[Usage, float]:
    """Stream one answer to the screen. Returns its usage and the seconds it took."""
    started = time.perf_counter()
    usage = None
    console.print("... " + prompt[max(prompt.rfind(". ") + 2, prompt.rfind("\n") + 1) :], style="dim", end="")
    with Client(address) as client:
        for chunk in client.generate(prompt, play.sampling):
            console.print(chunk.text, end="", soft_wrap=True, markup=False)
            usage = chunk.usage
    console.print()
    assert usage is not None
    return usage, time.perf_counter() - started


async def _report(engine: RunningEngine, *answers: tuple[Usage, float]) -> Table:
    stats, count, cache = await engine.stats(), await engine.recount(), await engine.client.questions.cache_state()
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
