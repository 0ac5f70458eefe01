"""Command lines written for `vllm serve`: options with a meaning here are taken, others are refused with the alternative."""

from __future__ import annotations

from typing import Any, cast

import pytest
import typer
from support.serve_command import Serve, command
from typer.main import get_command

from radixkv.cli.main import app
from radixkv.cli.vllm_command import VllmCommand, as_own_arguments
from radixkv.vllm_options import ENGINE, SERVER


def own_options() -> set[str]:
    command = cast(Any, get_command(app)).commands["serve"]
    assert isinstance(command, VllmCommand)
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


OWN = own_options()


def read(line: str) -> list[str]:
    return as_own_arguments(line.split(), OWN)


def test_no_option_is_both_ours_and_vllm_s() -> None:
    names = {option.removeprefix("--").replace("-", "_") for option in OWN}
    assert not names & {*ENGINE, *SERVER}
    assert not {*ENGINE} & {*SERVER}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("model --port 1", "model --port 1"),
        ("model --tensor-parallel-size 1 --port 1", "model --port 1"),
        ("model --tensor-parallel-size=1 -pp 1 -dp=1", "model"),
        ("model --trust-remote-code --enable-auto-tool-choice --port 1", "model --port 1"),
        ("--no-trust-remote-code --no-enable-lora model", "model"),
        ("--max_model_len 99 --max_num_seqs=3", "--max-model-len 99 --max-num-seqs=3"),
        ("--swap_space 0.0 --limit-mm-per-prompt {} --revision None", ""),
        ("--seed -1 model", "--seed -1 model"),
        ("--model m --port 1", "m --port 1"),
        ("--model=m", "m"),
        ("model --api-key a b --port 1", "model --api-key a --api-key b --port 1"),
        ("--served-model-name=a b --model m", "--served-model-name=a --served-model-name b m"),
        ("--api-key a model", "--api-key a model"),
        ('--allowed-origins ["https://a","https://b"]', "--cors-origin https://a --cors-origin https://b"),
        ("--allowed-origins=*", "--cors-origin *"),
        ("--port 1 -- --model", "--port 1 -- --model"),
        ("--no-such-option x", "--no-such-option x"),
        ("", ""),
    ],
)
def test_vllms_arguments_are_translated_and_others_kept(line: str, expected: str) -> None:
    assert read(line) == expected.split()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("m --tensor-parallel-size 2", "tensor_parallel_size: expected 1 or None, got 2: an engine runs on one device"),
        ("m -tp 2", "tensor_parallel_size: expected 1 or None, got 2"),
        ("m --enable-lora", "enable_lora: expected False or None, got True: merge the adapter"),
        ("m --lora-modules a=b", "lora_modules: expected it not to be there, got 'a=b': merge the adapter"),
        ("m --no-enable-chunked-prefill", "enable_chunked_prefill: expected True or None, got False"),
        ("m --swap-space 16", "swap_space: expected 0 or None or 4, got 16: host_cache_size"),
        ("m --load-format gguf", "load_format: expected 'auto' or 'hf' or 'safetensors', got 'gguf'"),
        ("m --enable-lora=maybe", "enable_lora: expected False or None, got 'maybe'"),
        ("m --allowed-origins [1]", "allowed_origins: expected texts, got 1"),
        ("m --tokenizer t", "tokenizer: expected it not to be there, got 't': a tokenizer is part of"),
    ],
)
def test_what_asks_for_something_else_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", "\\[")):
        read(line)


@pytest.mark.parametrize("line", ["m --revision", "--model", "--allowed-origins"])
def test_a_missing_value_is_a_usage_error(line: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a value after it"):
        read(line)


def test_a_usual_command_line_is_served(serve: Serve) -> None:
    line = (
        "org/model --host 127.0.0.1 --port 9000 --dtype half --max-model-len 4096 --gpu-memory-utilization 0.8 "
        "--served-model-name a b --enable-prefix-caching --enable-auto-tool-choice --tool-call-parser hermes "
        "--reasoning-parser qwen3 --max-num-seqs 8 --max-num-batched-tokens 256 --swap-space 0 --kv-cache-dtype auto "
        "--load-format auto --api-key k1 k2 --trust-remote-code --enforce-eager --generation-config vllm "
        "--disable-log-requests --tensor-parallel-size 1 --enable-request-id-headers --uvicorn-log-level info"
    )
    config, options = serve(*line.split(), "--override-generation-config", '{"temperature": 0.5}')
    assert (config.model, config.port, config.api_keys) == ("org/model", 9000, ("k1", "k2"))
    assert config.served_model_name == ("a", "b")
    assert [options[name] for name in ("dtype", "max_model_len", "max_num_seqs")] == ["half", 4096, 8]
    assert [options["reasoning_parser"], options["generation_config"]] == ["qwen3", "vllm"]
    assert options["override_generation_config"] == '{"temperature": 0.5}'
    refused = command("org/model", "--tensor-parallel-size", "4")
    assert str(refused.exception).startswith("tensor_parallel_size: expected 1 or None, got 4: an engine runs on one")
