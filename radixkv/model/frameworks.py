"""Imports torch and transformers when it is imported, with the garbage collector off.

They make hundreds of thousands of objects, which stay. The collector would look through all of them several times while they
are being made, and again whenever it looks through everything later.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# How often a thread of OpenMP checks whether others are done before it sleeps: for some twenty microseconds, longer than most
# pauses within a step. By default it spins for milliseconds, and beside other programs takes a core from the threads that it
# waits for (docs/benchmarks/cpu.md).
_SPIN_COUNT = "1000"
_SPIN_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def import_frameworks() -> None:
    """Import both, and exempt from collection what there is then (`gc.freeze`).

    Does nothing where torch has been imported before: among the objects of such a program may be models, which are to be
    collected one day.
    """
    if "torch" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.collect()  # what is garbage now would be exempt, too
    gc.disable()
    try:
        with _short_spins():
            import torch  # noqa: F401
        import transformers.modeling_utils  # noqa: F401

        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules report types that outlive the interpreter as leaks
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _short_spins() -> Iterator[None]:
    """While OpenMP's runtime is loaded and reads its settings; those of the environment come first."""
    if any(name in os.environ for name in _SPIN_SETTINGS):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


import_frameworks()
