"""The `intarsia` command: the parameters of each command. Its body is in the folder of its tool.

Nothing heavy is imported before a command runs, so that `--help` is quick. `Commands` turns errors into sentences.
"""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .load_test.flags import bench
from .settings.config_file import ConfiguredCommand, use_file
from .settings.flags import with_settings
from .settings.table import OF_BATCH, OF_SERVE
from .tools.usage import Commands

app = typer.Typer(
    name="intarsia",
    cls=Commands,
    help="Serve language models of mixed attention out of one paged KV block pool, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose panels cut the names of options short
)

# -- what several commands take ----------------------------------------------------------------------------------------

Config = Annotated[
    Path | None,
    typer.Option(is_eager=True, callback=use_file, help="YAML with any of these settings; flags come first."),
]
Url = Annotated[
    str | None, typer.Option(help="Of the server: http://HOST:PORT.  [default: the one you started last, here]")
]
CaCerts = Annotated[str | None, typer.Option(help="TLS: who may have signed the server's certificate, PEM.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app.add_typer(bench, name="bench")

# -- commands ----------------------------------------------------------------------------------------------------------


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        from .. import __version__

        typer.echo(f"intarsia {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Serve language models of mixed attention out of one paged KV block pool, on Ray."""


@app.command()
def demo() -> None:
    """Show the whole way once: a tiny hybrid model answers through gRPC from two tensor-parallel workers."""
    from .tools.demo_tour import run

    run()


@app.command(cls=ConfiguredCommand)
@with_settings(OF_SERVE)
def serve(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL_DIR",
            show_default=False,
            help="A Hugging Face checkpoint directory, a GGUF file, or its name on the Hub; none: --config lists some.",
        ),
    ] = None,
    config: Config = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every setting and where it comes from; start nothing.")
    ] = False,
) -> None:
    """Serve a model, or those of a file, over HTTP (OpenAI-compatible) and gRPC until stopped with Ctrl-C.

    Every setting is a flag, an environment variable (--kv-cache-memory: INTARSIA_KV_CACHE_MEMORY) and a key of the
    file that --config names (kv_cache_memory).
    """
    from .start.command import run

    run(context)


@app.command(cls=ConfiguredCommand)
@with_settings(OF_BATCH)
def batch(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, as OpenAI's batch lines.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the results go, one for each line, in their order.")],
    model: Annotated[
        Path, typer.Option(help="A Hugging Face checkpoint directory, a GGUF file, or its name on the Hub.")
    ],
    num_engines: Annotated[int, typer.Option(help="Engines that share the lines, each with the whole model.")] = 1,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, whatever earlier runs left.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if any line was refused.")] = False,
    config: Config = None,
) -> None:
    """Answer all requests of a file. Interrupted or killed, the same command goes on where it was.

    Exit status: 0 when every line has its result; 3 when none of them is an answer, when a line is no request (no JSON,
    or without custom_id), or with --strict when any was refused; 2 for a setting that cannot work; 130 when it was
    stopped.

    In a Ray cluster: ray job submit -- intarsia batch IN.jsonl -o OUT.jsonl --model MODEL_DIR
    """
    from .batch.command import run

    raise typer.Exit(run(context.params))


@app.command()
def top(
    url: Url = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="INTARSIA_ADMIN_KEY", help="Its admin key, if it was given one.")
    ] = None,
    ssl_ca_certs: CaCerts = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False,
) -> None:
    """Watch a running server: the pool, who runs, who waits and why, steps and workers."""
    from .tools.top import run

    run(url, admin_key, ssl_ca_certs, once=once, as_json=as_json)


@app.command()
def chat(
    url: Url = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="INTARSIA_API_KEY", help="A key of the server, if it wants one.")
    ] = None,
    ssl_ca_certs: CaCerts = None,
    system: Annotated[str | None, typer.Option(help="What the model is to keep in mind: a system message.")] = None,
) -> None:
    """Talk with a model. Without a running server it starts one with SmolLM2, where that is installed."""
    from .tools.chat import run

    run(url, api_key, ssl_ca_certs, system)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and what is missing: versions, GPUs, compiled kernels, the Ray cluster, the environment."""
    from .tools.doctor import run

    if not run(as_json):
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="A prompt of token ids instead: 1,2,3.")] = None,
    address: Annotated[str, typer.Option(help="Where the server listens.")] = "127.0.0.1:50051",
    api_key: Annotated[
        str | None, typer.Option(envvar="INTARSIA_API_KEY", help="What the server wants to see.")
    ] = None,
    ssl_ca_certs: CaCerts = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 takes the most probable token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k most probable tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the tokens that make up this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens less probable than this share of the best one.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    presence_penalty: Annotated[float, typer.Option(help="Less of what the answer has already; from -2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="... for each time it has it; from -2 to 2.")] = 0.0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Less of what prompt and answer have; 1: none.")
    ] = None,
    json_schema: Annotated[str | None, typer.Option(help="Answer in JSON of this schema.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer with a text that matches as a whole.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="Answer with one of these texts.")] = None,
    priority: Annotated[int, typer.Option(help="Smaller comes first.")] = 0,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds after which the answer is worth nothing.")] = None,
    keep_s: Annotated[
        float | None, typer.Option(help="Seconds for which the cache of prompt and answer is kept after it.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture for each image token of the prompt, in their order.")
    ] = None,
) -> None:
    """Ask a running server, and print the answer as it comes. Sampling is as the checkpoint asks unless options say."""
    from ..proto.request import RequestOptions
    from .tools.generate import Server, run

    sampling = dict[str, Any](
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        json_schema=json_schema,
        regex=regex,
        choice=tuple(choice or ()),
        ignore_eos=ignore_eos,
    )
    server, request_options = (
        Server(address, api_key, ssl_ca_certs),
        RequestOptions(priority=priority, timeout_s=timeout_s, keep_s=keep_s),
    )
    run(server, prompt, token_ids, image or (), request_options, sampling)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A checkpoint directory, a config.json, a GGUF file, or a known model's name.")
    ],
    kv_memory: Annotated[str, typer.Option(help="Memory for the cache, per rank.")] = "40GiB",
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share the model.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    context: Annotated[
        str | None, typer.Option(help="Request lengths to report: 2048,8192.  [default: usual ones]")
    ] = None,
    strategy: Annotated[str, typer.Option(help="auto, layered, packed, partitioned or uniform.")] = "auto",
    expected_average_seq_len: Annotated[
        str | None,
        typer.Option(
            envvar="EXPECTED_AVERAGE_SEQ_LENGTH",
            help="Tokens of a usual request; splits the memory of `partitioned`.  [default: from the model]",
        ),
    ] = None,
    encoder_tokens: Annotated[
        int, typer.Option(help="Tokens of an image, for models that look at one; 0: the model's own.", min=0)
    ] = 0,
    dtype: Annotated[str, typer.Option(help="Of cached numbers: bfloat16, float16, float32 or fp8.")] = "bfloat16",
    weights_format: Annotated[
        str | None,
        typer.Option(
            help="Count the weights as if they were in this format: fp8, nvfp4, q4_k_m ..  [default: as they are]"
        ),
    ] = None,
    as_json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw the plan to this file.")] = None,
) -> None:
    """Show how a model's cache would be laid out, how many requests it holds, and why."""
    from ..kvcache.plan import PlanSettings
    from .settings.sizes import parse_bytes, parse_expected_length
    from .tools.plan_command import run

    memory = parse_bytes(kv_memory, "kv_memory")
    expected = parse_expected_length(expected_average_seq_len, "expected_average_seq_len")
    settings = PlanSettings(memory, block_size, strategy, expected, encoder_tokens)
    run(model, settings, tensor_parallel_size, dtype, context, weights_format, as_json=as_json, svg=svg)


@app.command()
def prove(
    model: Annotated[str, typer.Argument(help="What `serve` takes.")],
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks, beside one.", min=1, max=64)] = 1,
    seeds: Annotated[
        int | None, typer.Option(help="Prove it anew, with so many draws of weights.", min=1, max=99)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute a small copy of a model here and by transformers, and compare. `serve` does so for untested families."""
    from .proof.report import run

    if not run(model, tensor_parallel_size, seeds, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def families(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print all of it, as a Markdown table.")] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Print the page of the documentation around it.")] = False,
) -> None:
    """Print the table of model families: what they keep, how it is laid out, which of them run."""
    from .tools.families import run

    run(as_markdown=as_markdown, as_page=docs)


@app.command()
def limits(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print them as a Markdown table.")] = False,
) -> None:
    """Print the limits of what clients may send and hold: each is a setting of `serve`."""
    from .settings.limits import as_text, markdown

    for line in markdown() if as_markdown else as_text():
        print(line)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace of operations, or of requests; see docs/replay.md.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a line per operation, or one object.")] = False,
    strategy: Annotated[
        str | None, typer.Option(help="auto, layered, packed, partitioned or uniform.  [default: the trace's own]")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="What to evict: worth, lru; optimum: what the best finds.  [default: the trace's own]"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="For requests: as for `plan`.  [default: gemma-3-27b]")] = None,
    kv_memory: Annotated[str, typer.Option(help="For requests: memory of the cache, or `unlimited`.")] = "40GiB",
    block_size: Annotated[
        int | None, typer.Option(help="For requests: tokens per block.  [default: the trace's own]")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1)] = None,
    longest_prompt: Annotated[int | None, typer.Option(help="Leave out longer prompts, or their sessions.")] = None,
    form: Annotated[str | None, typer.Option("--format", help="Of the trace.  [default: seen from the file]")] = None,
    rule: Annotated[
        str | None, typer.Option(help="r1 or r2: the textbook LRU over --blocks blocks instead of a model.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="For --rule: blocks of the cache.  [default: no limit]")] = None,
    forecast: Annotated[
        bool, typer.Option("--forecast", help="Also say what half, twice and four times the memory would find.")
    ] = False,
) -> None:
    """Run the cache manager alone, without a model, over a trace."""
    from .replay.command import run

    run(
        trace,
        form=form,
        strategy=strategy,
        policy=policy,
        as_json=as_json,
        model=model,
        kv_memory=kv_memory,
        block_size=block_size,
        limit=limit,
        longest_prompt=longest_prompt,
        rule=rule,
        blocks=blocks,
        forecast=forecast,
    )


def main() -> None:
    """Entry point of the `intarsia` command."""
    from .start.ending import ended_by_signals

    starts_engines = sys.argv[1:2] in (["serve"], ["batch"])
    with ended_by_signals() if starts_engines else contextlib.nullcontext():
        app()
