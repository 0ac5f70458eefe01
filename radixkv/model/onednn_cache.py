"""How many matrix products a serving process keeps prepared for the CPU.

oneDNN generates code for every shape of a product, torch a description beside it, and both keep 1,024 of them: half a
megabyte each, for every layer shape and every number of rows that a step had. Prompts of all lengths come to more shapes
than that, so that products are forgotten and prepared again without end, and leave holes in the heap.

With the five products of SmolLM2-135M and steps of 1 to 512 rows at random, a process grew from 356 MB to 1,100 in 400 steps
and to 1,496 in 3,200, and went on growing; keeping 256, it stayed between 850 and 900 from step 800 on. Over a load of mixed
prompts, preparing took 0.24 to 0.36 ms a step with 1,024 and 0.36 to 0.39 with 256; with 64, 0.9.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_NUM_KEPT = "256"
# oneDNN's code, and torch's descriptions.
_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_prepared_products(environment: MutableMapping[str, str]) -> None:
    """Keep fewer, unless the operator has set a number; to be called before the process computes anything.

    Only whoever owns the process may: it holds for all that oneDNN does in there.
    """
    for name in _LIMITS:
        environment.setdefault(name, _NUM_KEPT)
