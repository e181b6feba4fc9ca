"""A request's trace through front end, controller and both workers, as a collector receives it."""

import gzip
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from intarsia.deploy.client import Client
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import start_engine
from intarsia.errors import InvalidSetting
from intarsia.proto.request import SamplingParams
from intarsia.proto.tracing import tracer_of
from intarsia.tests.conftest import Loop

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

PROMPT = "walnut and maple, cherry and oak"


class Seen(NamedTuple):
    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as collectors do."""

    def __init__(self):
        self.spans: list[Seen] = []
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def wait_for(self, count: int) -> list[Seen]:
        deadline = time.monotonic() + 20
        while len(self.spans) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.spans


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        collector: Any = self.server
        collector.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}
                    collector.spans.append(
                        Seen(
                            service.removeprefix("intarsia-"),
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            attributes,
                        )
                    )
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Served(NamedTuple):
    http: str
    grpc: str
    collector: Collector


@pytest.fixture(scope="module")
def served(ray_cluster: None, talker: Path, loop: Loop) -> Iterator[Served]:
    collector = Collector()
    settings = engine_settings(
        str(talker), tensor_parallel_size=2, kv_cache_memory="1MiB", otlp_traces_endpoint=collector.url
    )
    engine = loop.run(start_engine(settings))
    front_end = FrontEnd(engine.client, Tokenizer.load(talker), tracer=tracer_of("front-end", collector.url))
    http = HttpServer(make_app(lambda: front_end))

    async def listen() -> tuple[GrpcServer, str, str]:
        grpc = GrpcServer(front_end)
        return grpc, await http.start(port=0), await grpc.start(port=0)

    grpc, http_url, target = loop.run(listen())
    yield Served(http_url, target, collector)
    loop.run(http.stop())
    loop.run(grpc.stop())
    loop.run(engine.shutdown())
    collector.shutdown()


def check(spans: list[Seen], trace: str, parent: str) -> None:
    """One request: a span of the front end, three of the controller below it, a step of each worker."""
    [request] = [span for span in spans if span.name == "request"]
    assert (request.service, request.trace, request.parent) == ("front-end", trace, parent)
    parts = {span.name: span for span in spans if span.service == "controller"}
    assert set(parts) == {"queue", "prefill", "decode"}
    steps = [span for span in spans if span.service == "worker"]
    assert {span.attributes["intarsia.rank"] for span in steps} == {0, 1}
    for span in (*parts.values(), *steps):
        assert (span.trace, span.parent) == (trace, request.id)
        assert request.start - 5e6 <= span.start <= span.end <= request.end + 5e6  # one clock, read in turn
    assert parts["queue"].end == pytest.approx(parts["prefill"].start, abs=2e6)
    assert parts["prefill"].end == pytest.approx(parts["decode"].start, abs=2e6)
    assert parts["decode"].attributes["gen_ai.usage.output_tokens"] == 6


def test_an_http_request_is_traced_from_the_edge_to_the_workers(served: Served):
    served.collector.spans.clear()
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    request = urllib.request.Request(f"{served.http}/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=30).read()
    check(served.collector.wait_for(6), TRACE, PARENT)
    assert not any(b"walnut" in body for body in served.collector.bodies)


def test_a_grpc_request_without_a_trace_begins_one(served: Served):
    served.collector.spans.clear()
    with Client(served.grpc) as client:
        client.complete("ash " + PROMPT, SamplingParams(max_tokens=6, ignore_eos=True))
    spans = served.collector.wait_for(6)
    check(spans, spans[0].trace, "")
    assert spans[0].trace != TRACE


def test_without_an_endpoint_there_is_no_tracer():
    assert tracer_of("controller", None) is None


def test_an_endpoint_that_is_no_url_is_refused():
    with pytest.raises(InvalidSetting, match="4318"):
        engine_settings("demo", otlp_traces_endpoint="localhost:4318")
