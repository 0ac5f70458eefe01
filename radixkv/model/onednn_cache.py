"""The capacity of oneDNN's primitive cache, and of torch's cache beside it, in a serving process.

A primitive is the code that oneDNN generates for one shape of a matrix product; torch caches a descriptor for each. Both
caches hold 1,024 entries by default: half a megabyte each, for every layer shape and every number of rows that a step had.
Prompts of all lengths need more shapes than that, so that primitives are evicted and created again without end, and
fragment the heap: a process goes on growing. With a quarter of the capacity it stops growing, and creates hardly more
primitives; with a sixteenth, many more. docs/benchmarks/cpu.md has the figures.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_CAPACITY = "256"
# oneDNN's primitives, and torch's descriptors.
_CAPACITY_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_primitive_cache(environment: MutableMapping[str, str]) -> None:
    """Reduce the capacity, unless the operator has set it; to be called before the process computes anything.

    Only for programs, not for a library: it applies to all uses of oneDNN in the process.
    """
    for name in _CAPACITY_VARIABLES:
        environment.setdefault(name, _CAPACITY)
