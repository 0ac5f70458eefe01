"""The plan carried out by Triton kernels, on a GPU or in Triton's interpreter.

::

    backend.py              a batch: buffers.py: what kernels read of each; cost_model.py: when sharing and splitting pay
    work_items.py           how its attention is cut
    launches.py             what one layer launches; layer_launches.py: layers like it launch the same
    padded_decode.py        the same in buffers of fixed size, for CUDA graphs
    start_check.py          every kernel run once before the first request; heads.py: which heads they take
"""

from radixkv.attention.triton.backend import TritonAttention, TritonBackend

__all__ = ["TritonAttention", "TritonBackend"]
