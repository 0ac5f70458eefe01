"""What `LLM` and `AsyncLLM` take by keyword, and the configurations that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from radixkv.config import (
    AttentionBackendName,
    CacheWritePolicy,
    Config,
    Device,
    Dtype,
    EngineConfig,
    EvictionPolicyName,
    KvCacheDtype,
    ModelConfig,
    Quantization,
    SpeculativeConfig,
)
from radixkv.tools.names import ReasoningParserName, ToolCallParserName


class ModelOptions(TypedDict, total=False):
    """The fields of `ModelConfig` for type checkers and editors."""

    tokenizer: Any
    chat_template: str | Path | None
    dtype: Dtype
    device: Device
    max_model_len: int | None
    quantization: Quantization | None
    share_weights: bool | None
    merge_linears: bool
    fuse_rotary: bool
    tool_call_parser: ToolCallParserName
    reasoning_parser: ReasoningParserName
    generation_config: str
    override_generation_config: Mapping[str, Any] | str | None


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig` for type checkers and editors."""

    block_size: int | None
    num_blocks: int | None
    kv_cache_memory_bytes: str | int | None
    gpu_memory_utilization: float
    kv_cache_dtype: KvCacheDtype
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    enable_prefix_caching: bool
    attention_backend: AttentionBackendName
    enforce_eager: bool
    enable_torch_compile: bool | None
    async_scheduling: bool | None
    seed: int
    eviction_policy: EvictionPolicyName
    host_cache_size: str | int | None
    disk_cache: str | Path | None
    disk_cache_size: str | int
    disk_cache_read_only: bool
    shared_cache: str | None
    shared_cache_size: str | int
    cache_secret_file: str | Path | None
    store_key_file: str | Path | None
    cache_write_policy: CacheWritePolicy
    tiers: Any
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None
    kv_events_endpoint: str | None
    kv_events_replay_endpoint: str | None
    record_trace: str | Path | None


class LLMOptions(ModelOptions, EngineOptions, total=False):
    """What `LLM` and `AsyncLLM` take by keyword."""


LLM_OPTIONS = frozenset({*ModelConfig.model_fields, *EngineConfig.model_fields})

# Options for which programs written for vLLM may pass None to mean the default.
_NONE_IS_DEFAULT = frozenset({"attention_backend", "enable_prefix_caching", "generation_config"})


def llm_configs(options: LLMOptions) -> tuple[ModelConfig, EngineConfig]:
    """Both configurations that an `LLM` needs.

    Raises:
        ValueError: a value is impossible, or has no effect without another option, or beside it.
    """
    engine = EngineConfig(**_fields_of(EngineConfig, options))
    return ModelConfig(**_fields_of(ModelConfig, options)), engine


def _fields_of(kind: type[Config], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None or name not in _NONE_IS_DEFAULT}
    return {name: value for name, value in given.items() if name in kind.model_fields}
