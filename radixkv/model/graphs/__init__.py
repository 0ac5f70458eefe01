"""A model's work as graphs, so that a step takes less of Python.

::

    compiled_layers.py      decoder layers compiled by torch
    decode_graphs.py        decoding steps as CUDA graphs; cuda_graph.py: how one is captured
"""
