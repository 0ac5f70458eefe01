"""A model's own modules replaced, where they are of a known pattern, by ones that run native code on a CPU.

No model is rewritten: a module is replaced only after its replacement gave the same result for random input. So a pattern
lists no models, and a module that it does not fit stays as transformers made it. One pattern per file::

    replace             finds the modules, compares, replaces
    linear              nn.Linear: weights packed into panels
    embedding           nn.Embedding, where it has the weights of the output head
    norm                RMS norms, whatever class they are of
    mlp                 down(activation(gate(x)) * up(x))
    experts             those of such MLPs that were chosen for a token
    attention           query, key and value projected at once, normed and turned in place, attended, projected
    layer               a decoder layer, of all these
    layer_chains        layers that are computed in one call
    last_layer          the rows of the last one that are wanted
    functional_weight   weights that other modules multiply by
    weights             how weights are kept: as they are, quantised, or in the blocks of their file
    panel_cache         quantised weights on disk
"""

from radixkv.model.native.last_layer import nan_in_other_rows
from radixkv.model.native.layer_chains import Chain, join_layers, layers_over, watch_chains
from radixkv.model.native.panel_cache import PanelCache
from radixkv.model.native.replace import prepare_for_cpu
from radixkv.model.native.weights import BlockKeeper, Quantiser, WeightKeeper, weights_of

__all__ = [
    "BlockKeeper",
    "Chain",
    "PanelCache",
    "Quantiser",
    "WeightKeeper",
    "join_layers",
    "layers_over",
    "nan_in_other_rows",
    "prepare_for_cpu",
    "watch_chains",
    "weights_of",
]
