"""Packed linear layers compute what the layers do that they replace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
            torch.testing.assert_close(model(second), expected[1])
        # One layer is called alone, twice with the same input, and then among the others.
        for _ in range(2):
            torch.testing.assert_close(model.key(second), expected[2])
        torch.testing.assert_close(model(second), expected[1])
