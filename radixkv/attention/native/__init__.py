"""The plan carried out by compiled code on a CPU."""

from radixkv.attention.native.backend import NativeAttention, NativeBackend, is_available

__all__ = ["NativeAttention", "NativeBackend", "is_available"]
