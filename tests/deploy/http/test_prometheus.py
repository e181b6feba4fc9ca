"""What Prometheus scrapes, and that the dashboard asks for nothing else: by real queries, where Prometheus is there."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from intarsia.controller.metrics import Distribution
from intarsia.deploy.http.prometheus import REASONS
from intarsia.tests.conftest import free_port
from intarsia.tests.deploy.openai.conftest import Api, api  # noqa: F401  the fixture

DASHBOARD = Path(__file__).parents[3] / "deploy/cluster/grafana.json"

PROMETHEUS = shutil.which("prometheus")

VLLM = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:prompt_tokens", "vllm:generation_tokens",
    "vllm:request_success", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_params_n", "vllm:request_params_max_tokens", "vllm:request_prefill_kv_computed_tokens",
    "vllm:iteration_tokens_total", "vllm:cache_config_info", "vllm:num_requests_waiting_by_reason",
    "vllm:admission_rejections", "vllm:request_num_preemptions",
}  # fmt: skip
"""What dashboards made for vLLM ask for."""


def ask(api: Api, **body: Any) -> None:  # noqa: F811
    request = urllib.request.Request(
        f"{api.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()


def scrape(api: Api) -> dict[str, list[Any]]:  # noqa: F811
    """Samples by the name of their family."""
    text = urllib.request.urlopen(f"{api.url}/metrics", timeout=10).read().decode()
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def value(samples: list[Any], name: str, **labels: str) -> float:
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def test_names_are_those_that_dashboards_ask_for(api: Api):  # noqa: F811
    assert set(scrape(api)) >= VLLM


def test_requests_are_measured(api: Api):  # noqa: F811
    before = scrape(api)
    ask(api, prompt="maple, " * 12, max_tokens=5, ignore_eos=True)
    ask(api, prompt="maple, " * 12, max_tokens=7, ignore_eos=True, n=2)
    after = scrape(api)

    def grown(family: str, name: str, **labels: str) -> float:
        return value(after[family], name, **labels) - value(before[family], name, **labels)

    assert grown("vllm:request_success", "vllm:request_success_total", finished_reason="length") == 3
    assert grown("vllm:generation_tokens", "vllm:generation_tokens_total") == 19
    assert grown("vllm:prefix_cache_hits", "vllm:prefix_cache_hits_total") > 0
    for name, count in (
        ("vllm:time_to_first_token_seconds", 3),
        ("vllm:e2e_request_latency_seconds", 3),
        ("vllm:request_queue_time_seconds", 3),
        ("vllm:request_params_n", 2),
    ):
        assert grown(name, f"{name}_count") == count
        assert grown(name, f"{name}_bucket", le="+Inf") == count
    assert grown("vllm:request_generation_tokens", "vllm:request_generation_tokens_sum") == 19
    assert 0 < grown("vllm:inter_token_latency_seconds", "vllm:inter_token_latency_seconds_count") <= 16
    parts = ("queue", "prefill", "decode")
    whole = grown("vllm:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds_sum")
    sums = [grown(f"vllm:request_{part}_time_seconds", f"vllm:request_{part}_time_seconds_sum") for part in parts]
    assert sum(sums) == pytest.approx(whole, abs=1e-6)


def test_groups_and_pages_are_counted(api: Api):  # noqa: F811
    found = scrape(api)
    info = api.engine.client.info
    assert value(found["intarsia:pool_pages"], "intarsia:pool_pages") == info.num_blocks
    kinds = [sample.labels["kind"] for sample in found["intarsia:group_held_blocks"]]
    assert kinds == [group.kind for group in info.groups]
    reasons = {sample.labels["finished_reason"] for sample in found["vllm:request_success"]}
    assert reasons == set(REASONS)


def test_the_cache_tells_how_much_it_holds(api: Api):  # noqa: F811
    [config] = scrape(api)["vllm:cache_config_info"]
    info = api.engine.client.info
    assert float(config.labels["kv_cache_max_concurrency"]) == pytest.approx(info.max_len_concurrency, abs=0.01)
    assert int(config.labels["kv_cache_size_tokens"]) == int(info.max_len_concurrency * info.max_model_len)


def test_worth_of_other_sizes_of_the_memory_is_told(api: Api):  # noqa: F811
    ask(api, prompt="birch, " * 12, max_tokens=2)
    found = scrape(api)["intarsia:prefix_hit_rate_forecast"]
    shares = {sample.labels["memory"]: sample.value for sample in found if sample.labels["kind"] == "device"}
    assert list(shares) == ["0.5", "1", "2", "4"] and all(0 <= share <= 1 for share in shares.values())


def test_process_is_told_with_help_in_every_family(api: Api):  # noqa: F811
    text = urllib.request.urlopen(f"{api.url}/metrics", timeout=10).read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"} <= set(families)
    assert [name for name, family in families.items() if not family.documentation] == []


def test_openmetrics_comes_to_who_asks_for_it(api: Api):  # noqa: F811
    accept = "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"
    request = urllib.request.Request(f"{api.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = list(openmetrics.text_string_to_metric_families(answer.read().decode()))
    assert {family.name for family in families} >= VLLM | {"process_resident_memory_bytes"}
    asked_of = {sample.name for family in families for sample in family.samples}
    assert asked_of >= {sample.name for family in scrape(api).values() for sample in family}


def queries() -> Iterator[str]:
    """Of the dashboard, with its variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$model", ".*").replace("$__rate_interval", "30s")


def test_dashboard_asks_for_metrics_and_labels_that_exist(api: Api):  # noqa: F811
    samples = [sample for family in scrape(api).values() for sample in family]
    names = {sample.name for sample in samples}
    labels = {name: {label for s in samples if s.name == name for label in s.labels} for name in names}
    asked = list(queries())
    assert len(asked) > 30
    for query in asked:
        found = re.findall(r"(?:vllm|intarsia):\w+", query)
        assert found and set(found) <= names, query
        for group in re.findall(r"by \(([^)]*)\)", query):
            for label in group.replace(" ", "").split(","):
                assert all(label in labels[name] for name in found), f"{query} asks for {label}"
    variable = json.loads(DASHBOARD.read_text())["templating"]["list"][1]["query"]
    assert re.findall(r"(?:vllm|intarsia):\w+", variable)[0] in names


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here (Debian: apt-get install prometheus)")
def test_dashboard_has_something_to_show_in_a_real_prometheus(api: Api, tmp_path: Path):  # noqa: F811
    ask(api, prompt="the oak and the ash", max_tokens=20, ignore_eos=True)
    target = urllib.parse.urlsplit(api.url).netloc
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s}}\n"
        f"scrape_configs: [{{job_name: intarsia, static_configs: [{{targets: ['{target}']}}]}}]"
    )
    port = free_port()
    server = subprocess.Popen(
        [
            str(PROMETHEUS), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]
    )  # fmt: skip
    try:
        lacking = set(queries())
        deadline = time.monotonic() + 60
        while lacking and time.monotonic() < deadline:
            ask(api, prompt=f"the oak and the ash, {time.monotonic()}", max_tokens=20, ignore_eos=True)
            lacking = {query for query in lacking if not answered(port, query)}
            time.sleep(1)
        assert not lacking
    finally:
        server.terminate()
        server.wait()


def answered(port: int, query: str) -> bool:
    """Has Prometheus values for it? Raises what it says against the query."""
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        found = json.load(urllib.request.urlopen(url, timeout=10))
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return False  # it is starting, too
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except OSError:
        return False  # it is starting
    return bool(found["data"]["result"])


def test_quantiles_lie_between_the_bounds_of_their_values():
    measured = Distribution((1.0, 2.0, 4.0))
    assert measured.quantile(0.5) is None
    measured.observe(1.5, times=3)
    measured.observe(3.0)
    assert 1.0 < (measured.quantile(0.5) or 0) <= 2.0 < (measured.quantile(0.9) or 0) <= 4.0
    assert measured.counts == [0, 3, 1, 0] and measured.sum == 7.5
