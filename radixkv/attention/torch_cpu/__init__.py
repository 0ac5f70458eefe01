"""The plan carried out with torch on a CPU.

::

    backend.py              a batch
      calls.py              its ranges of keys, lowered to calls of torch's attention; partial.py: what each of these gives
    cost_model.py           when sharing, viewing and gathering pay
"""

from radixkv.attention.torch_cpu.backend import TorchAttention, TorchBackend

__all__ = ["TorchAttention", "TorchBackend"]
