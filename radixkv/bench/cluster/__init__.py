"""Several replicas: the ingress and its router, memory, and what happens when processes are killed."""
