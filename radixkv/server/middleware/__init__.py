"""What every request passes, whatever its route.

::

    request_log.py          an id for each request, and a line in the log; tracing.py: OpenTelemetry
    cors.py                 which web pages may call
    head_requests.py        HEAD, as GET without a body
    body_limit.py           how long a body may be, and how hard to read
"""
