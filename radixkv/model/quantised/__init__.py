"""Checkpoints whose weights others have quantised, as they are published: read without the packages that made them.

Each format is read into one description, `QuantisedMatrix`, which native code keeps in its bits where it can, and which is
turned into floats elsewhere. Which weights are quantised, the files' tensors say, not lists of modules. One idea a file::

    matrix              codes, scales, zero points: what all formats come to
    packed_integers     integers of a few bits in words of 32
    tensors             the tensors of one module, and what is refused of them
    gptq                GPTQ: packed along inputs
    awq                 AWQ: packed along outputs, in an order of its own
    compressed_tensors  compressed-tensors: packed integers, bytes, float8
    torchao             torchao: bytes, pairs of 4 bits, float8
    float8              float8 with scales for blocks, rows or all of a matrix
    method              what a configuration says of a checkpoint
    files               all tensors of a checkpoint by the model's parameters
"""

from radixkv.model.quantised.files import QuantisedFiles
from radixkv.model.quantised.method import METHODS, quantisation_of
from radixkv.model.quantised.tensors import OtherLayoutError, UnreadableError

__all__ = ["METHODS", "OtherLayoutError", "QuantisedFiles", "UnreadableError", "quantisation_of"]
