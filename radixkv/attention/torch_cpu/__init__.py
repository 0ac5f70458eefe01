"""The plan carried out with torch on a CPU."""

from radixkv.attention.torch_cpu.backend import TorchAttention, TorchBackend

__all__ = ["TorchAttention", "TorchBackend"]
