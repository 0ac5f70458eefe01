"""Repeats a launch with other tensors of the same layout: nothing is checked or lowered a second time.

Before a kernel runs, its launcher checks every tensor, and Triton finds out from each argument which compiled kernel is
meant. All layers of a model launch the same kernels; from one to the next only pointers change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """A launch on a GPU.

    Attributes:
        compiled: Triton's compiled kernel.
        grid: three numbers of programs.
        names: of the kernel's arguments.
        arguments: what it was launched with, constants included.
    """

    compiled: Any
    grid: tuple[int, int, int]
    names: list[str]
    arguments: list[Any]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Launch | None:
    """Launch a kernel.

    Args:
        kernel: made by `triton.jit`.
        grid: numbers of programs.
        *arguments: the kernel's first ones.
        **options: its others, by name, and the compiler's.

    Returns:
        The launch; None in the interpreter, where nothing is compiled.
    """
    compiled = kernel[grid](*arguments, **options)
    if compiled is None:
        return None
    first, second, third = (*grid, 1, 1)[:3]
    names = kernel.arg_names
    return Launch(compiled, (first, second, third), names, [*arguments, *(options[n] for n in names[len(arguments) :])])


class RepeatedLaunch:
    """A launch to be repeated, some of whose tensors change each time.

    What does not change is kept alive, what changes is not.

    Args:
        launch: as it was made.
        changing: names of arguments, whether or not this kernel has them.
    """

    def __init__(self, launch: Launch, changing: Iterable[str]) -> None:
        self._run = launch.compiled[launch.grid]
        self._arguments = launch.arguments.copy()
        self._positions = [(launch.names.index(name), name) for name in changing if name in launch.names]
        for index, _ in self._positions:
            self._arguments[index] = None

    def __call__(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Launch, on the current stream of the device that the first launch went to, which must be the current one.

        Nothing is checked: each tensor must have the first one's type, strides, and remainder of its address by 16 bytes, and
        at least its sizes.

        Args:
            tensors: those that change, by name.
        """
        arguments = self._arguments.copy()
        for index, name in self._positions:
            arguments[index] = tensors[name]
        self._run(*arguments)
