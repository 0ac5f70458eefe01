"""How a recorded trace names itself: what `radixkv.engine.trace_recorder` writes and `radixkv.observe.simulate` reads."""

from __future__ import annotations

TRACE_FORMAT = "radixkv-trace"
TRACE_VERSION = 1
