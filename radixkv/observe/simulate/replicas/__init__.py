"""Simulation of several replicas behind a router: the real caches and the real router, service times from a cost model.

::

    report.py               what `radixkv simulate --replicas` finds
    cluster.py              the replicas, event by event; cost_model.py: how long they take
    choosers.py             the router, and ways to choose that it is compared with
"""
