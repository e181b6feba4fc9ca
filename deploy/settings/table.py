"""The table of settings: each is written here once, and everything else is made of it.

    --max-num-seqs 8        INTARSIA_MAX_NUM_SEQS=8        max_num_seqs: 8        LLM(model, max_num_seqs=8)

A row is a key of a typed dictionary: its name, its type, and a `Setting` with the default, the component's field that
it fills, and the help text. Type checkers and editors therefore know the keyword arguments of `LLM`.

    flags.py                      flags of commands, variables, keys of the file that --config names
    options.py, start/serve.py    settings of the components
    pages.py                      docs/settings.md and the docstring of `LLM`

Nothing heavy is imported here, so that `--help` is quick.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypedDict

from .limits import rows as limit_rows
from .places import folder_of_tokenizer, kv_events, traces_endpoint
from .setting import BATCH, SERVE, Setting, count_of_bytes, in_order, rows_of, several, tokens
from .sizes import parse_expected_length


class LogLevel(StrEnum):
    """What is logged at the least."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


# A table: most rows in two lines.
# fmt: off

class EngineArguments(TypedDict, total=False):
    """What an engine takes beside its model: arguments of `LLM` and the Serve application, flags of the two commands.

    Numbers of tokens may be text with a unit ("32k", "1M"), and so may numbers of bytes ("64MiB", "10GB").
    """

    tensor_parallel_size: Annotated[int, Setting(
        1, "model.tensor_parallel_size", "Workers that share the model, one GPU each.", short="-tp")]
    block_size: Annotated[int, Setting(16, "plan.block_tokens", "Tokens per KV block.")]
    kv_cache_memory: Annotated[str | int | None, Setting(
        None, "plan.memory_bytes", "Memory for keys and values, per worker.", "what a GPU can spare; else 64MiB",
        read=count_of_bytes)]
    gpu_memory_utilization: Annotated[float, Setting(
        0.9, "engine.gpu_memory_utilization",
        "Share of a GPU's memory for weights, steps, and keys and values together.",
        more="Where kv_cache_memory is None.")]
    enable_prefix_caching: Annotated[bool, Setting(
        True, "engine.prefix_caching", "Reuse the blocks of known prompt prefixes.")]
    max_num_batched_tokens: Annotated[int | str | None, Setting(
        None, "scheduler.max_num_batched_tokens", "Most tokens in one step.", "2048 on a GPU, 512 on a CPU",
        read=tokens)]
    max_num_seqs: Annotated[int, Setting(64, "scheduler.max_num_seqs", "Most requests in one step.")]
    max_model_len: Annotated[int | str | None, Setting(
        None, "engine.max_model_len", "Most tokens of one request, prompt included: 32k, say.", "the model's own",
        read=tokens)]
    max_prefill_chunk_tokens: Annotated[int | str | None, Setting(
        None, "scheduler.max_prefill_chunk_tokens", "Most prompt tokens of one request in one step.", "all that fit",
        read=tokens)]
    strategy: Annotated[str, Setting(
        "auto", "plan.strategy", "How memory is laid out: auto, layered, packed, partitioned or uniform.")]
    expected_average_seq_len: Annotated[str | int | None, Setting(
        None, "plan.expected_average_seq_len", "Tokens of a usual request.", "from the model",
        read=parse_expected_length, variable="EXPECTED_AVERAGE_SEQ_LENGTH")]
    dtype: Annotated[str, Setting("auto", "model.dtype", "auto, float32, bfloat16 or float16.", more="auto: as saved.")]
    attention_backend: Annotated[str | None, Setting(
        None, "model.attention_backend", "native, triton, flash, flash-legacy, torch or reference.",
        "the first that fits")]
    max_images_per_request: Annotated[int, Setting(1, "engine.max_images_per_request", "Where the model takes images.")]
    prefill_share: Annotated[float, Setting(
        0.5, "scheduler.prefill_share",
        "Share of a step's time that prompts get at least while others decode; 1: all.",
        more="A prompt that ends with twice that borrows it from the next step.")]
    token_interval_ms: Annotated[float | None, Setting(
        None, "scheduler.token_interval_ms", "Milliseconds wanted between two tokens of an answer.",
        "as prefill_share has it", more="Prompts get what is left of them, and a block per step at least.")]
    priority_ageing_s: Annotated[float, Setting(
        30.0, "scheduler.ageing_s", "Seconds of waiting that make up for one level of priority.")]
    longest_prefix_first: Annotated[bool, Setting(
        False, "scheduler.longest_prefix_first", "Of those next in turn, take the one with most in the cache.")]
    swap_space: Annotated[str | int, Setting(
        0, "scheduler.swap_bytes", "Host memory per worker for the blocks of preempted requests, e.g. 4GiB.",
        more="They wait there if they are dearer to compute anew than to copy.", read=count_of_bytes)]
    lease_share: Annotated[float, Setting(
        0.0, "plan.lease_share", "Share of the cache memory that clients may have kept between turns; 0: none.",
        more="Requests have the rest: the longest one must fit beside it.")]
    lease_share_per_tenant: Annotated[float | None, Setting(
        None, "leases.share_per_tenant", "The same, of each tenant.", "all of lease_share")]
    max_lease_s: Annotated[float, Setting(3600.0, "leases.longest_s", "Seconds that a lease may last.")]
    max_wait_s: Annotated[float | None, Setting(
        None, "overload.max_wait_s", "Requests whose turn would come later are told to try again.", "they wait",
        more="In Python: `Overloaded`.", serving=60.0, follows="stream_interval_s", commands=(SERVE,))]
    max_waiting_tokens: Annotated[int | str, Setting(
        2**25, "overload.max_waiting_tokens", "Most tokens of prompts that wait for their turn.", read=tokens)]
    max_requests_per_tenant: Annotated[int | None, Setting(
        None, "overload.max_requests_per_tenant", "Most requests of one tenant, waiting and running.", "any number")]
    min_free_memory: Annotated[str | int, Setting(
        "256MiB", "overload.min_free_bytes", "Host memory to keep free: with less, new requests are told to try again.",
        read=count_of_bytes)]
    enforce_eager: Annotated[bool, Setting(
        False, "model.enforce_eager", "Run transformers' modules as they are written; slower.")]
    torch_compile: Annotated[bool, Setting(
        False, "model.torch_compile", "Compile the model with torch.compile; starting takes minutes.")]
    same_bits: Annotated[bool, Setting(
        False, "model.same_bits", "An answer has the same bits in any company, at any price.",
        more="On a CPU this holds without it, too, but where torch multiplies prompts much faster; the start tells. "
        "On a GPU it is of rows of one step: how a prompt is cut still matters.")]
    packed_products: Annotated[str, Setting(
        "auto", "model.packed_products", "How weights in fewer bits are multiplied: auto, cpu, cpu-int8, triton, "
        "reference or expanded.",
        more="cpu keeps them as they are stored, and triton does on a GPU; cpu-int8 is faster and rounds what they are "
        "multiplied with to 8 bits; expanded makes them 16 bits when they are loaded. auto is what the device has of "
        "these, with cpu-int8 for checkpoints that are meant so: W8A8, GGUF. reference keeps them, too, and is slow.")]
    cpu_threads: Annotated[int | None, Setting(
        None, "model.cpu_threads", "Threads of a worker without GPU.", "its cores, one less in short steps")]
    trust_remote_code: Annotated[bool, Setting(
        False, "model.trust_remote_code", "Run Python files that come with the checkpoint.")]
    generation_config: Annotated[str, Setting(
        "auto", "engine.generation_config",
        '"auto": sample as the checkpoint asks, unless a request does; "none": do not.',
        more="What it asks is in its generation_config.json.")]
    tokenizer: Annotated[str | None, Setting(
        None, "model.tokenizer_dir", "A folder with another tokenizer, or its name on the Hub.", "the model's",
        read=folder_of_tokenizer)]
    chat_template: Annotated[str | None, Setting(
        None, "model.chat_template", "A file with another chat template, Jinja.", "the tokenizer's")]
    served_model_name: Annotated[str | None, Setting(
        None, "engine.served_model_name", "What clients call the model.", "its folder's name")]
    revision: Annotated[str | None, Setting(
        None, "hub.revision", "Branch, tag or commit of a model on the Hub.", "main",
        more="A model that is in the Hub's cache is taken from there, without asking whether a branch has moved.")]
    otlp_traces_endpoint: Annotated[str | None, Setting(
        None, "model.traces_endpoint", "Send OpenTelemetry traces there, OTLP over HTTP.", "none",
        read=traces_endpoint)]
    kv_events_config: Annotated[str | Mapping[str, Any] | None, Setting(
        None, "engine.kv_events", "Send cache events over ZeroMQ, as vLLM does and in its JSON.", "none",
        more="Fields: enable_kv_cache_events, endpoint, replay_endpoint, topic, buffer_steps, hwm, max_queue_size.",
        read=kv_events)]
    name: Annotated[str | None, Setting(None, "engine.name", "Name of the engine in the Ray cluster.", "drawn")]
    give_up_after_s: Annotated[float, Setting(
        120.0, "engine.give_up_after_s",
        "Seconds in which processes are lost again and again, and no step is completed.")]
    insecure_ray: Annotated[bool, Setting(
        False, "engine.insecure_ray", "Use a Ray that asks for no token: who reaches it runs code here.")]


class ServerArguments(TypedDict, total=False):
    """What `serve` takes beside: where it listens, who may connect, how answers leave. Limits are in `limits.py`."""

    host: Annotated[str, Setting(
        "127.0.0.1", "server.host", "Where to listen; beyond loopback only with keys and TLS.")]
    port: Annotated[int, Setting(8000, "server.port", "Port for HTTP; 0 takes a free one.", most=65535)]
    grpc_port: Annotated[int, Setting(50051, "server.grpc_port", "Port for gRPC; 0 takes a free one.", most=65535)]
    root_path: Annotated[str, Setting("", "server.root_path", "Where a proxy shows the HTTP server: /llm, say.")]
    allowed_origins: Annotated[Sequence[str] | None, Setting(
        None, "server.allowed_origins",
        "Where pages may come from whose scripts ask, as https://app.example; * is anywhere.", read=several)]
    image_hosts: Annotated[Sequence[str] | None, Setting(
        None, "front_end.image_hosts", "A host from which images are fetched by https, as images.example or *.example.",
        read=several)]
    open_objects: Annotated[bool, Setting(
        False, "front_end.open_objects", "Objects may have properties that their JSON schema does not name.")]
    prepare_next_turns: Annotated[bool, Setting(
        False, "front_end.prepare_next_turns",
        "After an answer, compute the next turn of the chat up to its own words, while no request waits.")]
    tool_call_parser: Annotated[str | None, Setting(
        None, "front_end.tool_call_parser", "How the model writes calls, by a format's name; none: it does not.",
        "as its chat template shows")]
    reasoning_parser: Annotated[str | None, Setting(
        None, "front_end.reasoning_parser", "How it writes thoughts, by a format's name; none: it does not.",
        "as its chat template shows")]
    api_key: Annotated[Sequence[str] | None, Setting(
        None, "access.api_key", "A key that clients must send; may be given several times.", read=several)]
    api_key_file: Annotated[str | None, Setting(None, "access.api_key_file", "A file of such keys, one on each line.")]
    admin_key: Annotated[Sequence[str] | None, Setting(
        None, "access.admin_key", "A key for the console at /console.", "drawn, and printed", read=several)]
    admin_key_file: Annotated[str | None, Setting(
        None, "access.admin_key_file", "A file of such keys, one on each line.")]
    console_prompts: Annotated[bool, Setting(
        False, "console.show_prompts", "Show texts of prompts and answers in the console.")]
    request_log: Annotated[str | None, Setting(
        None, "server.request_log", "Write a line of each request, as line or json: tokens, times, its end.", "none")]
    store_responses: Annotated[bool, Setting(
        True, "store.store_responses", "Keep answers of /v1/responses on disk, unless they say store: false.")]
    response_folder: Annotated[str | None, Setting(
        None, "store.folder", "Where they are kept, a file for each port.", "~/.local/state/intarsia/responses",
        more="With port 0 and no folder they are forgotten with the server.")]
    ssl_certfile: Annotated[str | None, Setting(None, "access.ssl_certfile", "TLS: the server's certificate, PEM.")]
    ssl_keyfile: Annotated[str | None, Setting(None, "access.ssl_keyfile", "TLS: its key, PEM.")]
    ssl_ca_certs: Annotated[str | None, Setting(
        None, "access.ssl_ca_certs", "TLS: clients need a certificate too, signed by one of these, PEM.")]
    insecure: Annotated[bool, Setting(
        False, "access.insecure", "Listen where other machines can connect, without keys or TLS.")]
    stream_interval_s: Annotated[float, Setting(
        0.0, "front_end.stream_interval_s",
        "Seconds between the pieces of a streamed answer; 0: each token by itself.")]
    max_streams: Annotated[int, Setting(
        4096, "front_end.max_streams", "Most requests being answered; more are told to try again.")]
    drain_timeout_s: Annotated[float, Setting(
        60.0, "server.drain_timeout_s", "Seconds for running requests to end when the server is to stop.")]


class CommandArguments(TypedDict, total=False):
    """What only the commands take, and act on themselves."""

    disable_hybrid_kv_cache_manager: Annotated[bool, Setting(
        False, "", "Every layer keeps every token: strategy uniform.", follows="strategy")]
    log_level: Annotated[LogLevel | None, Setting(
        None, "", "What else is logged, at the least.", "warning; in Ray's logs info", follows="request_log",
        commands=(SERVE,))]


# fmt: on


def _limits() -> Iterator[Setting]:
    """The limits of the door have a table of their own, since each has a unit and an answer, too."""
    for row in limit_rows():
        about, kind = f"{row.about} ({row.unit})", type(row.default)
        yield Setting(row.default, f"limits.{row.name}", about, name=row.name, kind=kind, commands=(SERVE,))


ENGINE: tuple[Setting, ...] = tuple(rows_of(EngineArguments))
LIMITS: tuple[Setting, ...] = tuple(_limits())
SERVER: tuple[Setting, ...] = (*rows_of(ServerArguments, commands=(SERVE,)), *LIMITS)

OF_SERVE: list[Setting] = in_order([*ENGINE, *SERVER, *rows_of(CommandArguments)])
OF_BATCH: list[Setting] = [row for row in OF_SERVE if BATCH in row.commands]
"""What the commands take, as their --help shows it."""
