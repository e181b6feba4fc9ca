"""The flags of `intarsia bench serve`. Nothing heavy is imported before it runs."""

from pathlib import Path
from typing import Annotated

import typer

from ..tools.usage import Commands

bench = typer.Typer(cls=Commands, help="Measure a server.", no_args_is_help=True, rich_markup_mode=None)


Endpoint = Annotated[str | None, typer.Option(help="completions or chat.  [default: completions; chat for agents]")]
ApiKey = Annotated[str | None, typer.Option(envvar="INTARSIA_API_KEY", help="A key of the server, if it wants one.")]
RangeRatio = Annotated[float, typer.Option(help="Lengths are drawn from 1 - RATIO to 1 + RATIO times these.")]
TokenIds = Annotated[
    int | None, typer.Option(metavar="VOCABULARY", help="Prompts of token ids below this, instead of words.")
]
RequestRate = Annotated[
    float, typer.Option(help="Sessions that begin per second (open loop).  [default: inf]", show_default=False)
]
Goodput = Annotated[
    list[str] | None, typer.Option(help="Count what keeps within: ttft:500, tpot:50, e2el:9000; milliseconds.")
]


@bench.callback()
def options() -> None:
    """Measure a server."""


@bench.command()
def serve(
    url: Annotated[str | None, typer.Option(help="Of the server.  [default: the one you started last, here]")] = None,
    shape: Annotated[str, typer.Option(help="random, sharegpt, trace (Mooncake's format) or agents.")] = "random",
    endpoint: Endpoint = None,
    model: Annotated[str | None, typer.Option(help="As requests name it.  [default: the server's first]")] = None,
    api_key: ApiKey = None,
    sessions: Annotated[int, typer.Option("--num-prompts", "--sessions", help="How many.")] = 100,
    input_length: Annotated[int, typer.Option("--input-len", help="Of a prompt, or of a turn's new words.")] = 512,
    output_length: Annotated[int, typer.Option("--output-len", help="Most tokens of an answer.")] = 128,
    range_ratio: RangeRatio = 0.0,
    prefix_length: Annotated[int, typer.Option("--prefix-len", help="Words that all prompts begin with.")] = 0,
    turns: Annotated[int, typer.Option(help="Of each agent.")] = 8,
    kinds: Annotated[int, typer.Option(help="Of agents, each with instructions of its own.")] = 4,
    pause_s: Annotated[float, typer.Option(help="The median of an agent's pauses, in which a tool runs.")] = 2.0,
    no_tools: Annotated[bool, typer.Option("--no-tools", help="Agents tell of no tools.")] = False,
    path: Annotated[Path | None, typer.Option(help="A trace, or conversations in ShareGPT's format.")] = None,
    speed: Annotated[float, typer.Option(help="Times as fast as a trace's own clock.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Lengths of a trace times this.")] = 1.0,
    token_ids: TokenIds = None,
    request_rate: RequestRate = float("inf"),
    burstiness: Annotated[float, typer.Option(help="1: as Poisson has it; smaller: in bursts.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most sessions at once (closed loop).")] = None,
    goodput: Goodput = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    keep_eos: Annotated[bool, typer.Option("--keep-eos", help="Answers may end before their length.")] = False,
    extra: Annotated[str | None, typer.Option("--extra-body", help="Further fields of each request, as JSON.")] = None,
    warm_up: Annotated[int, typer.Option(help="Requests that are sent before, and not measured.")] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write each request with its times, as JSON.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw latencies over time to this file.")] = None,
) -> None:
    """Load any server of OpenAI's API and say what it made of it. Exit status 1 if a request failed."""
    from .command import Asked, fields_of, run
    from .drive import DriveSettings
    from .shapes import ShapeSettings

    what = sessions, input_length, output_length, range_ratio, prefix_length, turns, kinds, pause_s
    shaped = ShapeSettings(*what, seed, path, speed, scale)
    how = request_rate, burstiness, max_concurrency, seed, not keep_eos, temperature, not no_tools
    driven = DriveSettings(*how, fields_of(extra))
    limits = tuple(goodput or ())
    asked = Asked(url, endpoint, api_key, model, shape, shaped, token_ids, driven, limits, warm_up, as_json, out, svg)
    if not run(asked):
        raise typer.Exit(1)
