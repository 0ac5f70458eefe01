"""What operators see and steer.

::

    models.py               models, version, load, health
    metrics.py              for Prometheus
    page.py, live_state.py  the page at `/`, and what it shows
    admin.py                clear, verify, snapshot, drain; pins.py: prompts that stay
    explanations.py         how much of a prompt was cached, and why not more
"""
