"""Packed linear layers compute what the layers do that they replace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from radixkv.model.replacement.merged_linear import merge_linears
from radixkv.model.replacement.packed_linear import PackedLinear, pack_linears


@pytest.mark.parametrize("shape", [(8, 16), (7, 3), (1, 1), (576, 192)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_linear_computes_what_the_linear_does(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor does not compute in bfloat16")
    torch.manual_seed(0)
    linear = nn.Linear(*shape, bias=bias, dtype=dtype)
    model = nn.Sequential(linear, nn.ReLU())
    inputs = torch.randn(1, 5, shape[0], dtype=dtype)
    exact = inputs.double() @ linear.weight.double().T
    exact = torch.relu(exact + linear.bias.double() if bias else exact)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    with torch.inference_mode():
        assert pack_linears(model, lambda: model(inputs)) == 1
        assert isinstance(model[0], PackedLinear)
        torch.testing.assert_close(model(inputs).double(), exact, rtol=tolerance, atol=tolerance)


def test_a_linear_without_outputs_stays() -> None:
    """Such as of a shared expert where a model has none: oneDNN has no product for it."""
    linear = nn.Linear(8, 1, bias=False)
    linear.weight = nn.Parameter(torch.empty(0, 8))
    model, inputs = nn.Sequential(linear), torch.randn(1, 5, 8)
    with torch.inference_mode():
        assert pack_linears(model, lambda: model(inputs)) == 0
        assert model(inputs).shape == (1, 5, 0)


class Doubled(nn.Linear):
    """Not what its class's parent computes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("merge", [pack_linears, merge_linears])
def test_layers_that_may_compute_something_else_are_left_alone(
    merge: Callable[[nn.Module, Callable[[], object]], int],
) -> None:
    """Of a class of their own, with a hook, or with a weight of a class of its own, as quantisation packages make them."""
    layers = Doubled(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    layers[1].register_forward_hook(lambda *given: 3 * given[2])
    weight = layers[2].weight.detach()
    layers[2].weight = nn.Parameter(TwoTensor(weight, weight), requires_grad=False)
    model = nn.ModuleList([*layers, nn.Linear(8, 8), nn.Linear(8, 8)])
    x = torch.randn(1, 5, 8)

    def run() -> list[torch.Tensor]:
        return [layer(x) for layer in model]

    with torch.no_grad():
        before = run()
        assert merge(model, run) == 2
        assert [*model][:3] == [*layers]
        torch.testing.assert_close(run()[:2], before[:2])


class Attention(nn.Module):
    """Three layers with one input, one of which has no bias, and a fourth with as many features and another input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 4)
        self.output = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.output(self.query(x) * torch.cat([self.key(x), self.value(x)], dim=-1))
        return result


def test_linears_with_the_same_input_are_fused() -> None:
    torch.manual_seed(0)
    model = Attention()
    first, second = torch.randn(2, 1, 5, 8)
    with torch.inference_mode():
        expected = model(first), model(second), model.key(second)
        assert pack_linears(model, lambda: model(first)) == 4
        assert model.query._product is model.key._product is model.value._product is not model.output._product
        for _ in range(2):
            torch.testing.assert_close(model(first), expected[0])
            assert model.query._product._input is None  # a prompt's states would stay in memory
            torch.testing.assert_close(model(second), expected[1])
        # One layer is called alone, twice with the same input, and then among the others.
        for _ in range(2):
            torch.testing.assert_close(model.key(second), expected[2])
        torch.testing.assert_close(model(second), expected[1])
