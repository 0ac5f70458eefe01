"""What a GPU's first light needs of a machine: packages, a GPU, and a C compiler with which Triton launches a kernel.

`python -m radixkv.bench.gpu.ready` names all that is missing at once. It imports no dependency before checking for it, so it
also runs where the packages of the command line are missing.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import radixkv

_PROJECT = Path(radixkv.__file__).parents[1] / "pyproject.toml"


def main() -> int:
    """Print what is missing; returns the exit status.

    Raises:
        Exception: whatever Triton, the compiler or the driver ends with where a kernel cannot be launched.
    """
    missing = list(missing_modules(needed_modules()))
    for line in missing:
        print(line)
    if missing:
        return 1
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no CUDA device")
        return 1
    launch_one()
    print(f"packages are there, and a kernel runs on {torch.cuda.get_device_name()}")
    return 0


def needed_modules() -> list[str]:
    """The project's requirements by import name, and modules that import everything else that a first light needs."""
    requirements = []
    if _PROJECT.exists():  # otherwise the package is installed, and its requirements with it
        requirements = tomllib.loads(_PROJECT.read_text())["project"]["dependencies"]
    names = [re.split(r"[^\w-]", requirement, maxsplit=1)[0].replace("-", "_") for requirement in requirements]
    return [
        *names,
        "triton",
        "radixkv.llm",
        "radixkv.attention.triton",
        "radixkv.bench.gpu.decode",
        "radixkv.bench.gpu.tiles",
    ]


def missing_modules(names: Iterable[str]) -> Iterator[str]:
    """A line with the reason for each module that cannot be imported; one line for all that fail for the same reason."""
    said: set[str] = set()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package that breaks when it is imported is of no more use than none
            why = f"{type(error).__name__}: {error}"
            if why not in said:
                said.add(why)
                yield f"{name} cannot be imported: {why}"


def launch_one() -> None:
    """Launch a kernel that takes no time to compile.

    Raises:
        RuntimeError: its result is wrong.
        Exception: as of `main`.
    """
    import torch

    from radixkv_kernels import advance_rows

    positions = torch.tensor([30], dtype=torch.int32, device="cuda")
    tables = torch.tensor([[3, 5]], dtype=torch.int32, device="cuda")
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    advance_rows(positions, slots, tables, torch.zeros_like(positions), block_size=16)
    found = positions.item(), slots.item()
    if found != (31, 5 * 16 + 15):
        raise RuntimeError(f"a kernel runs, but its result is {found} instead of {(31, 5 * 16 + 15)}")


if __name__ == "__main__":
    sys.exit(main())
