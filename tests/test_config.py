"""Options are defined once: what `LLM`, the engine and the command line take is what configurations say, and is checked."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from support.model_zoo import build_supported

from radixkv import LLM, AsyncLLM
from radixkv.cache import POLICIES
from radixkv.config import (
    DEVICE_DEFAULTS,
    Config,
    EngineConfig,
    EvictionPolicyName,
    ModelConfig,
    ResolvedEngineConfig,
)
from radixkv.engine.engine import Engine
from radixkv.llm_options import EngineOptions, LLMOptions, ModelOptions
from radixkv.model.loader import load_model
from radixkv.server.config import ServerConfig
from radixkv.sizes import parse_size
from radixkv.tools.names import PARSERS_ELSEWHERE


@pytest.mark.parametrize(("options", "config"), [(ModelOptions, ModelConfig), (EngineOptions, EngineConfig)])
def test_what_type_checkers_see_is_what_is_configured(options: Any, config: type[Config]) -> None:
    types = get_type_hints(config)
    assert get_type_hints(options) == {name: types[name] for name in config.model_fields}
    assert not options.__required_keys__


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_models_take_every_option_by_keyword(kind: type) -> None:
    parameters = inspect.signature(kind, eval_str=True).parameters
    assert get_args(parameters["options"].annotation) == (LLMOptions,)
    assert set(get_type_hints(LLMOptions)) == {*ModelConfig.model_fields, *EngineConfig.model_fields}


@pytest.mark.parametrize("config", [ModelConfig, EngineConfig, ServerConfig])
def test_every_option_is_documented_and_has_a_possible_default(config: type[Config]) -> None:
    assert all(field.description for field in config.model_fields.values())
    defaults = dict(config())
    assert dict(config(**defaults)) == defaults


def test_names_of_eviction_policies_are_those_that_exist() -> None:
    assert set(get_args(EvictionPolicyName)) == set(POLICIES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size: expected a whole number of at least 1 or None, got 0"),
        ({"block_size": "16"}, "block_size: expected a whole number of at least 1 or None, got '16'"),
        ({"max_num_seqs": True}, "max_num_seqs: expected a whole number of at least 1 or None, got True"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization: expected a number above 0 and up to 1, got 0"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization: expected a number above 0 and up to 1, got 1.1"),
        ({"enforce_eager": 1}, "enforce_eager: expected True or False, got 1"),
        (
            {"eviction_policy": "best"},
            "eviction_policy: expected one of lru, lfu, segmented-lru, priority, cost-aware, adaptive, got 'best'",
        ),
        ({"record_trace": 5}, "record_trace: expected a path or None, got 5"),
        ({"kv_events_endpoint": 5}, "kv_events_endpoint: expected text or None, got 5"),
        (
            {"kv_cache_memory_bytes": "1 GiBi"},
            "kv_cache_memory_bytes: expected a size above 0 such as 512MiB or 10GiB, or a whole number of bytes, "
            "got '1 GiBi'",
        ),
        (
            {"shared_cache": "http://:secret@x"},
            "shared_cache: expected redis://, rediss://, unix:// or a folder, got http://...",
        ),
        (
            {"quantization": "awq"},
            "quantization: expected one of int8, int4, gguf or None, got 'awq'; checkpoints that are quantised already "
            "(GPTQ, AWQ, compressed-tensors, torchao, fp8) are recognised without it",
        ),
        (
            {"tool_call_parser": "xlam"},
            "tool_call_parser: expected one of auto, hermes, qwen3_coder, glm, llama3_json, mistral_v3, mistral_v11, "
            "deepseek_v3, deepseek_v31, harmony, lfm2, olmo3, json, or a name of vLLM's or SGLang's for one of them, got "
            "'xlam'; auto chooses by the chat template, and works for most models",
        ),
        (
            {"reasoning_parser": 3},
            "reasoning_parser: expected one of auto, none, think, mistral, or a name of vLLM's or SGLang's for one of them, "
            "got 3; auto chooses by the chat template, and works for most models",
        ),
        ({"num_blocks": 2**31}, "num_blocks: expected at most 2,147,483,647, got 2147483648"),
        ({"max_num_seqs": 2**63}, "max_num_seqs: expected at most 2,147,483,647, got 9223372036854775808"),
        (
            {"host_cache_size": 2**63},
            "host_cache_size: expected a size above 0 such as 512MiB or 10GiB, or a whole number of bytes, "
            "got 9223372036854775808",
        ),
        ({"disk_cache": ""}, "disk_cache: expected a path, got ''"),
        ({"shared_cache": ""}, "shared_cache: expected a path, got ''"),
        ({"record_trace": "a\0b"}, "record_trace: expected a path, got 'a\\x00b'"),
        ({"max_model_len": 1}, "max_model_len: expected a whole number of at least 2 or None, got 1"),
        (
            {"num_blocks": 9, "kv_cache_memory_bytes": 9},
            "num_blocks and kv_cache_memory_bytes exclude each other: give one of them",
        ),
        ({"tiers": 5}, "tiers: expected a list of tiers, got 5"),
        ({"disk_cache_size": "2GiB"}, "disk_cache_size: expected disk_cache with it, got '2GiB' alone"),
        (
            {"disk_cache": "d", "enable_prefix_caching": False},
            "enable_prefix_caching: expected True with host_cache_size or disk_cache or shared_cache or tiers, got False",
        ),
        ({"store_key_file": "k"}, "store_key_file: expected disk_cache or shared_cache with it, got 'k' alone"),
        (
            {"cache_write_policy": "write-back"},
            "cache_write_policy: expected host_cache_size or disk_cache or shared_cache or tiers with it, "
            "got 'write-back' alone",
        ),
        (
            {"kv_events_replay_endpoint": "tcp://*:5558"},
            "kv_events_replay_endpoint: expected kv_events_endpoint with it, got 'tcp://*:5558' alone",
        ),
    ],
    ids=str,
)
def test_an_impossible_value_is_one_line_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        LLM("/no/such/model", **options)
    assert str(refusal.value) == message


def test_parsers_of_other_servers_are_taken_by_their_names() -> None:
    options: dict[str, Any] = {"tool_call_parser": "qwen25", "reasoning_parser": "deepseek-r1"}
    config = ModelConfig(**options)
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "think")
    # vLLM's name for two forms.
    mistral: Any = "mistral"
    assert ModelConfig(tool_call_parser=mistral).tool_call_parser == "auto"
    for name, names in PARSERS_ELSEWHERE.items():
        known = get_args(ModelConfig.model_fields[name].annotation)
        assert set(names.values()) <= set(known)
        assert not set(names) & set(known)


def test_long_values_and_secrets_are_not_repeated() -> None:
    with pytest.raises(ValueError, match="block_size: expected") as refusal:
        EngineConfig(block_size="x" * 1000)  # type: ignore[arg-type]
    assert len(str(refusal.value)) < 200
    config = ServerConfig(api_keys=("key-of-ann",), admin_key="key-of-admin")
    assert "key-of" not in f"{config} {config!r}"
    for options in ({"api_keys": "key-of-ann"}, {"api_keys": ["a", 5]}, {"admin_key": b"key-of-admin"}):
        with pytest.raises(ValueError, match=r"^(api_keys|admin_key): expected") as refusal:
            ServerConfig(**options)
        assert "key-of" not in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "caller"), [(LLM, "LLM.__init__"), (EngineConfig, "EngineConfig"), (ServerConfig, "ServerConfig")]
)
def test_an_unknown_option_is_refused_in_pythons_words(make: Any, caller: str) -> None:
    with pytest.raises(TypeError) as refusal:
        make(blocksizes=16)
    hint = "" if make is ServerConfig else ". Did you mean 'block_size'?"
    assert str(refusal.value) == f"{caller}() got an unexpected keyword argument 'blocksizes'{hint}"


def test_configurations_are_frozen() -> None:
    config = EngineConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.block_size = 32
    assert config == EngineConfig()


def test_defaults_of_a_device_fill_only_what_was_left_open() -> None:
    for device, defaults in DEVICE_DEFAULTS.items():
        resolved = EngineConfig(max_num_seqs=3).for_device(device)
        assert resolved.max_num_seqs == 3
        assert resolved.max_num_batched_tokens == defaults["max_num_batched_tokens"]
        assert resolved.async_scheduling is (device == "cuda")
        assert resolved.enable_torch_compile is (device == "cuda")
        assert resolved.num_blocks is None
        assert not EngineConfig(async_scheduling=False).for_device(device).async_scheduling
    narrowed = {name for name in ResolvedEngineConfig.__annotations__ if name in EngineConfig.model_fields}
    assert all(narrowed == set(defaults) for defaults in DEVICE_DEFAULTS.values())


class UserTokenizer:
    """The least that an object must have to be taken for a tokenizer; it cannot be hashed."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, text: str) -> None:
        raise AssertionError("nothing is tokenized")

    convert_ids_to_tokens = __call__


def test_an_engine_is_made_of_a_loaded_model_and_a_config(tmp_path: Path) -> None:
    """Also from what cannot be hashed or is no plain value: a loaded model, a torch dtype, a device, a path."""
    loaded = load_model(build_supported("llama"), ModelConfig(dtype=torch.float32, device=torch.device("cpu")))
    engine = Engine(loaded, EngineConfig(block_size=4, num_blocks=30, record_trace=tmp_path / "trace.jsonl"))
    assert (engine.cache.block_size, engine.cache.num_blocks, engine.max_num_seqs) == (4, 30, 64)
    assert not engine.async_scheduling
    tokenizer: Any = UserTokenizer()
    llm = LLM(build_supported("llama"), tokenizer=tokenizer, dtype=torch.float32, block_size=4, num_blocks=30)
    assert llm.get_tokenizer() is tokenizer


def test_neither_the_cache_nor_a_configuration_needs_the_others_packages() -> None:
    program = """
import sys
import radixkv.cache
assert not {"pydantic", "torch", "yaml"} & set(sys.modules)
import radixkv.config, radixkv.server.config
assert not {"torch", "transformers", "fastapi", "uvicorn", "yaml"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("size", ["0", "-1GiB", "many", "3 apples", True, 0, "", 1.5e9, b"1"])
def test_a_size_that_is_none_is_refused_by_name(size: Any) -> None:
    with pytest.raises(ValueError, match=r"^host_cache_size: expected .* or a whole number of bytes, got"):
        EngineConfig(host_cache_size=size)


def test_sizes_are_numbers_or_text() -> None:
    assert parse_size("size", "10GiB") == 10 << 30
    assert parse_size("size", "1.5 kb") == 1500
    assert parse_size("size", 7) == 7
    with pytest.raises(ValueError, match="cache_write_policy: expected one of write-through-selective, write-through"):
        EngineConfig(cache_write_policy="write-sometimes")
