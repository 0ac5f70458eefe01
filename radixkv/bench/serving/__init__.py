"""One server over HTTP: load, what HTTP costs, and hostile clients.

::

    load_test.py            any OpenAI-compatible server under load: workload.py, pacing.py, client.py, report.py
    http_cost.py            what HTTP adds to the engine
    attacks.py, soak.py     what each way of attacking costs others; hostile.py: hostile clients beside normal ones
    server_process.py       processes to measure
"""
