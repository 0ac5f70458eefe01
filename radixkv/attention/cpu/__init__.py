"""The plan carried out with torch on a CPU."""

from radixkv.attention.cpu.backend import CpuAttention, CpuBackend

__all__ = ["CpuAttention", "CpuBackend"]
