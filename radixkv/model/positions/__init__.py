"""What depends on a token's position beside its place in the cache.

::

    rotary_types.py         types of rotation, and how one is kept from changing with a batch
    longrope.py             factors of longrope, chosen once
    window_mask.py          sliding windows that a model gives by its mask alone
"""
