"""Flags and arguments, under the names the field uses, composed into the settings of the components."""

import contextlib
from importlib.util import find_spec
from urllib.parse import urlsplit

from ...controller.admission.overload import GateSettings
from ...controller.scheduling.settings import SchedulerSettings
from ...controller.startup import EngineSettings
from ...errors import InvalidSetting
from ...kvcache.plan import PlanSettings
from ...proto.worker import ModelSettings
from ..checkpoints.model_dir import find_model
from .sizes import parse_bytes as parse_bytes
from .sizes import parse_tokens

CPU_KV_CACHE_MEMORY = "64MiB"


def engine_settings(
    model: str,
    *,
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    kv_cache_memory: str | int | None = None,
    gpu_memory_utilization: float = 0.9,
    enable_prefix_caching: bool = True,
    max_num_batched_tokens: int | str = 2048,
    max_num_seqs: int = 64,
    max_model_len: int | str | None = None,
    max_prefill_chunk_tokens: int | str | None = None,
    prefill_share: float = 0.5,
    priority_ageing_s: float = 30.0,
    longest_prefix_first: bool = False,
    swap_space: str | int = 0,
    max_wait_s: float | None = None,
    max_waiting_tokens: int | str = 2**25,
    max_requests_per_tenant: int | None = None,
    min_free_memory: str | int = "256MiB",
    strategy: str = "auto",
    expected_average_seq_len: str | int | None = None,
    dtype: str = "auto",
    attention_backend: str | None = None,
    max_images_per_request: int = 1,
    enforce_eager: bool = False,
    torch_compile: bool = False,
    cpu_threads: int | None = None,
    allow_generic: bool = False,
    trust_remote_code: bool = False,
    generation_config: str = "auto",
    tokenizer: str | None = None,
    chat_template: str | None = None,
    served_model_name: str | None = None,
    otlp_traces_endpoint: str | None = None,
    name: str | None = None,
    give_up_after_s: float = 120.0,
    insecure_ray: bool = False,
) -> EngineSettings:
    """Settings of an engine. Raises `InvalidSetting`, naming the field, and `ModelNotFound`.

    Numbers of tokens may be text with a unit, too: "32k", "1M".

    kv_cache_memory: bytes per rank for keys and values, as a number or as text with a unit ("64MiB", "10GB"). None:
        what `gpu_memory_utilization` leaves of a GPU beside weights and steps; without a GPU, `CPU_KV_CACHE_MEMORY`
    """
    found = find_model(str(model))
    memory = CPU_KV_CACHE_MEMORY if kv_cache_memory is None else kv_cache_memory
    return EngineSettings(
        model=ModelSettings(
            model_dir=str(found.path),
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            attention_backend=attention_backend,
            allow_generic=allow_generic,
            enforce_eager=enforce_eager,
            torch_compile=torch_compile,
            cpu_threads=cpu_threads,
            trust_remote_code=trust_remote_code,
            traces_endpoint=_traces_endpoint(otlp_traces_endpoint),
            tokenizer_dir=str(find_model(tokenizer).path) if tokenizer is not None else None,
            chat_template=chat_template,
        ),
        plan=plan_settings(memory, block_size, strategy, expected_average_seq_len),
        scheduler=SchedulerSettings(
            max_num_seqs,
            parse_tokens(max_num_batched_tokens, "max_num_batched_tokens"),
            _maybe_tokens(max_prefill_chunk_tokens, "max_prefill_chunk_tokens"),
            prefill_share,
            priority_ageing_s,
            longest_prefix_first,
            parse_bytes(swap_space, "swap_space"),
        ),
        gate=GateSettings(
            max_wait_s,
            parse_tokens(max_waiting_tokens, "max_waiting_tokens"),
            max_requests_per_tenant=max_requests_per_tenant,
            min_free_bytes=parse_bytes(min_free_memory, "min_free_memory"),
        ),
        max_model_len=_maybe_tokens(max_model_len, "max_model_len"),
        prefix_caching=enable_prefix_caching,
        gpu_memory_utilization=gpu_memory_utilization if kv_cache_memory is None else None,
        max_images_per_request=max_images_per_request,
        generation_config=generation_config,
        served_model_name=served_model_name or found.name,
        name=name,
        give_up_after_s=give_up_after_s,
        insecure_ray=insecure_ray,
    )


def plan_settings(
    memory: str | int,
    block_size: int,
    strategy: str = "auto",
    expected_average_seq_len: str | int | None = None,
    encoder_tokens: int = 0,
    memory_field: str = "kv_cache_memory",
) -> PlanSettings:
    """Settings of a memory plan. Raises `InvalidSetting`, naming the field; `memory_field` is what memory is called."""
    return PlanSettings(
        memory_bytes=parse_bytes(memory, memory_field),
        block_tokens=block_size,
        strategy=strategy,
        expected_average_seq_len=_expected_length(expected_average_seq_len),
        encoder_tokens=encoder_tokens,
    )


def parse_lengths(text: str | None) -> list[int]:
    """Lengths in tokens from "2048,8192" or "2K,8K"; none for None."""
    try:
        return [parse_tokens(part, "context") for part in text.split(",")] if text is not None else []
    except InvalidSetting:
        raise InvalidSetting(
            f"context must be whole numbers of tokens, separated by commas; got {text!r}", field="context"
        ) from None


def _maybe_tokens(value: str | int | None, field: str) -> int | None:
    return None if value is None else parse_tokens(value, field)


def _expected_length(value: str | int | None) -> int | None:
    if value is None or value == "":
        return None
    with contextlib.suppress(InvalidSetting):
        if (tokens := parse_tokens(value, "expected_average_seq_len")) > 0:
            return tokens
    raise InvalidSetting(
        "expected_average_seq_len (EXPECTED_AVERAGE_SEQ_LENGTH) must be a positive whole number of tokens, "
        f"got {value!r}",
        field="expected_average_seq_len",
    )


def _traces_endpoint(url: str | None) -> str | None:
    """Where traces go, if they can be sent from here."""
    if url is None:
        return None
    if urlsplit(url).scheme not in ("http", "https"):
        raise InvalidSetting(
            f"otlp_traces_endpoint must be a URL that takes OTLP over HTTP (http://HOST:4318/v1/traces), got {url!r}",
            field="otlp_traces_endpoint",
        )
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise InvalidSetting(
            "otlp_traces_endpoint needs OpenTelemetry's exporter: pip install 'intarsia[otel]'",
            field="otlp_traces_endpoint",
        )
    return url
