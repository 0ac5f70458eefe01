"""What a runner refuses, and has checked, before a GPU computes anything. CUDA itself is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.model_zoo import VOCAB_SIZE, build_supported

from radixkv.attention import AttentionLayer, AttentionOptions, BatchLimits
from radixkv.attention.triton import TritonBackend, start_check
from radixkv.errors import UnsupportedModelError
from radixkv.memory import KVPool, LayerShape
from radixkv.model import runner as runner_module
from radixkv.model.loader import load_model
from radixkv.model.runner import ModelRunner
from radixkv.model.structure import ModelStructure


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (LayerShape(1, 512, 512), "head size: expected at most 256 with Triton's kernels, .*, got 512$"),
        (
            LayerShape(1, 16, 16),
            "query heads per key-value head: expected at most 128 with Triton's kernels, .*, got 136$",
        ),
    ],
)
def test_heads_that_no_kernel_takes_are_refused_before_anything_is_measured(
    shape: LayerShape, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend refuses them, too: they ended in an error about the GPU, and in a division by zero."""
    loaded = load_model(build_supported("llama"), native=False)

    structure = ModelStructure({0: AttentionLayer(shape, 136, AttentionOptions(1.0))}, [], None, VOCAB_SIZE)
    monkeypatch.setattr(runner_module, "find_structure", lambda *_: structure)
    with pytest.raises(UnsupportedModelError, match=f"^{loaded.name}: {message}"):
        ModelRunner(replace(loaded, device=torch.device("cuda")))
    with pytest.raises(ValueError, match=f"^{message}"):
        TritonBackend(KVPool([shape], 1, 16, torch.float32), torch.float32, 136, 4, 64)


def test_on_a_gpu_every_kernel_is_checked_when_the_pool_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any request, and once for each kind of pool; the backend is made for this GPU, too, if another is current."""
    checked: list[tuple[object, ...]] = []
    current: list[str] = []

    @contextmanager
    def on_device() -> Iterator[None]:
        current.append("ours")
        yield
        current.pop()

    def make_backend(*args: object) -> None:
        assert current == ["ours"]

    monkeypatch.setattr(start_check, "check_kernels", lambda layers, *rest: checked.append(rest))
    monkeypatch.setattr(runner_module, "make_backend", make_backend)
    runner = ModelRunner(load_model(build_supported("llama"), native=False))
    runner._device = torch.device("cuda")
    monkeypatch.setattr(runner, "_on_device", on_device)
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        runner.use_pool(KVPool(runner.layer_shapes, 1, 16, dtype), "triton", BatchLimits(4, 64), enforce_eager=True)
    assert checked == [
        (16, torch.float32, dtype, runner._device, VOCAB_SIZE) for dtype in (torch.float32, torch.bfloat16)
    ]
