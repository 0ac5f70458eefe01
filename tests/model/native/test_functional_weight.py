"""Weights of modules that call `functional.linear` themselves: native products in it, a tensor like any elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.cpu_variants import each_variant, use
from torch import nn
from torch.nn import functional

from radixkv.model.native.functional_weight import FunctionalWeight, replace_functional_weights
from radixkv_cpu import library

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


class Router(nn.Module):
    """As of a mixture of 32 experts."""

    def __init__(self, *, has_bias: bool = False, in_float32: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 256) / 16, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(32), requires_grad=False) if has_bias else None
        self.in_float32 = in_float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_float32:
            return functional.linear(x.type(torch.float32), self.weight.type(torch.float32))
        return functional.linear(x, self.weight, self.bias)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"has_bias": True}, {"in_float32": True}], ids=str)
def test_a_row_has_the_same_bits_beside_others(variant: str, dtype: torch.dtype, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    router = Router(**options).to(dtype)
    x = torch.randn(40, 256).to(dtype)
    expected = router(x)
    with use(variant):
        replace_functional_weights(router)
        together = router(x)
        assert torch.equal(together, torch.cat([router(row[None]) for row in x]))
    assert together.dtype == expected.dtype
    is_rounded = dtype == torch.bfloat16 and not options.get("in_float32")
    torch.testing.assert_close(together, expected, atol=3e-2 if is_rounded else 1e-5, rtol=1e-2 if is_rounded else 1e-5)


def test_elsewhere_it_is_a_tensor_like_any() -> None:
    router = Router(has_bias=True)
    plain = router.weight.clone()
    replace_functional_weights(router)
    weight = router.weight
    assert isinstance(weight, FunctionalWeight)
    assert dict(router.named_parameters())["weight"] is weight
    assert (weight.shape, weight.dtype, weight.device) == (plain.shape, plain.dtype, plain.device)
    for result in (weight + 1, weight @ plain.mT, weight.sum(), weight.float() - plain, weight[3]):
        assert type(result) is torch.Tensor
    assert torch.equal(weight[3], plain[3])
    # Of another type than the input's, and with a bias that is not the module's.
    other = torch.ones(32)
    x = torch.randn(5, 256)
    torch.testing.assert_close(router(x), functional.linear(x, plain, router.bias))
    torch.testing.assert_close(functional.linear(x, weight, other), functional.linear(x, plain) + 1)
    with pytest.raises(RuntimeError, match="dtype"):
        functional.linear(x.double(), weight)


def test_layers_and_embeddings_keep_their_weights() -> None:
    model = nn.ModuleList([nn.Linear(16, 16), nn.Embedding(16, 16), nn.LayerNorm(16), nn.Conv1d(4, 4, 3)])
    replace_functional_weights(model)
    assert not any(isinstance(parameter, FunctionalWeight) for parameter in model.parameters())
