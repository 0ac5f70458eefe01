"""What runs every kernel before the first request: it passes where they are right, and names the one that is not."""

from __future__ import annotations

import pytest
import torch
from support.model_zoo import VOCAB_SIZE, build_shallow
from support.tensors_on_cpu import OnCpu

from radixkv.attention import AttentionLayer, AttentionOptions
from radixkv.attention.triton import start_check
from radixkv.attention.triton.start_check import check_kernels
from radixkv.bench.gpu.ready import launch_one
from radixkv.memory import LayerShape
from radixkv.model.loader import load_model
from radixkv.model.runner import ModelRunner
from radixkv_kernels import reference

PLAIN = AttentionLayer(LayerShape(2, 16, 8), 8, AttentionOptions(0.3))
OTHERS = AttentionLayer(LayerShape(1, 8, 8), 4, AttentionOptions(0.3, 2.0, 7, torch.randn(4)))


def test_all_kernels_run_once_for_layers_that_differ() -> None:
    # Writing, copying, advancing, three tile classes, rows without items, two draws.
    assert check_kernels([PLAIN, PLAIN, OTHERS], 16, torch.float16, torch.float16, "cpu", 5000) == 2 * 9
    # float32 takes the narrowest tiles only.
    assert check_kernels([PLAIN], 16, torch.float32, torch.float32, "cpu", 5000) == 7
    assert check_kernels([OTHERS], 16, torch.bfloat16, torch.float8_e4m3fn, "cpu", 5000) == 9


def test_a_models_layers_are_checked_with_their_options_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[list[AttentionLayer], object]] = []
    monkeypatch.setattr(start_check, "check_kernels", lambda layers, *rest: checked.append((layers, rest)))
    runner = ModelRunner(load_model(build_shallow("gpt_oss")))
    for _ in range(2):
        runner.check_kernels(16, torch.bfloat16)
    ((layers, rest),) = checked
    assert [layer.shape for layer in layers] == runner.layer_shapes
    assert all(layer.options.sinks is not None for layer in layers)
    assert {layer.options.sliding_window is None for layer in layers} == {True, False}
    assert rest == (16, torch.float32, torch.bfloat16, torch.device("cpu"), VOCAB_SIZE)


@pytest.mark.parametrize("failure", ["raises", "is wrong"])
def test_the_kernel_that_fails_is_named(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: torch.Tensor, tile_rows: int, **options: object) -> None:
        if tile_rows == 64 and failure == "raises":
            raise ValueError("out of resource: shared memory")
        reference.attend_items(*args, **options)
        if tile_rows == 64:
            args[6][0] += 1.0

    monkeypatch.setattr(start_check, "attend_items", fails)
    reason = "out of resource" if failure == "raises" else "differs from the reference"
    with pytest.raises(
        RuntimeError,
        match=f"^attend_items with tiles of 64 rows, 8 query and 2 key-value heads of 16 and 8.*{reason}",
    ):
        check_kernels([PLAIN], 16, torch.float16, torch.float16, "cpu", 5000)


@pytest.mark.parametrize("name", ["draw_tokens", "advance_rows"])
def test_whole_numbers_are_compared_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among ids up to 4999, one that is too large by 1 hardly changes the norm."""
    launch = getattr(start_check, name)

    def off_by_one(*args: torch.Tensor, **options: int) -> torch.Tensor | None:
        result = launch(*args, **options)
        (args[1] if result is None else result)[0] += 1
        return result

    monkeypatch.setattr(start_check, name, off_by_one)
    problem = start_check._Problem(PLAIN, 16, torch.float32, torch.float8_e4m3fn, "cpu", 5000)
    with pytest.raises(RuntimeError, match=f"^{name}: .* its result is .* by the reference "):
        start_check._run(name, dict(problem.launches())[name], problem.bound)


def test_the_kernel_that_a_first_light_begins_with_is_right() -> None:
    with OnCpu():
        launch_one()
