"""Recurrent layers (Mamba, gated delta nets, short convolutions): their states lie in the cache's blocks.

::

    layer.py                one layer, called for some sequences of a batch with their states
    step.py                 the blocks from which a batch's sequences take states, and where they leave them

The states themselves are in a `radixkv.memory.StatePool`.
"""

from radixkv.model.recurrent.layer import RecurrentCall, RecurrentLayer, keeps_states, take_over_layers
from radixkv.model.recurrent.step import RecurrentStep, recur_alone, recur_from, recur_in_one

__all__ = [
    "RecurrentCall",
    "RecurrentLayer",
    "RecurrentStep",
    "keeps_states",
    "recur_alone",
    "recur_from",
    "recur_in_one",
    "take_over_layers",
]
