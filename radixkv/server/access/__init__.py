"""Who may use the server, and how much.

::

    authentication.py       who sent a request, before its body is read
    keys.py                 API keys in a file
    tenants.py              whose keys they are, what each tenant may have, and its namespaces in the cache
    rate_limits.py          requests and tokens per minute
"""
