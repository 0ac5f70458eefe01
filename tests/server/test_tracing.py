"""A span per request, with the stages of its answer."""

from __future__ import annotations

import itertools
import sys

import pytest
from support.in_process_server import served

from radixkv import LLM
from radixkv.errors import MissingPackageError
from radixkv.server.config import ServerConfig
from radixkv.server.run import make_observers

# Only where `radixkv[otel]` is installed.
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TEXT = {"prompt": "The quick brown fox " * 8, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


async def test_spans_of_requests(llm: LLM) -> None:
    exporter = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    trace_id, span_id = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
    headers = {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-01", "x-request-id": "mine"}

    tracer = provider.get_tracer("test")
    async with served(llm, tracer=tracer) as client:
        for stream in (False, True):
            exporter.clear()
            response = await client.post("/v1/completions", json={**TEXT, "stream": stream}, headers=headers)
            assert response.status_code == 200
            *stages, request = exporter.get_finished_spans()
            assert request.name == "POST /v1/completions"
            assert (request.context.trace_id, request.parent.span_id) == (trace_id, span_id)
            assert request.attributes["radixkv.request_id"] == "mine"
            assert request.attributes["gen_ai.usage.output_tokens"] == 3
            assert request.attributes["http.response.status_code"] == 200
            assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]
            assert {stage.parent.span_id for stage in stages} == {request.context.span_id}
            for stage, following in itertools.pairwise(stages):
                assert stage.start_time <= stage.end_time == following.start_time
            assert "quick brown" not in str([span.attributes for span in (*stages, request)])

        for method in ("GET", "HEAD"):
            exporter.clear()
            assert (await client.request(method, "/v1/models/unknown")).status_code == 404
            (refused,) = exporter.get_finished_spans()
            assert refused.name == f"{method} /v1/models/{{name:path}}"
            assert refused.parent is None


@pytest.mark.parametrize("package", ["opentelemetry", "opentelemetry.exporter"])
def test_a_package_that_spans_need_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any of OpenTelemetry's, the message was "No module named 'opentelemetry'"."""
    monkeypatch.delitem(sys.modules, "radixkv.server.middleware.tracing", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    advice = r"^otlp_traces_endpoint: opentelemetry[.\w]* is not installed: pip install 'radixkv\[otel\]'$"
    with pytest.raises(MissingPackageError, match=advice):
        make_observers(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))
