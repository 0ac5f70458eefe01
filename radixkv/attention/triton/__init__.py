"""The plan carried out by Triton kernels, on a GPU or in Triton's interpreter."""

from radixkv.attention.triton.backend import TritonAttention, TritonBackend

__all__ = ["TritonAttention", "TritonBackend"]
