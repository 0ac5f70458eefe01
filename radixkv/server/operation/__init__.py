"""What operators see and steer.

::

    models.py               models, version, load, health
    metrics.py              for Prometheus
    page.py, live_state.py  the page at `/`, and what it shows
    admin.py                clear, verify, drain; pins.py: prompts that stay
    cache_insight.py        snapshots and explanations of the cache
"""
