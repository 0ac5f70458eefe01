"""These tests run the kernels in Triton's interpreter, which is chosen before Triton is imported."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The interpreter makes many small torch calls, which two threads only slow down."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def random_numbers_are_the_same_each_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def overflow_is_seen_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overflow is looked for by numpy: the interpreter takes a dozen calls of its own for it, a fifth of its time."""
    in_numpy = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check_overflow(semantic: Any, lhs: tl.tensor, rhs: tl.tensor, operation: Callable[..., tl.tensor]) -> None:
        kind = lhs.type.scalar
        assert kind == rhs.type.scalar
        if kind.int_bitwidth < 64:
            name = operation.__name__
            exact = in_numpy[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
            fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
            assert fits, f"{kind.name} overflow detected for operation {name}"

    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check_overflow)


@functools.cache
def builtin_names(namespace: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member))


@pytest.fixture(autouse=True)
def what_does_not_change_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter looks through all of `triton.language` at each call of a device function: a third of its time.

    And it writes down all types to find numpy's of one.
    """

    def with_semantic(builtin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return builtin(*args, **options)

        return call

    def patch_builtins(namespace: Any, builder: Any, scope: Any) -> None:
        names = builtin_names(namespace)
        # One that is patched is no builtin, and where one is, all are.
        if names and tl.core.is_builtin(getattr(namespace, names[0])):
            for name in names:
                scope.set_attr(namespace, name, with_semantic(getattr(namespace, name)))

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtins)
    look_up = interpreter._get_np_dtype
    of_numbers = functools.cache(look_up)

    def numpys_type(kind: Any) -> Any:
        scalar = kind.scalar
        return look_up(scalar) if scalar.is_ptr() else of_numbers(scalar)

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpys_type)
    # Within a launch, a device function finds patched what the first of its module patched.
    patch_module, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_module_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch_module(function)

    def launch_unpatched(kernel: Any, *args: Any, **options: Any) -> None:
        patched.clear()
        launch(kernel, *args, **options)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_module_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_unpatched)


@pytest.fixture(autouse=True)
def shapes_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter makes a type for each result and unwraps, checks and names its shape anew: a quarter of its time."""
    describe = tl.block_type.__init__
    described: dict[Any, dict[str, Any]] = {}

    def describe_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, tl.tuple) else shape
        key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in sizes))
        if key not in described:
            describe(self, element_ty, shape)
            described[key] = {"shape": self.shape, "numel": self.numel, "name": self.name}
        self.__dict__.update(described[key], element_ty=element_ty)

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape.values) if type.is_block() else ())

    monkeypatch.setattr(tl.block_type, "__init__", describe_once)
    monkeypatch.setattr(tl.tensor, "__init__", make_tensor)
