"""Choosing a replica for each request: the one that answers first, given what each holds and has to do. Needs no torch.

::

    router.py               the choice, and what it is based on
      routed_replica.py     the state of one replica: the requests that it has to compute
      block_index.py        which replicas hold which blocks
    prefill_rate.py         how fast an engine computes prompts, as it measures itself; decayed_rate.py: a recent average
"""

from radixkv.routing.block_index import BlockIndex
from radixkv.routing.prefill_rate import PrefillRate
from radixkv.routing.routed_replica import Placement
from radixkv.routing.router import Router, prompt_hashes

__all__ = ["BlockIndex", "Placement", "PrefillRate", "Router", "prompt_hashes"]
