"""How work is captured as a CUDA graph: on which stream, and what is restored when it fails. CUDA itself is simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.model.graphs.cuda_graph import GraphCapture


class SimulatedCuda:
    """Notes what is asked of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.mode = "default"
        self.current = self._stream("current")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self._stream(f"side of {device}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed"))
        monkeypatch.setattr(torch.cuda, "graph", self._graph)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))

    def _stream(self, name: str) -> SimpleNamespace:
        def wait(other: SimpleNamespace) -> None:
            self.calls.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait)

    @contextmanager
    def _on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _graph(self, graph: object, pool: str, stream: SimpleNamespace, capture_error_mode: str) -> Iterator[None]:
        self.calls.append((pool, stream.name, capture_error_mode))
        with self._on(stream):
            yield


def test_each_device_captures_on_a_stream_of_its_own_and_other_threads_may_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimulatedCuda(monkeypatch)
    for device in ("cuda:0", "cuda:1"):
        capture = GraphCapture(torch.device(device))
        cuda.calls.clear()
        where: list[tuple[str, str]] = []
        replay = capture(lambda where=where: where.append((cuda.current.name, cuda.mode)))  # type: ignore[misc]
        side = f"side of {device}"
        # Twice before, the second time with an error if it waits for the GPU; then captured.
        assert where == [(side, "default"), (side, "error"), (side, "default")]
        assert cuda.calls == [
            f"{side} waits for current",
            f"current waits for {side}",
            ("memory", side, "thread_local"),
        ]
        assert replay() == "replayed"


def test_a_warm_up_that_fails_leaves_the_current_stream_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimulatedCuda(monkeypatch)

    def work() -> None:
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        GraphCapture(torch.device("cuda:0"))(work)
    assert (cuda.current.name, cuda.mode) == ("current", "default")
    assert cuda.calls[-1] == "current waits for side of cuda:0"


def test_engines_side_by_side_capture_on_different_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS's workspace belongs to a stream, and is freed with the first of the stream's graphs that is given up."""
    cuda = SimulatedCuda(monkeypatch)
    ring = [cuda._stream(f"stream {i}") for i in range(4)]
    handed_out = itertools.cycle(ring)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(handed_out))

    def stream_of(capture: GraphCapture) -> str:
        cuda.calls.clear()
        capture(lambda: None)
        return str(cuda.calls[-1][1])

    first = GraphCapture(torch.device("cuda:0"))
    for _ in range(3):  # which others took meanwhile
        next(handed_out)
    second = GraphCapture(torch.device("cuda:0"))
    assert stream_of(first) == "stream 0"
    assert stream_of(second) == "stream 1"
    # The stream of an engine that is gone can be taken again.
    del first
    for _ in range(2):
        next(handed_out)
    third = GraphCapture(torch.device("cuda:0"))
    assert stream_of(third) == "stream 0"
    # Where all are taken, it does not search for ever.
    others = [GraphCapture(torch.device("cuda:0")) for _ in range(6)]
    assert len(others) == 6
