"""What Prometheus scrapes. Names and labels are those that the field's dashboards ask for."""

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..controller.info import EngineInfo, EngineLoad

METRICS_TYPE = exposition.CONTENT_TYPE_LATEST

GAUGES = {
    "vllm:num_requests_running": ("Requests in the running batch.", lambda load: load.running),
    "vllm:num_requests_waiting": ("Requests that wait for their turn.", lambda load: load.waiting),
    "vllm:kv_cache_usage_perc": (
        "Share of the block pool that requests hold, from 0 to 1.",
        lambda load: load.pool_use,
    ),
}

COUNTERS = {
    "vllm:prompt_tokens": ("Tokens of prompts.", lambda load: load.prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated.", lambda load: load.generated_tokens),
    "vllm:prefix_cache_queries": (
        "Tokens of prompts that were looked up in the prefix cache.",
        lambda load: load.prompt_tokens,
    ),
    "vllm:prefix_cache_hits": ("Tokens of prompts that were found there.", lambda load: load.cached_tokens),
    "vllm:num_preemptions": ("Requests whose blocks were taken away for a while.", lambda load: load.preemptions),
    "vllm:request_success": ("Answers that came to their end.", lambda load: load.finished_requests),
    "intarsia:requests_aborted": ("Answers whose caller left.", lambda load: load.aborted_requests),
    "intarsia:requests_expired": ("Answers whose time was over.", lambda load: load.expired_requests),
    "intarsia:steps": ("Forward passes.", lambda load: load.steps),
}


def render(info: EngineInfo, load: EngineLoad) -> bytes:
    """What an engine says of itself, as Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(_Families(info.model, load))
    return exposition.generate_latest(registry)


class _Families:
    def __init__(self, model: str, load: EngineLoad):
        self._model = model
        self._load = load

    def collect(self):
        for families, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, (about, value) in families.items():
                family = kind(name, about, labels=["model_name"])
                family.add_metric([self._model], value(self._load))
                yield family
