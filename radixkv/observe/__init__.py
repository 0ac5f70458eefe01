"""Seeing into the cache.

::

    inspect/                what is in it
    prompt_explanation.py   why a prompt is not reused, in words
    kv_events.py            its changes, published over ZeroMQ
    simulate/               traces of requests, replayed; trace_format.py: what their files say that they are
"""
