"""Whole answers of one engine in this process: speed, fairness between tenants, quality of narrower types.

::

    e2e.py                  speed, against transformers' `generate`; workloads.py: prompts of exact lengths
    fairness.py             one greedy tenant beside modest ones
    quality.py              what narrower types cost
"""
