"""What Prometheus scrapes. Names and labels are those that the field's dashboards ask for (`vllm:...`); what only a
hybrid cache has to say is called `intarsia:...`.

`deploy/cluster/grafana.json` is a dashboard of both; a test asks it for nothing that is not here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from ...controller.metrics import Distribution, Metrics
from ...kvcache.misses import LOST
from ...proto.leases import LeaseCounts
from ...proto.status import CacheState, EngineInfo, EngineLoad, PreparedMetrics

Read = Callable[[EngineLoad], float]

GAUGES: dict[str, tuple[str, Read]] = {
    "vllm:num_requests_running": ("Requests in the running batch.", lambda load: load.running),
    "vllm:num_requests_waiting": ("Requests that wait for their turn.", lambda load: load.waiting),
    "vllm:kv_cache_usage_perc": (
        "Share of the block pool that requests hold, from 0 to 1.",
        lambda load: load.pool_use,
    ),
}

COUNTERS: dict[str, tuple[str, Read]] = {
    "vllm:prompt_tokens": ("Tokens of prompts.", lambda load: load.prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated.", lambda load: load.generated_tokens),
    "vllm:prefix_cache_queries": (
        "Tokens of prompts that were looked up in the prefix cache.",
        lambda load: load.prompt_tokens,
    ),
    "vllm:prefix_cache_hits": ("Tokens of prompts that were found there.", lambda load: load.cached_tokens),
    "vllm:num_preemptions": ("Requests whose blocks were taken away for a while.", lambda load: load.preemptions),
    "intarsia:requests_aborted": ("Answers whose caller left.", lambda load: load.aborted_requests),
    "intarsia:requests_expired": ("Answers whose time was over.", lambda load: load.expired_requests),
    "intarsia:requests_refused": (
        "Requests turned away because more came than can be served.",
        lambda load: load.refused_requests,
    ),
    "intarsia:worker_rebuilds": ("Times that workers were lost and built again.", lambda load: load.rebuilds),
    "intarsia:steps": ("Forward passes.", lambda load: load.steps),
}

DISTRIBUTIONS: dict[str, tuple[str, str]] = {
    "vllm:time_to_first_token_seconds": ("From a request's arrival to its first token.", "first_token_s"),
    "vllm:inter_token_latency_seconds": ("From a token of an answer to its next.", "between_tokens_s"),
    "vllm:request_time_per_output_token_seconds": (
        "The same, as the mean over each whole answer.",
        "mean_between_tokens_s",
    ),
    "vllm:e2e_request_latency_seconds": ("From a request's arrival to its last token.", "request_s"),
    "vllm:request_queue_time_seconds": ("From a request's arrival to its first admission.", "queue_s"),
    "vllm:request_inference_time_seconds": ("From its first admission to its last token.", "inference_s"),
    "vllm:request_prefill_time_seconds": ("From its first admission to its first token.", "prefill_s"),
    "vllm:request_decode_time_seconds": ("From its first token to its last.", "decode_s"),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", "prompt_tokens"),
    "vllm:request_prefill_kv_computed_tokens": (
        "Tokens of a prompt that were not found in the cache.",
        "computed_prompt_tokens",
    ),
    "vllm:request_generation_tokens": ("Tokens of an answer.", "generated_tokens"),
    "vllm:request_params_max_tokens": ("Tokens that a request allows for an answer.", "max_tokens"),
    "vllm:request_params_n": ("Answers that a request asks for.", "answers"),
    "vllm:request_num_preemptions": ("Times that an answer's blocks were taken away for a while.", "preemptions"),
    "vllm:iteration_tokens_total": ("Tokens of prompts computed, and tokens drawn, in a step.", "step_tokens"),
}


class KeptFigures(NamedTuple):
    """Of responses."""

    kept: int
    kept_bytes: int
    running: int  # in the background


RESPONSES = {
    "intarsia:stored_responses": "Responses and conversations that are kept on disk.",
    "intarsia:stored_response_bytes": "Their bytes.",
    "intarsia:background_responses": "Responses that are being made in the background.",
}
"""In the order of `KeptFigures`."""

REASONS = ("stop", "length", "abort", "deadline", "error")
"""Why answers end. All are told from the start, so that rates begin with the first of each."""

LEASE_RESULTS = ("granted", "refused", "taken_over", "expired", "released", "lost")
"""What becomes of leases: `LeaseCounts` has them."""


class Measured(NamedTuple):
    """What one engine says of itself. cache, metrics: None for a tenant."""

    info: EngineInfo
    load: EngineLoad
    cache: CacheState | None
    metrics: Metrics | None


def render(engines: Sequence[Measured], accept: str = "", responses: KeptFigures | None = None) -> tuple[bytes, str]:
    """What engines say of themselves, each under its model's name, and the content type: OpenMetrics where the `Accept`
    header asks for it, else Prometheus's own text. To a tenant: only the counts of its own requests, and nothing of the
    process, whose memory and time tell of the others. responses: where some are kept."""
    registry = CollectorRegistry()
    registry.register(
        _Together([_Families(*engine, responses if n == 0 else None) for n, engine in enumerate(engines)])
    )
    if engines[0].cache is not None:
        ProcessCollector(registry=registry)
    if "application/openmetrics-text" in accept:
        # Our names need no escaping; prometheus_client's usual one makes underscores of their colons.
        return openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return exposition.generate_latest(registry), exposition.CONTENT_TYPE_LATEST


class _Together:
    """The families of several engines: each name stands once, with what all of them say of it."""

    def __init__(self, each: "Sequence[_Families]"):
        self._each = each

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for families in self._each:
            for family in families.collect():
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        yield from found.values()


class _Families:
    def __init__(
        self,
        info: EngineInfo,
        load: EngineLoad,
        cache: CacheState | None,
        measured: Metrics | None,
        responses: KeptFigures | None,
    ):
        self._responses = responses
        self._info = info
        self._load = load
        self._cache = cache
        self._measured = measured
        self._labels = {"model_name": info.model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for name, (about, read) in GAUGES.items():
            yield self._family(GaugeMetricFamily, name, about, [({}, read(self._load))])
        for name, (about, read) in COUNTERS.items():
            yield self._family(CounterMetricFamily, name, about, [({}, read(self._load))])
        yield from self._turns()
        yield self._config()
        if self._measured is not None:
            for name, (about, kind) in DISTRIBUTIONS.items():
                yield self._histogram(name, about, self._measured.distributions[kind])
            yield from self._ends(self._measured)
            yield from self._groups(self._measured)
            yield from self._forecasts(self._measured)
            if self._measured.prepared is not None:
                yield from self._prepared(self._measured.prepared)
            if self._info.lease_blocks:
                yield from self._leases(self._measured.leases)
        if self._cache is not None:
            yield self._pool(self._cache)
        if self._responses is not None:
            for (name, about), value in zip(RESPONSES.items(), self._responses, strict=True):
                yield self._family(GaugeMetricFamily, name, about, [({}, value)])

    def _turns(self) -> Iterator[Metric]:
        """By reason, as vLLM has them. Here a request waits and is turned away for one alone."""
        waiting = [({"reason": "capacity"}, self._load.waiting), ({"reason": "deferred"}, 0)]
        about = "Requests that wait for their turn, by why: all for room."
        yield self._family(GaugeMetricFamily, "vllm:num_requests_waiting_by_reason", about, waiting)
        refused = [({"reason": "overloaded"}, self._load.refused_requests)]
        about = "Requests turned away because more came than can be served."
        yield self._family(CounterMetricFamily, "vllm:admission_rejections", about, refused)

    def _ends(self, measured: Metrics) -> Iterator[Metric]:
        finished = [({"finished_reason": reason}, measured.finished.get(reason, 0)) for reason in REASONS]
        yield self._family(CounterMetricFamily, "vllm:request_success", "Answers that ended, by why.", finished)
        lost = [({"cause": cause}, measured.lost_tokens.get(cause, 0)) for cause in LOST]
        about = "Tokens of prompts that were cached once and had to be computed again, by cause."
        yield self._family(CounterMetricFamily, "intarsia:prefix_tokens_lost", about, lost)

    def _pool(self, cache: CacheState) -> Metric:
        pages = {"held": cache.held_pages, "kept": cache.kept_pages, "blank": cache.blank_pages}
        values = [({"state": state}, count) for state, count in pages.items()]
        about = "Large pages: held by requests, free and kept for later prompts, or blank."
        return self._family(GaugeMetricFamily, "intarsia:pool_pages", about, values)

    def _config(self) -> Metric:
        info = self._info
        config = {
            "block_size": str(info.groups[0].block_tokens),
            "num_gpu_blocks": str(info.num_blocks),
            "enable_prefix_caching": str(info.enable_prefix_caching),
            "cache_dtype": info.dtype,
            "strategy": info.strategy,
            "kv_cache_size_tokens": str(int(info.max_len_concurrency * info.max_model_len)),
            "kv_cache_max_concurrency": f"{info.max_len_concurrency:.2f}",
        }
        return self._family(GaugeMetricFamily, "vllm:cache_config_info", "How the cache is laid out.", [(config, 1)])

    def _groups(self, measured: Metrics) -> Iterator[Metric]:
        """A group is named by its number and its kind: 0, sliding-1024."""
        groups = [({"group": str(g), "kind": group.kind}, group) for g, group in enumerate(measured.groups)]
        gauges: dict[str, tuple[str, Callable[[Any], float]]] = {
            "intarsia:group_held_blocks": ("Blocks that requests hold.", lambda group: group.held_blocks),
            "intarsia:group_known_blocks": ("Blocks that carry a known prefix.", lambda group: group.known_blocks),
            "intarsia:group_blocks": (
                "Blocks that the group could have, if all of its memory were its own.",
                lambda group: group.blocks,
            ),
        }
        for name, (about, read) in gauges.items():
            yield self._family(GaugeMetricFamily, name, about, [(labels, read(group)) for labels, group in groups])
        evicted = [(labels, group.evicted_blocks) for labels, group in groups]
        about = "Blocks whose known prefix made room for others."
        yield self._family(CounterMetricFamily, "intarsia:group_evicted_blocks", about, evicted)

    def _leases(self, counts: LeaseCounts) -> Iterator[Metric]:
        """Where the operator gives them a share."""
        results = [({"result": name}, getattr(counts, name)) for name in LEASE_RESULTS]
        about = "Leases of conversations, by what became of them."
        yield self._family(CounterMetricFamily, "intarsia:leases", about, results)
        yield self._family(GaugeMetricFamily, "intarsia:leases_held", "Leases that are held.", [({}, counts.held)])
        pages = [({"what": "held"}, counts.held_pages), ({"what": "limit"}, counts.limit_pages)]
        about = "Large pages of leases: held, and those that they may hold."
        yield self._family(GaugeMetricFamily, "intarsia:lease_pages", about, pages)

    def _forecasts(self, measured: Metrics) -> Iterator[Metric]:
        found = [
            ({"kind": forecast.kind, "memory": f"{scale:g}"}, share)
            for forecast in measured.forecasts
            for scale, share in forecast.found
        ]
        if found:
            about = "Share of prompts' tokens, of late, that so many times the memory finds; 1: what is really found."
            yield self._family(GaugeMetricFamily, "intarsia:prefix_hit_rate_forecast", about, found)

    def _prepared(self, prepared: PreparedMetrics) -> Iterator[Metric]:
        ends = [({"end": end}, count) for end, count in prepared.ends.items()]
        about = "Next turns of conversations that were to be prepared, by what became of them."
        yield self._family(CounterMetricFamily, "intarsia:prepared_prompts", about, ends)
        about = "Tokens of prompts that were computed before anybody had asked for them."
        yield self._family(CounterMetricFamily, "intarsia:prepared_tokens", about, [({}, prepared.tokens)])
        about = "Times that what was being prepared gave way to a request."
        yield self._family(CounterMetricFamily, "intarsia:prepared_stops", about, [({}, prepared.stops)])

    def _family(self, make: Any, name: str, about: str, values: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
        family = make(name, about, labels=[*self._labels, *values[0][0]])
        for labels, value in values:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family

    def _histogram(self, name: str, about: str, measured: Distribution) -> Metric:
        family = HistogramMetricFamily(name, about, labels=list(self._labels))
        seen, buckets = 0, []
        for bound, count in zip((*measured.bounds, float("inf")), measured.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), seen))
        family.add_metric(list(self._labels.values()), buckets, measured.sum)
        return family
