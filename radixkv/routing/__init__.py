"""Choosing a replica for each request: the one that answers first, given what each holds and has to do. Needs no torch."""

from radixkv.routing.block_index import BlockIndex
from radixkv.routing.prefill_rate import PrefillRate
from radixkv.routing.replica_state import Placement
from radixkv.routing.router import Router, prompt_hashes

__all__ = ["BlockIndex", "Placement", "PrefillRate", "Router", "prompt_hashes"]
