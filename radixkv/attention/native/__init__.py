"""The plan carried out by native code on a CPU: `backend`."""

from radixkv.attention.native.backend import KeptRows, NativeAttention, NativeBackend, is_available

__all__ = ["KeptRows", "NativeAttention", "NativeBackend", "is_available"]
