"""Simulation: recorded or synthetic traces, replayed through the cache without a model.

::

    report.py               what `radixkv simulate` finds, and advises
    trace.py                traces in files; synthetic.py: made up
    replay.py               a trace through the real cache; bounds.py: what other caches would hit
    tiers.py                what memory below the pool would bring
    replicas/               several replicas behind a router
"""
