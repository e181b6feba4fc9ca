"""The `intarsia` command. Nothing heavy is imported before a command runs, so that `--help` is quick."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .settings.config_file import ConfiguredCommand
from .settings.flags import with_settings
from .settings.setting import Setting, fields_of
from .settings.table import ENGINE, OF_BATCH, OF_SERVE, SERVER, LogLevel
from .start.log_level import log_from
from .tools.usage import Commands

if TYPE_CHECKING:
    from ..controller.startup import EngineSettings

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
        from .tools.demo_tour import run

        run()


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    from .settings.config_file import use_file

    with _plain_errors():
        return use_file(context, path)


Model = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face checkpoint directory, or its name on the Hub.")
]
Config = Annotated[
    Path | None,
    typer.Option(is_eager=True, callback=_use_file, help="YAML with any of these settings; flags come first."),
]


@app.command(cls=ConfiguredCommand)
@with_settings(OF_SERVE)
def serve(
    context: typer.Context,
    model: Model,
    config: Config = None,
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
            from .settings.config_file import describe

            print(describe(context), end="")
            return
        settings = _settings_before_start(context)
        from .start.serve import server_settings

        server = server_settings(**_of(SERVER, context.params))
        if (log_level := context.params["log_level"]) is not None:
            log_from(LogLevel(log_level))

        from .start.before_ray import begin_ahead

        begin_ahead()

        import asyncio

        from .start.ending import leave
        from .start.serve import serve as run

        print(f"loading {model} ...", flush=True)

        async def serve_and_leave() -> None:
            await run(settings, server)
            leave(0)  # there is nothing that the loop, Python or Ray should still do

        asyncio.run(serve_and_leave())


@app.command(cls=ConfiguredCommand)
@with_settings(OF_BATCH)
def batch(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, as OpenAI's batch lines.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the results go, one for each line, in their order.")],
    model: Annotated[Path, typer.Option(help="A Hugging Face checkpoint directory, or its name on the Hub.")],
    num_engines: Annotated[int, typer.Option(help="Engines that share the lines, each with the whole model.")] = 1,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, whatever earlier runs left.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if any line was refused.")] = False,
    config: Config = None,
) -> None:
    """Answer all requests of a file. Interrupted or killed, the same command goes on where it was.

    Exit status: 0 when every line has its result; 3 when none of them is an answer, or with --strict when one is not; 2
    for a setting that can not work; 130 when it was stopped.

    In a Ray cluster: ray job submit -- intarsia batch IN.jsonl -o OUT.jsonl --model MODEL_DIR
    """
    with _plain_errors():
        engine = _settings_before_start(context)

        from .start.before_ray import begin_ahead

        begin_ahead()

        from .batch.run import BatchSettings, main

        settings = BatchSettings(source, out, num_engines, restart, strict)
        raise typer.Exit(main(settings, engine))


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
        from .tools.top import find_server, show, show_once

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
        from .tools.chat import run

        run(url, api_key, ssl_ca_certs, system)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed and what is missing: versions, GPUs, compiled kernels, the Ray cluster, the environment."""
    from .tools.doctor import examine, print_findings, to_json

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
        from ..proto.request import SamplingParams, Terms
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

        from ..kvcache.plan import PlanSettings
        from .settings.sizes import parse_bytes, parse_expected_length, parse_lengths
        from .tools.model_layers import model_layers
        from .tools.plan import make_report, print_report

        settings = PlanSettings(
            parse_bytes(kv_memory, "kv_memory"),
            block_size,
            strategy,
            parse_expected_length(expected_average_seq_len, "expected_average_seq_len"),
            encoder_tokens,
        )
        report = make_report(
            model_layers(model, tensor_parallel_size, dtype), settings, parse_lengths(context), tensor_parallel_size
        )
        if svg is not None:
            from .tools.plan_svg import draw_plan

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
        from .tools.families import docs_page, family_rows, markdown, print_rows

        if not docs and not as_markdown:
            print_rows(family_rows())
            return
        for line in docs_page() if docs else markdown(family_rows()):
            print(line)


@app.command()
def limits() -> None:
    """Print the limits of what clients may send and hold: each is a setting of `serve`."""
    from .settings.limits import markdown

    for line in markdown():
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
    from .start.ending import ended_by_signals

    starts_engines = sys.argv[1:2] in (["serve"], ["batch"])
    with ended_by_signals() if starts_engines else contextlib.nullcontext():
        app()


def _of(rows: Sequence[Setting], params: Mapping[str, Any]) -> dict[str, Any]:
    """Of the parameters of a command, those that are in these rows."""
    return {row.name: params[row.name] for row in rows if row.name in params}


def _settings_before_start(context: typer.Context) -> "EngineSettings":
    """The settings of an engine among the parameters of a command, once all is judged that can be before anything slow
    is imported or started. Raises `ModelError` and `InvalidSetting`."""
    from .start.before_ray import check_start

    params = {**context.params, "model": str(context.params["model"])}
    check_start(is_insecure_fine=params["insecure_ray"])
    if "host" in params:
        _check_host(params)
    if params["disable_hybrid_kv_cache_manager"]:
        params["strategy"] = _uniform(params["strategy"])

    from .settings.options import engine_settings
    from .start.before_start import check_ports, judged

    settings = judged(params["model"], engine_settings(params["model"], **_of(ENGINE, params)))
    if "host" in params:
        check_ports(params["host"], {name: params[name] for name in ("port", "grpc_port")})
    return settings


def _check_host(params: Mapping[str, Any]) -> None:
    """Raises `InvalidSetting` for an address that strangers could reach."""
    from .front_end.access import Access, AccessSettings

    given = fields_of(SERVER, _of(SERVER, params))["access"]
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
