"""Several replicas: the ingress and its router, memory, and what happens when processes are killed.

::

    ingress.py              what it costs to go through an ingress
    first_tokens_beside.py  first tokens of single requests beside other streams
    routing.py              what a router's decision costs
    chaos.py                streams while replicas and the ingress are killed
    replica_memory.py       replicas on one machine, with their own weights and with shared ones
    replica_process.py      processes of a cluster to measure
"""
