"""Tiers, where blocks are kept outside the pool: their interface, common parts, and the stores that come with RadixKV.

::

    tier.py                 the interface, which other stores can implement
      stack.py              several tiers as one
      host_tier.py          host memory
      disk_tier.py          a disk of this machine: disk/
      shared_tier.py        a store for several machines: folder_blobs.py, redis_blobs.py
    block_key.py, block_format.py, record.py, encryption.py               names and bytes of a block outside the pool
    eviction_order.py       which blocks make room
    medium_queue.py, backoff.py                                           writing to a medium that may fail
    tier_events.py, stats.py                                              what is reported of them
    moves/                  between the pool and the tiers
"""
