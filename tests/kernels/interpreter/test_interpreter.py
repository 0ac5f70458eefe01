"""What makes the interpreter cheaper here hides no error of a kernel."""

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


@triton.jit
def _add_shapes(output, left: tl.constexpr, right: tl.constexpr):
    tl.store(output, tl.sum(tl.arange(0, left) + tl.arange(0, right), 0))


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


def test_shapes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(InterpreterError, match="shape"):
        _add_shapes[(1,)](torch.zeros(1, dtype=torch.int32), left=4, right=8)
