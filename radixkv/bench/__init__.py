"""What `radixkv bench` measures, always against a baseline in the same run.

::

    engine/                 whole answers of one engine
    cache/                  what the cache's bookkeeping costs
    drafts/, tiers/, gpu/   what drafts gain, tiers below the pool, a GPU
    serving/, cluster/      one server over HTTP; several replicas
    peers/                  the same work by other engines
    check.py                is anything slower than the committed figures (results/) say?
    common/                 timing, machines, files of figures
"""
