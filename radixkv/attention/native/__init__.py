"""The plan carried out by compiled code on a CPU."""

from radixkv.attention.native.backend import LayerBatch, NativeAttention, NativeBackend, is_available

__all__ = ["LayerBatch", "NativeAttention", "NativeBackend", "is_available"]
