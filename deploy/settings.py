"""Flags and arguments, under the names the field uses, composed into the settings of the components."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from ..controller.gate import GateSettings
from ..controller.scheduler import SchedulerSettings
from ..controller.startup import EngineSettings
from ..errors import InvalidSetting
from ..kvcache.plan import PlanSettings
from ..workers.facts import ModelSettings
from .demo import DEMO, DEMO_MODEL_DIR, is_demo

CPU_KV_CACHE_MEMORY = "64MiB"

_UNITS: Mapping[str, int] = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def engine_settings(
    model: str,
    *,
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    kv_cache_memory: str | int | None = None,
    gpu_memory_utilization: float = 0.9,
    enable_prefix_caching: bool = True,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 64,
    max_model_len: int | None = None,
    max_prefill_chunk_tokens: int | None = None,
    prefill_share: float = 0.5,
    priority_ageing_s: float = 30.0,
    longest_prefix_first: bool = False,
    swap_space: str | int = 0,
    max_wait_s: float | None = None,
    max_waiting_tokens: int = 2**25,
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
    served_model_name: str | None = None,
    otlp_traces_endpoint: str | None = None,
    name: str | None = None,
    give_up_after_s: float = 120.0,
    insecure_ray: bool = False,
) -> EngineSettings:
    """Settings of an engine. Raises `InvalidSetting`, naming the field.

    kv_cache_memory: bytes per rank for keys and values, as a number or as text with a unit ("64MiB", "10GB"). None:
        what `gpu_memory_utilization` leaves of a GPU beside weights and steps; without a GPU, `CPU_KV_CACHE_MEMORY`
    """
    if is_demo(str(model)):
        model, served_model_name = str(DEMO_MODEL_DIR), served_model_name or DEMO
    memory = CPU_KV_CACHE_MEMORY if kv_cache_memory is None else kv_cache_memory
    return EngineSettings(
        model=ModelSettings(
            model_dir=str(model),
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            attention_backend=attention_backend,
            allow_generic=allow_generic,
            enforce_eager=enforce_eager,
            torch_compile=torch_compile,
            cpu_threads=cpu_threads,
            trust_remote_code=trust_remote_code,
            traces_endpoint=_traces_endpoint(otlp_traces_endpoint),
        ),
        plan=plan_settings(memory, block_size, strategy, expected_average_seq_len),
        scheduler=SchedulerSettings(
            max_num_seqs,
            max_num_batched_tokens,
            max_prefill_chunk_tokens,
            prefill_share,
            priority_ageing_s,
            longest_prefix_first,
            parse_bytes(swap_space, "swap_space"),
        ),
        gate=GateSettings(
            max_wait_s,
            max_waiting_tokens,
            max_requests_per_tenant=max_requests_per_tenant,
            min_free_bytes=parse_bytes(min_free_memory, "min_free_memory"),
        ),
        max_model_len=max_model_len,
        prefix_caching=enable_prefix_caching,
        gpu_memory_utilization=gpu_memory_utilization if kv_cache_memory is None else None,
        max_images_per_request=max_images_per_request,
        generation_config=generation_config,
        served_model_name=served_model_name,
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
    """Lengths in tokens from "2048,8192"; none for None."""
    try:
        return [int(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        raise InvalidSetting(
            f"context must be whole numbers of tokens, separated by commas; got {text!r}", field="context"
        ) from None


def _expected_length(value: str | int | None) -> int | None:
    if value is None or value == "":
        return None
    if re.fullmatch(r"\s*0*[1-9]\d*\s*", str(value)):
        return int(value)
    raise InvalidSetting(
        "expected_average_seq_len (EXPECTED_AVERAGE_SEQ_LENGTH) must be a positive whole number of tokens, "
        f"got {value!r}",
        field="expected_average_seq_len",
    )


def parse_bytes(value: Any, field: str) -> int:
    """A number of bytes from 1048576, "1048576", "1MiB" or "1 MB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].upper() not in _UNITS:
        raise InvalidSetting(
            f"{field} must be a number of bytes with an optional unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), "
            f"got {value!r}",
            field=field,
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


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
