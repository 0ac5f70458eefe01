"""OpenTelemetry traces: a span per request and in it, where the model answered, the time in the queue, prefill and decoding.

::

    POST /v1/chat/completions  |------------------------------------------|
      queue                      |----|
      prefill                         |-------|
      decode                                  |-------------------------|

A client's own trace goes on if it sends the header ``traceparent`` (W3C Trace Context). No span holds text of a prompt.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.server.middleware.request_log import logged_path

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

    from radixkv.outputs import RequestMetrics
    from radixkv.server.output.respond import Answers


class Tracing:
    """ASGI middleware: records the spans of each request."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parent = self._propagator.extract(dict(Headers(scope=scope)))
        attributes = {"http.request.method": scope["method"], "url.path": logged_path(scope)}
        with self._tracer.start_as_current_span(
            scope["method"], parent, kind=trace.SpanKind.SERVER, attributes=attributes
        ) as span:

            async def send_traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(trace.StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, send_traced)
            finally:
                # The route, not the path: paths hold names, such as a model's, and there are few routes.
                route = getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.update_name(f"{scope['method']} {route}")
                state = scope.get("state", {})
                if "request_id" in state:
                    span.set_attribute("radixkv.request_id", state["request_id"])
                if "answers" in state:
                    self._record_answers(span, state["answers"])

    def _record_answers(self, span: Span, answers: Answers) -> None:
        usage = answers.usage
        span.set_attributes(
            {
                "gen_ai.response.id": answers.request_id,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "radixkv.cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "radixkv.complete": answers.complete,
            }
        )
        if answers.times is not None:
            self._record_stages(span, answers.times)

    def _record_stages(self, span: Span, times: RequestMetrics) -> None:
        since_epoch = time.time_ns() - time.monotonic_ns()
        ends = [times.scheduled_time, times.first_token_time, times.finished_time or time.monotonic()]
        begin = times.arrival_time
        for name, end in zip(["queue", "prefill", "decode"], ends, strict=True):
            if end is None:
                return
            start_ns, end_ns = (int(seconds * 1e9) + since_epoch for seconds in (begin, end))
            context = trace.set_span_in_context(span)
            self._tracer.start_span(name, context, start_time=start_ns).end(end_ns)
            begin = end


def otlp_tracer_provider(endpoint: str) -> TracerProvider:
    """What sends spans to a collector, over HTTP, from a thread of its own.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "radixkv"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
