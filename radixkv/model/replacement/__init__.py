"""Modules of a model replaced by faster ones, each only where both give the same results.

::

    equivalence.py          whether they do, for random input
    replace_modules.py      which may be replaced
    probe.py                what modules do with a few tokens; attention_parts.py, shared_input.py: how they fit together
    packed_linear.py        torch's own packed products, where no native code runs
    merged_linear.py        linear layers of a GPU with the same input
    deferred_rotation.py    rotation left to the kernel that writes into the cache
    unused_parts.py         what text does not call is dropped

Native code on a CPU: `radixkv.model.native`.
"""
