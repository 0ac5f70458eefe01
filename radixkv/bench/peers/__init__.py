"""The same work by other engines, each in a process and an environment of its own.

::

    against.py              ours and a peer's, in turns
    engine_process.py       one engine, which runs workloads by name; vllm_drafts.py: vLLM with drafts
    line_process.py         a process that answers lines with lines
"""
