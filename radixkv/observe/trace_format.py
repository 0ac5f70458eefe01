"""Name and version of the trace format: written by `radixkv.engine.trace_recorder`, read by `radixkv.observe.simulate`."""

from __future__ import annotations

TRACE_FORMAT = "radixkv-trace"
TRACE_VERSION = 1
