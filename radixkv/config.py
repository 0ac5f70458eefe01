"""Every option, defined once: its type, its default, its range and what it does.

All ways to set an option end in the same frozen objects, which validate themselves::

    LLM(model, **options) ------------.
    radixkv serve --block-size 32 ... |     ModelConfig  -> load_model
    RADIXKV_BLOCK_SIZE=32             +-->  EngineConfig -> for_device -> Engine
    radixkv serve --config FILE ------'     ServerConfig -> the server (in `radixkv.server.config`)

The docstring below a field is its documentation, and the help text of its option on the command line. Nothing here imports
torch, because `radixkv --help` is generated from these fields.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from radixkv.option_words import in_one_line, refuse_unknown
from radixkv.sizes import parse_size
from radixkv.tools.names import PARSERS_ELSEWHERE, ReasoningParserName, ToolCallParserName

if TYPE_CHECKING:
    import torch

    Dtype = str | torch.dtype
    Device = str | torch.device
else:  # pydantic resolves annotations when it makes a class, and importing torch takes seconds; the loader checks both
    Dtype = Device = Any

EvictionPolicyName = Literal["lru", "lfu", "segmented-lru", "priority", "cost-aware", "adaptive"]
AttentionBackendName = Literal["auto", "native", "torch", "triton"]
KvCacheDtype = Literal["auto", "fp8"]
Quantization = Literal["int8", "int4", "gguf"]
CacheWritePolicy = Literal["write-through-selective", "write-through", "write-back"]

# Blocks and rows of a batch are numbered in 32 bits.
_MAX_COUNT = (1 << 31) - 1

_TIERS = ("host_cache_size", "disk_cache", "shared_cache", "tiers")
# Options that have no effect unless one of the listed others is set.
_PART_OF: Mapping[str, Sequence[str]] = types.MappingProxyType(
    {
        "disk_cache_size": ("disk_cache",),
        "disk_cache_read_only": ("disk_cache",),
        "shared_cache_size": ("shared_cache",),
        "cache_secret_file": _TIERS[1:],
        "store_key_file": ("disk_cache", "shared_cache"),
        "cache_write_policy": _TIERS,
        "kv_events_replay_endpoint": ("kv_events_endpoint",),
    }
)


class Config(BaseModel):
    """Base of all configurations: frozen, strict about types, and refusing unknown options.

    Raises:
        TypeError: an unknown option; the message names the nearest known one.
        ValueError: a value is impossible; one line with the option, what was expected and the value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, defer_build=True)

    def __init__(self, **options: Any) -> None:
        self._set_each(options)
        self._check_together()

    @classmethod
    def check_each(cls, options: Mapping[str, Any]) -> None:
        """Check each value by itself, where other sources may have the options that it needs.

        Raises:
            TypeError, ValueError: as from the constructor.
        """
        cls.__new__(cls)._set_each(options)

    def _set_each(self, options: Mapping[str, Any]) -> None:
        refuse_unknown(type(self).__name__, options, type(self).model_fields)
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ValueError(in_one_line(error, type(self).model_fields)) from None

    def _check_together(self) -> None:
        """Refuse values that need or exclude others.

        Raises:
            ValueError: with the name of the option.
        """


class ModelConfig(Config):
    """How a model is loaded."""

    tokenizer: Any = Field(default=None, repr=False)
    """Only in Python: a tokenizer of transformers, or the hub id or folder of one; by default the model's own. A loaded model
    has none of its own."""
    chat_template: str | Path | None = None
    """Jinja file that formats conversations, in place of the tokenizer's own chat template; in Python also the template
    itself."""
    dtype: Dtype = "auto"
    """float32, bfloat16, float16 or, in Python, a torch dtype; auto: bfloat16 on a GPU and on a CPU that multiplies it fast
    (AMX or AVX512-BF16), float32 elsewhere. A loaded model keeps its own."""
    device: Device = "auto"
    """Where to run: cpu, cuda, cuda:1, or auto: a GPU if there is one. A loaded model stays where it is."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt and its answer together; by default the model's own limit, or what num_blocks or
    kv_cache_memory_bytes have room for, if that is less. With rotary positions of type longrope, it decides which factors are
    used."""
    quantization: Quantization | None = None
    """On a CPU, store the weights of linear layers as integers of 8 or 4 bits, quantised when the model is loaded (the
    output head always has 8): they take less memory and less time to read, for slightly different answers. By default,
    weights stay as in the model's file: those of a GGUF file or a quantised checkpoint (GPTQ, AWQ, compressed-tensors,
    torchao, fp8) keep their bits and their values. gguf: so do those of the default model, a GGUF file that is otherwise
    converted to floats; an error if no weight can be kept."""
    share_weights: bool | None = None
    """On a CPU, map packed weights from files in the model cache, so that all processes on a machine that run the model
    share one copy in memory; by default where radixkv serve --replicas starts several here."""
    merge_linears: bool = True
    """On a GPU, compute linear layers that read the same input, such as query, key and value projections, as one product."""
    fuse_rotary: bool = True
    """On a GPU, rotate queries and keys in the kernel that stores keys, in layers that are found to rotate as Llama's do."""
    tool_call_parser: ToolCallParserName = "auto"
    """How the model writes tool calls; auto: by its chat template, or else as JSON. Names of vLLM's and SGLang's parsers
    stand for the same form, or for auto."""
    reasoning_parser: ReasoningParserName = "auto"
    """Which tags enclose the model's thinking; auto: by its chat template; none: thinking is text. Names of vLLM's and
    SGLang's parsers stand for the same tags, or for auto."""
    generation_config: str = "auto"
    """Sampling defaults for requests that set none. auto: the model's generation_config.json; vllm: no file; or a folder with
    another one. End tokens are always taken from the file; with vllm, a file that cannot be read is ignored with a
    warning."""
    override_generation_config: Mapping[str, Any] | str | None = None
    """JSON or a table that replaces single values of generation_config, such as {"temperature": 0.7}; null unsets a value.
    Possible are temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty and
    max_new_tokens."""

    @field_validator("quantization", mode="before")
    @classmethod
    def _known_quantization(cls, given: Any) -> Any:
        if given is not None and given not in get_args(Quantization):
            # Command lines written for vLLM name the format that a checkpoint already has.
            raise ValueError(
                f"quantization: expected one of {', '.join(get_args(Quantization))} or None, got {given!r:.80}; checkpoints "
                "that are quantised already (GPTQ, AWQ, compressed-tensors, torchao, fp8) are recognised without it"
            )
        return given

    @field_validator("tool_call_parser", "reasoning_parser", mode="before")
    @classmethod
    def _known_parser(cls, given: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        known = get_args(cls.model_fields[name].annotation)
        chosen = PARSERS_ELSEWHERE[name].get(given, given) if isinstance(given, str) else given
        if chosen not in known:
            raise ValueError(
                f"{name}: expected one of {', '.join(known)}, or a name of vLLM's or SGLang's for one of them, got "
                f"{given!r:.80}; auto chooses by the chat template, and works for most models"
            )
        return chosen

    @field_validator("override_generation_config", mode="before")
    @classmethod
    def _override(cls, given: Any) -> Mapping[str, Any] | None:
        table = _table("override_generation_config", given, '{"temperature": 0.7}')
        if table is None:
            return None
        # Imported only here: it imports the cache, which `--help` should not wait for.
        from radixkv.sampling_defaults import NO_DEFAULTS, overridden

        try:
            overridden(NO_DEFAULTS, table)
        except (TypeError, ValueError) as error:
            raise ValueError(f"override_generation_config: {error}") from None
        return table

    @property
    def generation_override(self) -> Mapping[str, Any]:
        """What ``override_generation_config`` says."""
        given = self.override_generation_config or {}
        assert isinstance(given, Mapping)
        return given


class SpeculativeConfig(Config):
    """Where drafts come from, and how long they are. Drafts save steps and change no tokens."""

    method: Literal["tree"] = "tree"
    """tree: from what the cache holds of the request's namespace, from the request's own prompt and answer, from what the
    client predicts, and from what a grammar forces."""
    num_speculative_tokens: int = Field(default=16, ge=1)
    """Tokens of a draft at most. How many are worth it is learned from how often they prove right and how long steps take."""
    drafters: Sequence[Any] = Field(default=(), repr=False)
    """More drafters, asked first: objects of subclasses of `radixkv.drafting.Drafter`."""


class EngineConfig(Config):
    """How an engine caches, schedules and computes."""

    block_size: int | None = Field(default=None, ge=1)
    """Tokens per block. By default 16; for models with recurrent layers, up to 256, so that the states in a block do not take
    more memory than its keys and values: these models reuse whole blocks only."""
    num_blocks: int | None = Field(default=None, ge=1)
    """Blocks for keys and values. Excludes kv_cache_memory_bytes."""
    kv_cache_memory_bytes: str | int | None = None
    """Bytes for keys and values, such as 4GiB. By default at most 1 GiB on a CPU, and what gpu_memory_utilization leaves on a
    GPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """If neither a number of blocks nor of bytes is set, the share of a GPU's memory to use."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """How keys and values are stored. auto: in the model's type; fp8: one byte each (float8_e4m3fn, with a scale per layer
    and head), so that two to four times as many tokens fit, for slightly different answers."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens per step; a longer prompt is computed in chunks of this size."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most sequences that run at the same time."""
    enable_prefix_caching: bool = True
    """Whether requests reuse what others computed. (Samples and beams of one request always share their prompt.)"""
    attention_backend: AttentionBackendName = "auto"
    """What computes attention; auto: Triton on a GPU; on a CPU native code, or torch if there is none."""
    enforce_eager: bool = False
    """On a GPU, decode without CUDA graphs."""
    enable_torch_compile: bool | None = None
    """Compile the model's decoder layers with torch.compile, once, at the start. If that fails, it is an error with true;
    by default, layers then run uncompiled."""
    async_scheduling: bool | None = None
    """Launch a decoding step before the tokens of the previous one are fetched, so that host and device overlap."""
    seed: int = 0
    """Seed for requests without their own; not with replicas, whose ingress draws one for each of them. In Python, None is 0,
    as in vLLM."""
    eviction_policy: EvictionPolicyName = "lru"
    """Which prefixes are evicted first when blocks run out."""
    host_cache_size: str | int | None = None
    """Bytes of host memory, such as 8GiB, for blocks that no longer fit into the pool. By default none."""
    disk_cache: str | Path | None = None
    """Folder in which blocks survive a restart; one process at a time writes to it. It holds keys and values, from which text
    can be recovered; only its owner can read it."""
    disk_cache_size: str | int = "10GiB"
    """Most bytes of each store in disk_cache: one for each model, data type, block size and key. radixkv store prune gives
    back the space of stores that are no longer used."""
    disk_cache_read_only: bool = False
    """Only read disk_cache, into which another process writes."""
    shared_cache: str | None = None
    """Store that several machines use: redis://HOST:PORT/DATABASE (Redis or Valkey; also rediss:// and unix://), or a folder
    that all of them have mounted."""
    shared_cache_size: str | int = "100GiB"
    """Most bytes in the folder of shared_cache; a Redis or Valkey server has a limit of its own."""
    cache_secret_file: str | Path | None = None
    """File with 64 hexadecimal digits, by which stores name tenants without revealing them; machines that share a server need
    the same. By default it is created in the folder of shared_cache or disk_cache."""
    store_key_file: str | Path | None = None
    """File with a key of 64 hexadecimal digits, as openssl rand -hex 32 prints, by which blocks outside this process are
    encrypted (radixkv[encryption]). By default the variable RADIXKV_STORE_KEY, or no encryption."""
    cache_write_policy: CacheWritePolicy = "write-through-selective"
    """When blocks are written into tiers below the pool. write-through-selective: when they are used for the second time or
    evicted; write-through: when they are computed; write-back: when they are evicted."""
    tiers: Any = Field(default=(), repr=False)
    """Only in Python: further tiers (`radixkv.tiers.tier.Tier`), asked after the others, in this order."""
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None
    """Draft tokens and verify several in one step: JSON or a table with the fields of SpeculativeConfig, such as
    {"method": "tree", "num_speculative_tokens": 16}; None, in JSON null: no drafts. The tokens are the same as without."""
    kv_events_endpoint: str | None = None
    """Publish KV events over ZeroMQ at this address, such as tcp://*:5557, as vLLM does."""
    kv_events_replay_endpoint: str | None = None
    """Address where subscribers ask for KV events that they missed."""
    record_trace: str | Path | None = None
    """Write one line per finished request to this file, without any text, for radixkv simulate."""

    @field_validator("block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs")
    @classmethod
    def _check_count(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count is not None and count > _MAX_COUNT:
            raise ValueError(f"{info.field_name}: expected at most {_MAX_COUNT:,}, got {count}")
        return count

    @field_validator("seed", mode="before")
    @classmethod
    def _seed_or_zero(cls, given: Any) -> Any:
        return 0 if given is None else given

    @field_validator("disk_cache", "shared_cache", "cache_secret_file", "store_key_file", "record_trace", mode="before")
    @classmethod
    def _check_path(cls, given: Any, info: ValidationInfo) -> Any:
        # An empty path, perhaps from an unset variable, would mean the folder that the program was started in.
        if isinstance(given, str) and (not given or "\0" in given):
            raise ValueError(f"{info.field_name}: expected a path, got {given!r:.80}")
        return given

    @field_validator("kv_cache_memory_bytes", "host_cache_size", "disk_cache_size", "shared_cache_size", mode="before")
    @classmethod
    def _check_size(cls, size: Any, info: ValidationInfo) -> Any:
        if size is not None:
            parse_size(str(info.field_name), size)
        return size

    @field_validator("tiers")
    @classmethod
    def _check_tiers(cls, tiers: Any) -> Any:
        if not isinstance(tiers, Sequence):
            raise ValueError(f"tiers: expected a list of tiers, got {tiers!r:.80}")
        return tiers

    @field_validator("shared_cache")
    @classmethod
    def _check_store(cls, store: str | None) -> str | None:
        if store is not None and "://" in store and not store.startswith(("redis://", "rediss://", "unix://")):
            # Only the scheme is shown, because the address may hold a password.
            scheme = store.partition("://")[0]
            raise ValueError(f"shared_cache: expected redis://, rediss://, unix:// or a folder, got {scheme}://...")
        return store

    @field_validator("disk_cache", "shared_cache")
    @classmethod
    def _make_absolute(cls, store: str | Path | None) -> str | Path | None:
        """The folder stays the same if the program changes its working directory."""
        if store is None or "://" in str(store):
            return store
        return type(store)(Path(os.path.expanduser(store)).absolute())

    @property
    def has_tiers(self) -> bool:
        """Whether blocks are kept anywhere but in the pool."""
        return any(getattr(self, name) for name in _TIERS)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What ``speculative_config`` says; None: no drafts."""
        given = self.speculative_config
        assert given is None or isinstance(given, SpeculativeConfig)
        return given

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _speculative_config(cls, given: Any) -> SpeculativeConfig | None:
        if isinstance(given, SpeculativeConfig):
            return given
        table = _table("speculative_config", given, '{"method": "tree"}')
        if table is None:
            return None
        known = SpeculativeConfig.model_fields
        unknown = next((name for name in table if name not in known), None)
        if unknown is not None:
            raise ValueError(f"speculative_config: {unknown!s:.80}: unknown; expected some of {', '.join(known)}")
        try:
            return SpeculativeConfig(**table)
        except ValueError as error:
            raise ValueError(f"speculative_config: {error}") from None

    def _check_together(self) -> None:
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_blocks and kv_cache_memory_bytes exclude each other: give one of them")
        for name, others in _PART_OF.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not any(getattr(self, other) for other in others):
                raise ValueError(f"{name}: expected {' or '.join(others)} with it, got {str(value)!r:.80} alone")
        if self.has_tiers and not self.enable_prefix_caching:
            raise ValueError(f"enable_prefix_caching: expected True with {' or '.join(_TIERS)}, got False")

    def for_device(self, device_type: str) -> ResolvedEngineConfig:
        """This configuration with the defaults of a kind of device, "cpu" or "cuda", in place of each None."""
        given = {name: value for name, value in self if value is not None}
        return ResolvedEngineConfig(**{**DEVICE_DEFAULTS[device_type], **given})


class ResolvedEngineConfig(EngineConfig):
    """An `EngineConfig` for one kind of device: options that depend on the device are no longer None."""

    max_num_batched_tokens: int
    max_num_seqs: int
    enable_torch_compile: bool
    async_scheduling: bool


DEFAULT_CPU_POOL_BYTES = 1 << 30
DEFAULT_BLOCK_SIZE = 16  # of models without recurrent layers

DEVICE_DEFAULTS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        # 512: the activations of a longer step leave the processor's cache; 1,024 took 10 to 20 % longer per token.
        "cpu": types.MappingProxyType(
            {
                "max_num_batched_tokens": 512,
                "max_num_seqs": 64,
                "enable_torch_compile": False,
                "async_scheduling": False,
            }
        ),
        "cuda": types.MappingProxyType(
            {
                "max_num_batched_tokens": 8192,
                "max_num_seqs": 256,
                "enable_torch_compile": True,
                "async_scheduling": True,
            }
        ),
    }
)


def _table(name: str, given: Any, example: str) -> Mapping[str, Any] | None:
    """What an option says that takes JSON or a table, such as the example."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ValueError(f"{name}: expected JSON, got {given!r:.80}") from None
    if not isinstance(given, Mapping | None):
        raise ValueError(f"{name}: expected such as {example} or None, got {given!r:.80}")
    return given
