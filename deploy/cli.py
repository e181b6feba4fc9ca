"""The `intarsia` command. Nothing heavy is imported before a command runs, so that `--help` is quick."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .config import ConfiguredCommand, tokens
from .limits import rows as limit_rows
from .log_level import LogLevel, log_from
from .usage import Commands

if TYPE_CHECKING:
    from ..controller.startup import EngineSettings
    from .serve import ServerSettings

app = typer.Typer(
    name="intarsia",
    cls=Commands,
    help="Serve language models of mixed attention out of one paged KV block pool, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose panels cut the names of options short
)

DEFAULT_ADDRESS = "127.0.0.1:50051"


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
    with _plain_errors():
        from .demo.tour import run

        run()


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    from .config import use_file

    with _plain_errors():
        return use_file(context, path)


def _with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with a flag for each limit of the door, before its last two."""
    import inspect

    own = list(inspect.signature(command).parameters.values())
    added = [
        inspect.Parameter(
            row.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=row.default,
            annotation=Annotated[type(row.default), typer.Option(help=f"{row.about} ({row.unit})")],
        )
        for row in limit_rows()
    ]

    @functools.wraps(command)
    def run(context: typer.Context, **given: Any) -> None:
        command(context, **{parameter.name: given[parameter.name] for parameter in own[1:]})

    run.__signature__ = inspect.Signature([*own[:-2], *added, *own[-2:]])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    return run


@app.command(cls=ConfiguredCommand)
@_with_limits
def serve(
    context: typer.Context,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face checkpoint directory, or its name on the Hub.")
    ],
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="Workers that share the model, one GPU each.")
    ] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(help="Memory for keys and values, per worker.  [default: what a GPU can spare; else 64MiB]"),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory for weights, steps, and keys and values together.")
    ] = 0.9,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse the blocks of known prompt prefixes.")] = True,
    max_num_batched_tokens: Annotated[
        int, typer.Option(parser=tokens("max_num_batched_tokens"), help="Most tokens in one step.")
    ] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests in one step.")] = 64,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            parser=tokens("max_model_len"),
            help="Most tokens of one request, prompt included: 32k, say.  [default: the model's own]",
        ),
    ] = None,
    max_prefill_chunk_tokens: Annotated[
        int | None,
        typer.Option(
            parser=tokens("max_prefill_chunk_tokens"),
            help="Most prompt tokens of one request in one step.  [default: all that fit]",
        ),
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="How memory is laid out: auto, layered, packed, partitioned or uniform.")
    ] = "auto",
    disable_hybrid_kv_cache_manager: Annotated[
        bool, typer.Option("--disable-hybrid-kv-cache-manager", help="Every layer keeps every token: strategy uniform.")
    ] = False,
    expected_average_seq_len: Annotated[
        str | None,
        typer.Option(
            envvar="EXPECTED_AVERAGE_SEQ_LENGTH", help="Tokens of a usual request.  [default: from the model]"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    attention_backend: Annotated[
        str | None,
        typer.Option(help="native, triton, flash, flash-legacy, torch or reference.  [default: the first that fits]"),
    ] = None,
    max_images_per_request: Annotated[int, typer.Option(help="Where the model takes images.")] = 1,
    prefill_share: Annotated[
        float, typer.Option(help="Share of a step's time that prompts get at least while others decode; 1: all.")
    ] = 0.5,
    priority_ageing_s: Annotated[
        float, typer.Option(help="Seconds of waiting that make up for one level of priority.")
    ] = 30.0,
    longest_prefix_first: Annotated[
        bool, typer.Option("--longest-prefix-first", help="Of those next in turn, take the one with most in the cache.")
    ] = False,
    swap_space: Annotated[
        str, typer.Option(help="Host memory per worker for the blocks of preempted requests, e.g. 4GiB.")
    ] = "0",
    max_waiting_tokens: Annotated[
        int, typer.Option(parser=tokens("max_waiting_tokens"), help="Most tokens of prompts that wait for their turn.")
    ] = 2**25,
    max_requests_per_tenant: Annotated[
        int | None, typer.Option(help="Most requests of one tenant, waiting and running.  [default: any number]")
    ] = None,
    min_free_memory: Annotated[
        str, typer.Option(help="Host memory to keep free: with less, new requests are told to try again.")
    ] = "256MiB",
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Run transformers' modules as they are written; slower.")
    ] = False,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Compile the model with torch.compile; starting takes minutes.")
    ] = False,
    cpu_threads: Annotated[
        int | None, typer.Option(help="Threads of a worker without GPU.  [default: its cores, one less in short steps]")
    ] = None,
    allow_generic: Annotated[
        bool, typer.Option("--allow-generic", help="Try an architecture that nobody has tested, as plain attention.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the checkpoint.")
    ] = False,
    generation_config: Annotated[
        str, typer.Option(help='"auto": sample as the checkpoint asks, unless a request does; "none": do not.')
    ] = "auto",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A folder with another tokenizer, or its name on the Hub.  [default: the model's]"),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A file with another chat template, Jinja.  [default: the tokenizer's]")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model.  [default: its folder's name]")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="Send OpenTelemetry traces there, OTLP over HTTP.  [default: none]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the engine in the Ray cluster.  [default: drawn]")] = None,
    give_up_after_s: Annotated[
        float, typer.Option(help="Seconds in which processes are lost again and again, and no step is completed.")
    ] = 120.0,
    insecure_ray: Annotated[
        bool, typer.Option("--insecure-ray", help="Use a Ray that asks for no token: who reaches it runs code here.")
    ] = False,
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with keys and TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for HTTP; 0 takes a free one.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Port for gRPC; 0 takes a free one.", min=0, max=65535)] = 50051,
    root_path: Annotated[str, typer.Option(help="Where a proxy shows the HTTP server: /llm, say.")] = "",
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Where pages may come from whose scripts ask, as https://app.example; * is anywhere."),
    ] = None,
    image_hosts: Annotated[
        list[str] | None,
        typer.Option(help="A host from which images are fetched by https, as images.example or *.example."),
    ] = None,
    open_objects: Annotated[
        bool, typer.Option("--open-objects", help="Objects may have properties that their JSON schema does not name.")
    ] = False,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send; may be given several times.")
    ] = None,
    api_key_file: Annotated[str | None, typer.Option(help="A file of such keys, one on each line.")] = None,
    admin_key: Annotated[
        list[str] | None, typer.Option(help="A key for the console at /console.  [default: drawn, and printed]")
    ] = None,
    admin_key_file: Annotated[str | None, typer.Option(help="A file of such keys, one on each line.")] = None,
    console_prompts: Annotated[
        bool, typer.Option("--console-prompts", help="Show texts of prompts and answers in the console.")
    ] = False,
    request_log: Annotated[
        str | None,
        typer.Option(help="Write a line of each request, as line or json: tokens, times, its end.  [default: none]"),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="What else is logged, at the least.  [default: warning; in Ray's logs info]"),
    ] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="TLS: the server's certificate, PEM.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="TLS: its key, PEM.")] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="TLS: clients need a certificate too, signed by one of these, PEM.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen where other machines can connect, without keys or TLS.")
    ] = False,
    stream_interval_s: Annotated[
        float, typer.Option(help="Seconds between the pieces of a streamed answer; 0: each token by itself.")
    ] = 0.0,
    max_wait_s: Annotated[
        float | None, typer.Option(help="Requests whose turn would come later are told to try again.")
    ] = 60.0,
    max_streams: Annotated[int, typer.Option(help="Most requests being answered; more are told to try again.")] = 4096,
    drain_timeout_s: Annotated[
        float, typer.Option(help="Seconds for running requests to end when the server is to stop.")
    ] = 60.0,
    config: Annotated[
        Path | None,
        typer.Option(is_eager=True, callback=_use_file, help="YAML with any of these settings; flags come first."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every setting and where it comes from; start nothing.")
    ] = False,
) -> None:
    """Serve a model over HTTP (OpenAI-compatible) and gRPC until stopped with Ctrl-C.

    Every setting is a flag, an environment variable (--kv-cache-memory: INTARSIA_KV_CACHE_MEMORY) and a key of the
    file that --config names (kv_cache_memory).
    """
    with _plain_errors():
        if print_config:
            from .config import describe

            print(describe(context), end="")
            return
        settings = _settings_before_start(context)
        server = _server_settings(context.params)
        if log_level is not None:
            log_from(log_level)

        from ..controller.before_ray import begin_ahead

        begin_ahead()

        import asyncio

        from .ending import leave
        from .serve import serve as run

        print(f"loading {model} ...", flush=True)

        async def serve_and_leave() -> None:
            await run(settings, server)
            leave(0)  # there is nothing that the loop, Python or Ray should still do

        asyncio.run(serve_and_leave())


def _batch(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, as OpenAI's batch lines.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the results go, one for each line, in their order.")],
    model: Annotated[Path, typer.Option(help="A Hugging Face checkpoint directory, or its name on the Hub.")],
    num_engines: Annotated[int, typer.Option(help="Engines that share the lines, each with the whole model.")] = 1,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, whatever earlier runs left.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if any line was refused.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(is_eager=True, callback=_use_file, help="YAML with any of these settings; flags come first."),
    ] = None,
) -> None:
    """Answer all requests of a file. Interrupted or killed, the same command goes on where it was.

    Exit status: 0 when every line has its result; 3 when none of them is an answer, or with --strict when one is not; 2
    for a setting that can not work; 130 when it was stopped.

    In a Ray cluster: ray job submit -- intarsia batch IN.jsonl -o OUT.jsonl --model MODEL_DIR
    """
    with _plain_errors():
        engine = _settings_before_start(context)

        from ..controller.before_ray import begin_ahead

        begin_ahead()

        from .batch.run import BatchSettings, main

        settings = BatchSettings(source, out, num_engines, restart, strict)
        raise typer.Exit(main(settings, engine))


def _with_engine_settings(command: Callable[..., None], after: str) -> Callable[..., None]:
    """A command that also takes what `serve` does for its engine, after one of its own parameters."""
    import inspect

    named = inspect.signature(serve).parameters
    names = list(named)
    shared = [named[name] for name in names[names.index("tensor_parallel_size") : names.index("host")]]
    own = list(inspect.signature(command).parameters.values())
    place = [parameter.name for parameter in own].index(after) + 1

    def run(context: typer.Context, **given: Any) -> None:
        command(context, **{parameter.name: given[parameter.name] for parameter in own[1:]})

    run.__signature__ = inspect.Signature([*own[:place], *shared, *own[place:]])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    run.__doc__ = command.__doc__
    return run


app.command("batch", cls=ConfiguredCommand)(_with_engine_settings(_batch, after="model"))


@app.command()
def top(
    url: Annotated[
        str | None, typer.Option(help="Of the server: http://HOST:PORT.  [default: the one you started last, here]")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="INTARSIA_ADMIN_KEY", help="Its admin key, if it was given one.")
    ] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="TLS: who may have signed the server's certificate, PEM.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False,
) -> None:
    """Watch a running server: the pool, who runs, who waits and why, steps and workers."""
    with _plain_errors():
        from ..errors import InvalidSetting
        from .top import find_server, show, show_once

        if as_json and not once:
            raise InvalidSetting("--json is for --once", field="json")
        server = find_server(url, admin_key, ssl_ca_certs)
        if once:
            show_once(server, as_json=as_json)
        else:
            show(server)


@app.command()
def chat(
    url: Annotated[
        str | None, typer.Option(help="Of the server: http://HOST:PORT.  [default: the one you started last, here]")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="INTARSIA_API_KEY", help="A key of the server, if it wants one.")
    ] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="TLS: who may have signed the server's certificate, PEM.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is to keep in mind: a system message.")] = None,
) -> None:
    """Talk with a model. Without a running server it starts one with SmolLM2, where that is installed."""
    with _plain_errors():
        from .chat_terminal import run

        run(url, api_key, ssl_ca_certs, system)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed and what is missing: versions, GPUs, compiled kernels, the Ray cluster, the environment."""
    from .doctor import examine, print_findings, to_json

    findings = examine()
    if as_json:
        import json

        print(json.dumps(to_json(findings), indent=2))
    else:
        print_findings(findings)
    if not all(finding.is_fine for finding in findings):
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="A prompt of token ids instead: 1,2,3.")] = None,
    address: Annotated[str, typer.Option(help="Where the server listens.")] = DEFAULT_ADDRESS,
    api_key: Annotated[
        str | None, typer.Option(envvar="INTARSIA_API_KEY", help="What the server wants to see.")
    ] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="TLS: who may have signed the server's certificate, PEM.")
    ] = None,
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
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture for each image token of the prompt, in their order.")
    ] = None,
) -> None:
    """Ask a running server, and print the answer as it comes. Sampling is as the checkpoint asks unless options say."""
    with _plain_errors():
        from ..controller.request import SamplingParams, Terms
        from .client import Client, Tls

        wanted = dict[str, Any](
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
        said = {name: value for name, value in wanted.items() if value is not None}
        SamplingParams(**said)  # what is wrong with it is told before a server is asked
        terms = Terms(priority=priority, timeout_s=timeout_s)
        asked = _prompt(prompt, token_ids)
        tls = Tls(ca_certs=ssl_ca_certs) if ssl_ca_certs is not None else None
        with Client(address, api_key=api_key, tls=tls) as client:
            sampling, usage = client.model_info().sampling(**said), None
            for chunk in client.generate(asked, sampling, images=[_read(path) for path in image or ()], terms=terms):
                text = chunk.text if isinstance(asked, str) else "".join(f"{token} " for token in chunk.token_ids)
                print(text, end="", flush=True)
                usage = chunk.usage or usage
            print()
        if usage:
            print(
                f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
                f"{usage.completion_tokens} generated",
                file=sys.stderr,
            )


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A checkpoint directory, a config.json, or a known model's name.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw the plan to this file.")] = None,
) -> None:
    """Show how a model's cache would be laid out, how many requests it holds, and why."""
    with _plain_errors():
        import json

        from .model_layers import model_layers
        from .plan import make_report, print_report
        from .settings import parse_lengths, plan_settings

        settings = plan_settings(kv_memory, block_size, strategy, expected_average_seq_len, encoder_tokens, "kv_memory")
        report = make_report(
            model_layers(model, tensor_parallel_size, dtype), settings, parse_lengths(context), tensor_parallel_size
        )
        if svg is not None:
            from .plan_svg import draw_plan

            _write(svg, draw_plan(report))
        if as_json:
            print(json.dumps(report.to_json(), indent=2))
        else:
            print_report(report)
            if svg is not None:
                print(f"drawn: {svg}")


@app.command()
def families(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print all of it, as a Markdown table.")] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Print the page of the documentation around it.")] = False,
) -> None:
    """Print the table of model families: what they keep, how it is laid out, which of them run."""
    with _plain_errors():
        from .families import docs_page, family_rows, markdown, print_rows

        if not docs and not as_markdown:
            print_rows(family_rows())
            return
        for line in docs_page() if docs else markdown(family_rows()):
            print(line)


@app.command()
def limits(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print them as a Markdown table.")] = False,
) -> None:
    """Print the limits of what clients may send and hold: each is a setting of `serve`."""
    from .limits import as_text, markdown

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
        str | None, typer.Option(help="What to evict: lru-tiers, lru or score.  [default: the trace's own]")
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
) -> None:
    """Run the cache manager alone, without a model, over a trace."""
    with _plain_errors():
        from .replay.command import is_operations, replay_operations, replay_trace

        if is_operations(trace, form):
            replay_operations(trace, as_json=as_json, strategy=strategy, policy=policy)
        else:
            replay_trace(
                trace,
                model=model,
                kv_memory=kv_memory,
                strategy=strategy or "auto",
                policy=policy or "lru-tiers",
                block_size=block_size,
                limit=limit,
                longest_prompt=longest_prompt,
                form=form,
                rule=rule,
                blocks=blocks,
                as_json=as_json,
            )


def main() -> None:
    """Entry point of the `intarsia` command."""
    from .ending import ended_by_signals

    starts_engines = sys.argv[1:2] in (["serve"], ["batch"])
    with ended_by_signals() if starts_engines else contextlib.nullcontext():
        app()


def _those_of(function: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Of the parameters of a command, those that `function` takes."""
    import inspect

    return {name: params[name] for name in inspect.signature(function).parameters if name in params}


def _settings_before_start(context: typer.Context) -> "EngineSettings":
    """The settings of an engine among the parameters of a command, once all is judged that can be before anything slow
    is imported or started. Raises `ModelError` and `InvalidSetting`."""
    from ..controller.before_ray import check_start

    params = {**context.params, "model": str(context.params["model"])}
    check_start(is_insecure_fine=params["insecure_ray"])
    if "host" in params:
        _check_host(params)
    if params["disable_hybrid_kv_cache_manager"]:
        params["strategy"] = _uniform(params["strategy"])

    from .before_start import check_ports, judged
    from .settings import engine_settings

    settings = judged(params["model"], engine_settings(**_those_of(engine_settings, params)))
    if "host" in params:
        check_ports(params["host"], {name: params[name] for name in ("port", "grpc_port")})
    return settings


def _server_settings(params: Mapping[str, Any]) -> "ServerSettings":
    from .serve import server_settings

    limits = {row.name: params[row.name] for row in limit_rows()}
    return server_settings(**_those_of(server_settings, params), **limits)


def _check_host(params: Mapping[str, Any]) -> None:
    """Raises `InvalidSetting` for an address that strangers could reach."""
    from .access import Access, AccessSettings

    given = _those_of(AccessSettings, params)
    given |= {name: tuple(given[name] or ()) for name in ("api_key", "admin_key")}
    Access(AccessSettings(**given)).check_host(params["host"])


def _uniform(strategy: str) -> str:
    from ..errors import InvalidSetting

    if strategy not in ("auto", "uniform"):
        raise InvalidSetting(
            f"disable_hybrid_kv_cache_manager means strategy uniform, and strategy {strategy} is given; leave one out",
            field="strategy",
        )
    return "uniform"


def _read(path: Path) -> bytes:
    from ..errors import InvalidRequest

    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} can not be read: {error.strerror}", field="images") from None


def _write(path: Path, text: str) -> None:
    from ..errors import InvalidSetting

    try:
        path.write_text(text)
    except OSError as error:
        raise InvalidSetting(f"{path} can not be written: {error.strerror}", field="svg") from None


def _prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    from ..errors import InvalidRequest

    if (text is None) == (token_ids is None):
        raise InvalidRequest("give either a PROMPT or --token-ids", field="prompt")
    if text is not None:
        return text
    try:
        ids = [int(part) for part in (token_ids or "").split(",") if part.strip()]
    except ValueError:
        ids = [-1]
    if any(not 0 <= token < 2**32 for token in ids):
        raise InvalidRequest(
            f"--token-ids must be whole numbers from 0 on, separated by commas; got {token_ids!r}", field="token_ids"
        )
    return ids


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Our errors are one line for a person and exit status 2; Ctrl-C is a quiet 130."""
    from ..errors import IntarsiaError

    try:
        yield
    except IntarsiaError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
