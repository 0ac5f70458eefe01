"""Overflow is still seen where the interpreter looks for it in another way than its own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _combine(left, right, output, operation: tl.constexpr):
    lhs, rhs = tl.load(left), tl.load(right)
    if operation == "add":
        result = lhs + rhs
    elif operation == "sub":
        result = lhs - rhs
    else:
        result = lhs * rhs
    tl.store(output, result)


@pytest.mark.parametrize(
    ("operation", "left", "right", "dtype"),
    [
        ("add", 2**31 - 1, 1, torch.int32),
        ("sub", -(2**31), 1, torch.int32),
        ("mul", 2**16, 2**15, torch.int32),
        ("sub", 0, 1, torch.uint32),
        ("mul", 2**32 - 1, 2**32 - 1, torch.uint32),
    ],
)
def test_overflow_is_an_error(operation: str, left: int, right: int, dtype: torch.dtype) -> None:
    numbers = [torch.tensor([number], dtype=dtype) for number in (left, right, 0)]
    with pytest.raises(InterpreterError, match=f"int32 overflow detected for operation {operation}"):
        _combine[(1,)](*numbers, operation=operation)


def test_the_largest_number_is_no_overflow() -> None:
    numbers = [torch.tensor([number], dtype=torch.int32) for number in (2**31 - 2, 1, 0)]
    _combine[(1,)](*numbers, operation="add")
    assert numbers[2].item() == 2**31 - 1
