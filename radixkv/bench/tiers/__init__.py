"""What tiers below the pool gain and cost.

::

    benefit.py              all questions on a real model, and their figures in one table each
    first_tokens.py         after a restart, and over a shared store
    working_set.py          conversations that do not fit the pool
    writing.py              what it costs prompts that are never repeated
    reads.py                the disk tier, against a plain loop over a file
    fresh_engine.py         engines for one measurement each
"""
