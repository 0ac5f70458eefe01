"""What tiers below the pool gain and cost.

::

    benefit.py              on a real model: against no tier, and hot against cold
    working_set.py          conversations that do not fit the pool
    reads.py                the disk tier, against a plain loop over a file
    fresh_engine.py         engines for one measurement each
"""
