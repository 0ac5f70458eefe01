"""Which backend computed torch's attention is observed, not assumed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from radixkv.bench.gpu.report import UnavailableError
from radixkv.bench.gpu.torch_attention import require_backend

HEADS = torch.ones(1, 2, 4, 8)


def attend() -> torch.Tensor:
    return functional.scaled_dot_product_attention(HEADS, HEADS, HEADS)


def test_what_was_asked_for_is_what_runs() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        require_backend(SDPBackend.FLASH_ATTENTION, attend)


def test_a_backend_that_refuses_is_unavailable() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(UnavailableError, match="torch's CUDNN_ATTENTION"):
        require_backend(SDPBackend.CUDNN_ATTENTION, attend)


def test_another_one_than_was_asked_for_is_named() -> None:
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(UnavailableError, match=r"what ran was .*flash_attention_for_cpu"),
    ):
        require_backend(SDPBackend.CUDNN_ATTENTION, attend)


def test_an_error_in_the_problem_itself_is_raised() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="size of tensor"):
        require_backend(SDPBackend.FLASH_ATTENTION, lambda: torch.ones(2) + torch.ones(3))
