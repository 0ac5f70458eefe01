"""Estimates how much of a machine's memory replicas will take, before they start.

Weights are counted for each replica, even if they are shared in the end (`share_weights`): all load them at once, and each
has its own copy until then. `radixkv bench replica-memory` measures what they take when they are up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import huggingface_hub

from radixkv.config import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_POOL_BYTES, DEVICE_DEFAULTS
from radixkv.llm_options import LLMOptions
from radixkv.model.default_model import find_default_model, is_default_model
from radixkv.model.gguf.conversion import BLOCKS_FILE, converted_folder
from radixkv.sizes import parse_size

# For Python, torch, transformers and Ray, and what a step needs.
_PROCESS_BYTES = 450 << 20
# What tiers take besides: blocks of a CPU's pool on their way down, with memory kept for more of them; and what a disk or a
# shared store still has to write.
_DOWNWARD_BYTES = (256 + 128) << 20
_QUEUE_BYTES = 256 << 20
_QUANTISED_BYTES = MappingProxyType({"int8": 1.0, "int4": 0.5})
# Most bytes in memory for one byte of a GGUF file's blocks, or of weights that others quantised: those of Q6_K are kept with
# 12 bits instead of 6.6.
_BLOCK_BYTES = 2.0
# The safetensors type of words into which quantised weights are packed, and its bytes.
_WORD, _WORD_BYTES = "I32", 4


@dataclass(frozen=True)
class ReplicaMemory:
    """Bytes of one replica.

    Attributes:
        process: of the interpreter, its libraries and what a step needs.
        weights: of the model; None: it is not on this machine yet.
        pool: of keys and values.
        tiers: of blocks in host memory, and on their way into tiers.
    """

    process: int
    weights: int | None
    pool: int
    tiers: int

    @property
    def total(self) -> int:
        """Bytes that are known."""
        return self.process + (self.weights or 0) + self.pool + self.tiers

    def __str__(self) -> str:
        weights = "weights that are not here yet" if self.weights is None else f"{_gib(self.weights)} for weights"
        tiers = f", {_gib(self.tiers)} for tiers" if self.tiers else ""
        return f"{_gib(self.pool)} for keys and values, {weights}, {_gib(self.process)} for its process{tiers}"


def replica_memory(model: str | None, options: LLMOptions, *, on_gpu: bool) -> ReplicaMemory:
    """What a replica of a model takes at most.

    Args:
        model: as `LLM` takes it.
        options: as `LLM` takes them.
        on_gpu: whether weights and pool are in a GPU's memory, where Ray places by ``num_gpus``.
    """
    tier_bytes = _tier_bytes(options, on_gpu=on_gpu)
    if on_gpu:
        return ReplicaMemory(_PROCESS_BYTES, 0, 0, tier_bytes)
    folder = _folder_of(model)
    given = {} if folder is None else json.loads((folder / "config.json").read_text())
    config = _text_config(given)
    # As bfloat16 where that is possible: only what cannot fit on any processor is refused.
    item_bytes = 4 if options.get("dtype") == "float32" else 2
    count = None if folder is None else _num_weights(folder)
    quantised = _QUANTISED_BYTES.get(str(options.get("quantization")))
    if folder is not None and (given.get("quantization_config") or (folder / BLOCKS_FILE).exists()):
        quantised = _BLOCK_BYTES
    weights = None if count is None else math.ceil(count * (quantised or item_bytes))
    return ReplicaMemory(_PROCESS_BYTES, weights, _pool_bytes(config, options, item_bytes), tier_bytes)


def check_memory(count: int, replica: ReplicaMemory, available: int | None, beside: int = 0) -> None:
    """Refuse more replicas than fit.

    Args:
        count: replicas.
        replica: what each takes.
        available: bytes that are free or can be freed; None: unknown.
        beside: bytes that are needed for other things than replicas.

    Raises:
        MemoryError: with the figures.
    """
    if available is None or count * replica.total + beside <= available:
        return
    needed = f"{count} would take {_gib(count * replica.total)} ({_gib(replica.total)} each: {replica})"
    fitting = max(0, available - beside) // replica.total
    others = f" beside {_gib(beside)} for Ray and the ingress" if beside else ""
    raise MemoryError(
        f"replicas: {needed}{others}, and {_gib(available)} are available, enough for {fitting}; lower replicas, "
        "kv_cache_memory_bytes or num_blocks"
    )


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that new processes of this machine, or container, can have; None where the system does not say.

    Args:
        proc: where Linux describes the machine.
        cgroup: where it describes the container's limits.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        of_machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        if limit.strip() == "max":
            return of_machine
        return min(of_machine, int(limit) - int(used) + int(statistics.get("inactive_file", 0)))
    except OSError:  # not in a container of its own
        return of_machine


def _tier_bytes(options: LLMOptions, *, on_gpu: bool) -> int:
    host, media = options.get("host_cache_size"), (options.get("disk_cache"), options.get("shared_cache"))
    num_media = sum(each is not None for each in media)
    if host is None and not num_media and not options.get("tiers"):
        return 0
    host_bytes = 0 if host is None else parse_size("host_cache_size", host)
    return host_bytes + num_media * _QUEUE_BYTES + (0 if on_gpu else _DOWNWARD_BYTES)


def _folder_of(model: str | None) -> Path | None:
    """Where the model's files are on this machine."""
    if is_default_model(model):
        folder = converted_folder(find_default_model(), in_blocks=False)
        return folder if folder.is_dir() else None
    assert model is not None
    if Path(model).is_dir():
        return Path(model)
    if model.lower().endswith(".gguf"):
        folder = converted_folder(Path(model), in_blocks=True)
        return folder if folder.is_dir() else None
    cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or config


def _num_weights(folder: Path) -> int | None:
    """The number of weights by a folder's safetensors headers: 8 bytes with the length of a JSON object with all shapes.

    Words into which weights are packed count as their bytes.

    Raises:
        ValueError: a file has no such header.
    """
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:  # such as a file that Git LFS has not fetched
                raise ValueError(f"model: {path}: expected a safetensors file, got {size} bytes without a header")
            header = json.loads(file.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        total += sum(math.prod(each["shape"]) * (_WORD_BYTES if each["dtype"] == _WORD else 1) for each in tensors)
    return total or None


def _pool_bytes(config: Mapping[str, Any], options: LLMOptions, item_bytes: int) -> int:
    given = options.get("kv_cache_memory_bytes")
    if given is not None:
        return parse_size("kv_cache_memory_bytes", given)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    layers, kv_heads = config.get("num_hidden_layers"), config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or (hidden // heads if hidden and heads else None)
    if not (layers and kv_heads and head_dim):
        return DEFAULT_CPU_POOL_BYTES
    if options.get("kv_cache_dtype") == "fp8":
        item_bytes = 1
    block_size = options.get("block_size") or DEFAULT_BLOCK_SIZE
    block_bytes = 2 * layers * kv_heads * head_dim * item_bytes * block_size
    num_blocks = options.get("num_blocks")
    if num_blocks is not None:
        return int(num_blocks * block_bytes)
    length = int(options.get("max_model_len") or config.get("max_position_embeddings") or 1 << 20)
    sequences = options.get("max_num_seqs") or DEVICE_DEFAULTS["cpu"]["max_num_seqs"]
    return int(min(DEFAULT_CPU_POOL_BYTES, sequences * -(-length // block_size) * block_bytes))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
