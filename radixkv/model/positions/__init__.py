"""What depends on a token's position beside its place in the cache.

::

    rotary_types.py         by which types of rotation a model's layers rotate
    longrope.py             factors of longrope, chosen once
    window_mask.py          sliding windows that a model gives by its mask alone
"""
