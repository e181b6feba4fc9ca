"""Traces of requests over the borders of processes, as OpenTelemetry has them; nothing unless an endpoint is given.

    front end     request ────────────────────────────────────────────
    controller      queue ──── prefill ──────── decode ───────────────
    worker                      step ─── step ──                        each rank; steps that compute a traced prompt

A span's place in its trace travels as W3C `traceparent`, a text. A span holds no token and no text of a request.
OpenTelemetry's SDK and its exporter are an extra (`intarsia[otel]`) and imported when a tracer is made.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

INCOMING: ContextVar[str] = ContextVar("traceparent", default="")
"""Of the call being answered, if it brought one."""

SEND_EVERY_MS = 500

Attributes = Mapping[str, str | int | float | bool]


class Span:
    """One that has begun and will end."""

    def __init__(self, span: Any, traceparent: str):
        self.traceparent = traceparent
        self._span = span

    def end(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))
        self._span.end()


class Tracer:
    """Sends what one service of ours does to a collector, in the background."""

    def __init__(self, service: str, endpoint: str, **resource: str | int):
        """endpoint: a URL that takes OTLP over HTTP. Raises `ImportError` without the extra."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.name": f"intarsia-{service}", "process.pid": os.getpid(), **resource}
        self._provider = TracerProvider(resource=Resource.create(about))
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_MS))
        self._tracer = self._provider.get_tracer("intarsia")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str) -> Span:
        """A span that begins now. parent: a `traceparent`; empty: it is the first of its trace."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(name, context=self._context(parent))
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=set_span_in_context(span))
        return Span(span, carrier.get("traceparent", ""))

    def record(self, name: str, parents: Sequence[str], start_s: float, end_s: float, attributes: Attributes) -> None:
        """A span that is over. Times are of the monotonic clock. Parents beyond the first are linked to."""
        from opentelemetry.trace import Link, get_current_span

        links = [Link(get_current_span(self._context(other)).get_span_context()) for other in parents[1:]]
        offset_s = time.time() - time.monotonic()
        span = self._tracer.start_span(
            name,
            context=self._context(parents[0]),
            start_time=int((start_s + offset_s) * 1e9),
            attributes=dict(attributes),
            links=links,
        )
        span.end(end_time=int((end_s + offset_s) * 1e9))

    def close(self) -> None:
        """Send what is not sent yet."""
        self._provider.shutdown()

    def _context(self, traceparent: str) -> Any:
        return self._propagator.extract({"traceparent": traceparent} if traceparent else {})


def tracer_of(service: str, endpoint: str | None, **resource: str | int) -> Tracer | None:
    """None where no traces are wanted."""
    return None if endpoint is None else Tracer(service, endpoint, **resource)
