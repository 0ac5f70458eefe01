"""Where the options of `radixkv serve` come from: command line > environment > file > defaults."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.serve_command import Serve, command
from typer.main import get_command
from typer.testing import CliRunner

from radixkv.cli.config_file import CONFIGS, mistyped_variables, read_config_file
from radixkv.cli.main import app
from radixkv.cluster import run as cluster_run
from radixkv.config import EngineConfig, ModelConfig
from radixkv.errors import MissingPackageError
from radixkv.ray import local
from radixkv.ray.options import ApplicationOptions
from radixkv.server.config import ServerConfig


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RADIXKV_") and name != "RADIXKV_CACHE":
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults_are_those_of_the_configurations(serve: Serve) -> None:
    config, options = serve()
    assert config == ServerConfig()
    defaults = {**dict(ModelConfig()), **dict(EngineConfig())}
    assert options == {name: value for name, value in defaults.items() if name not in ("tokenizer", "tiers")}


def test_the_command_line_is_stronger_than_the_environment_than_the_file(serve: Serve, tmp_path: Path) -> None:
    file = write(
        tmp_path / "serve.toml",
        "block_size = 32\nmax_num_seqs = 5\nmax_queue = 7\nenforce_eager = true\nenable_prefix_caching = false\n"
        'model = "from/file"\nhost = "0.0.0.0"\nseed = 9\n',
    )
    environment = {"RADIXKV_BLOCK_SIZE": "64", "RADIXKV_MAX_NUM_SEQS": "6", "RADIXKV_MODEL": "from/environment"}
    config, options = serve("--config", file, "--block-size", "128", "--no-enforce-eager", "--seed", "0", **environment)
    assert [options[name] for name in ("block_size", "max_num_seqs", "enforce_eager", "seed")] == [128, 6, False, 0]
    assert (config.model, config.host, config.max_queue, config.port) == ("from/environment", "0.0.0.0", 7, 8000)
    assert not options["enable_prefix_caching"]
    assert serve("from/line", "--config", file, **environment)[0].model == "from/line"
    assert serve(RADIXKV_CONFIG=file)[1]["block_size"] == 32


@pytest.mark.parametrize("name", ["serve.toml", "serve.yaml", "serve.yml"])
def test_files_in_toml_and_yaml(serve: Serve, tmp_path: Path, name: str) -> None:
    toml = 'api_keys = ["a", "b"]\nadmin_key = "c"\ngrace_seconds = 5\ndtype = "bfloat16"\nnum_blocks = 9\n'
    text = toml if name.endswith("toml") else toml.replace(" = ", ": ")
    config, options = serve("--config", write(tmp_path / name, text))
    assert (config.api_keys, config.admin_key, config.grace_seconds) == (("a", "b"), "c", 5.0)
    assert (options["dtype"], options["num_blocks"], options["max_num_seqs"]) == ("bfloat16", 9, None)


def test_an_empty_file_changes_nothing(serve: Serve, tmp_path: Path) -> None:
    assert serve("--config", write(tmp_path / "empty.yaml", ""))[0] == ServerConfig()


def test_keys_from_the_environment_are_separated_by_spaces_and_shown_nowhere(serve: Serve) -> None:
    environment = {"RADIXKV_API_KEYS": "key-of-ann key-of-bob", "RADIXKV_ADMIN_KEY": "key-of-admin"}
    config, _ = serve(**environment)
    assert (config.api_keys, config.admin_key) == (("key-of-ann", "key-of-bob"), "key-of-admin")
    assert serve("--api-key", "x", "--api-key", "y", **environment)[0].api_keys == ("x", "y")
    assert "key-of" not in command("--help", **environment).output


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("serve.toml", "block_sise = 3", "block_sise: unknown; did you mean block_size?"),
        ("serve.toml", "block-size = 3", "block-size: unknown; did you mean block_size?"),
        ("serve.yaml", "7: 3", "7: unknown"),
        ("serve.toml", "tokenizer = 'x'", "tokenizer: unknown"),
        ("serve.toml", "[server]\nport = 1", "server: unknown; expected options by name, without a table around them"),
        ("serve.yaml", "server: {port: 1}", "server: unknown; expected options by name, without a table around them"),
        ("serve.toml", 'api_keys = "K"', "api_keys: expected a list of texts, got a value of type str"),
        (
            "serve.toml",
            "[speculative_config]\nnum_spec = 3",
            "speculative_config: num_spec: unknown; expected some of method, num_speculative_tokens, drafters",
        ),
        ("serve.toml", "block_size = 0", "block_size: expected a whole number of at least 1 or None, got 0"),
        ("serve.yaml", "port: 70000", "port: expected a whole number from 0 to 65535, got 70000"),
        ("serve.yaml", "num_blocks: [1]", "num_blocks: expected a whole number of at least 1 or None, got [1]"),
        ("serve.toml", "block_size =", "not TOML: "),
        ("serve.yaml", "a: b: c", "not YAML: "),
        ("serve.yaml", "- block_size", "expected options by name, got a list"),
        ("serve.json", "{}", "expected a name that ends in .toml, .yaml or .yml"),
    ],
)
def test_a_bad_file_is_one_line_with_its_name(serve: Serve, tmp_path: Path, name: str, text: str, message: str) -> None:
    file = write(tmp_path / name, text)
    result = command("--config", file)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(f"{file}: {message}")
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ssl_keyfile = 'key.pem'", ("--ssl-certfile", "certificate.pem")),
        ("store_key_file = 'store.key'", ("--disk-cache", "blocks")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value.partition(" ")[0],
)
def test_what_a_file_begins_the_command_line_may_complete(
    serve: Serve, tmp_path: Path, text: str, line: tuple[str, ...]
) -> None:
    """The file alone used to be refused, for what it lacked."""
    file = write(tmp_path / "serve.toml", text)
    serve("--config", file, *line)
    assert isinstance(command("--config", file).exception, ValueError)


def test_replicas_on_the_command_line_complete_a_files_placement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    received: list[ApplicationOptions] = []
    monkeypatch.setattr(local, "serve_replicas", lambda options: received.append(options) or 0)
    file = write(tmp_path / "serve.toml", "scale_up_delay = 5.0\nreplicas = 8\n")
    result = command("--config", file, "--max-replicas", "3", "--replicas", "2")
    assert result.exit_code == 0, result.output
    assert (received[0].placement.scale_up_delay, received[0].placement.most_replicas) == (5.0, 3)


@pytest.mark.parametrize("line", [(), ("--kv-cache-memory-bytes", "1GiB")], ids=["file", "file and line"])
def test_what_excludes_each_other_is_refused_before_the_start(tmp_path: Path, line: tuple[str, ...]) -> None:
    file = write(tmp_path / "serve.toml", "num_blocks = 1\n" + ("" if line else "kv_cache_memory_bytes = 1\n"))
    refused = command("--config", file, *line)
    assert str(refused.exception) == "num_blocks and kv_cache_memory_bytes exclude each other: give one of them"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = command("--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 2
    assert "does not exist" in result.output


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RADIXKV_PORT", "tcp://10.0.0.1:8000"),
        ("RADIXKV_BLOCK_SIZE", "0"),
        ("RADIXKV_EVICTION_POLICY", "best"),
        ("RADIXKV_ENFORCE_EAGER", "perhaps"),
    ],
)
def test_a_bad_variable_is_named(variable: str, value: str) -> None:
    result = command(**{variable: value})
    assert result.exit_code == 2
    assert variable in result.output


def test_a_mistyped_variable_is_ignored_with_a_hint(serve: Serve) -> None:
    result = command(RADIXKV_BLOCKSIZE="32", RADIXKV_SERVICE_HOST="10.0.0.1", RADIXKV_PORT_8000_TCP_PORT="8000")
    assert result.exit_code == 0
    assert (
        result.stderr
        == "radixkv: RADIXKV_BLOCKSIZE is not an option, and is ignored; did you mean RADIXKV_BLOCK_SIZE?\n"
    )
    of_a_kubernetes_service = {
        f"RADIXKV_{name}": ""
        for name in ("SERVICE_HOST", "SERVICE_PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "PORT_8000_TCP_PROTO")
    }
    assert mistyped_variables({**of_a_kubernetes_service, "RADIXKV_CACHE": "/x"}, ["port", "host", "config"]) == {}


@pytest.mark.parametrize("name", ["serve", "replica", "ingress"])
def test_every_option_of_a_configuration_has_its_variable(name: str) -> None:
    """A replica ignored those of its queue, its grace and its model."""
    configured = {field for config in CONFIGS for field in config.model_fields}
    parameters = get_command(app).commands[name].params  # type: ignore[attr-defined]
    variables = {each.name: each.envvar for each in parameters if each.name in configured}
    assert {"model", "max_queue", "grace_seconds", "chat_template"} <= variables.keys()
    assert variables == {field: f"RADIXKV_{field.upper()}" for field in variables}


def test_a_replica_reads_the_variables_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[str | None, ServerConfig]] = []

    def run_replica(model: str | None, options: object, listen: str, secret: str, config: ServerConfig) -> int:
        received.append((model, config))
        return 0

    monkeypatch.setattr(cluster_run, "run_replica", run_replica)
    of_server = {"MODEL": "a/model", "MAX_QUEUE": "7", "GRACE_SECONDS": "5", "STEP_TIMEOUT": "9"}
    variables = {f"RADIXKV_{name}": text for name, text in of_server.items()}
    result = CliRunner().invoke(app, ["replica"], env={"RADIXKV_REPLICA_SECRET": "0123456789abcdef", **variables})
    assert result.exit_code == 0, result.output
    config = ServerConfig(model="a/model", max_queue=7, grace_seconds=5.0, step_timeout=9.0)
    assert received == [("a/model", config)]


@pytest.mark.parametrize(
    "arguments", [["replica"], ["ingress", "--replica", "a=http://127.0.0.1:1"]], ids=lambda words: words[0]
)
def test_replicas_and_ingresses_report_a_mistyped_variable(arguments: list[str]) -> None:
    """An ingress and its replicas may have one environment: what is the other's is not mistyped."""
    shared = {"RADIXKV_PORT": "8001", "RADIXKV_STEP_TIMEOUT": "9", "RADIXKV_REPLICA_SECRET": "short"}
    result = CliRunner().invoke(app, arguments, env={**shared, "RADIXKV_MAX_QUEU": "9"})
    assert (
        result.stderr == "radixkv: RADIXKV_MAX_QUEU is not an option, and is ignored; did you mean RADIXKV_MAX_QUEUE?\n"
    )


@pytest.mark.parametrize("option", ["--disk-cache", "--store-key-file", "--record-trace"])
def test_an_empty_path_is_no_path(option: str) -> None:
    result = command(option, "")
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output
    assert "expected a path, got ''" in result.output


def test_the_help_shows_every_option_its_variable_and_the_precedence() -> None:
    output = command("--help", COLUMNS="80").output
    assert "\nEngine options:\n" in output
    text = " ".join(output.split())
    assert "command line > environment > file > default" in text
    assert "(radixkv[ray])" in text
    for config in (ServerConfig, ModelConfig, EngineConfig):
        for name in set(config.model_fields) - {"tokenizer", "tiers", "model"}:
            flag = {"api_keys": "api-key", "cors_origins": "cors-origin"}.get(name, name.replace("_", "-"))
            assert f"--{flag} " in text
            assert re.search(rf"env var: RADIXKV_{name.upper()}[];]", text)
    assert "8192 on a GPU, 512 on a CPU" in text


def test_ray_serve_gets_the_same_options_where_replicas_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[ApplicationOptions] = []
    monkeypatch.setattr(local, "serve_replicas", lambda options: received.append(options) or 3)
    result = command("a/model", "--replicas", "2", "--port", "8001", "--block-size", "32", RADIXKV_MAX_REPLICAS="4")
    assert result.exit_code == 3, result.output
    (options,) = received
    assert (options.server.model, options.server.port, options.own_socket) == ("a/model", 8001, True)
    assert options.llm["block_size"] == 32
    assert (options.placement.min_replicas, options.placement.most_replicas) == (2, 4)
    assert isinstance(command("--replicas", "2", "--uds", "/run/x").exception, ValueError)
    assert len(received) == 1


@pytest.mark.parametrize("option", ["--num-gpus", "--num-cpus", "--ingresses"])
def test_what_has_no_effect_without_replicas_is_refused(serve: Serve, option: str) -> None:
    """It used to be ignored."""
    name = option.removeprefix("--").replace("-", "_")
    refused = command(option, "2")
    assert str(refused.exception) == f"{name}: expected replicas, max_replicas or ray_address with it"
    assert serve("--ingresses", "1")[0] == ServerConfig()


@pytest.mark.parametrize(
    ("arguments", "environment"), [(("--quantization", "awq"), {}), ((), {"RADIXKV_QUANTIZATION": "awq"})], ids=str
)
def test_formats_of_checkpoints_are_not_quantisations(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    """vLLM's command lines name them; a list of allowed values would suggest that such checkpoints cannot be read."""
    result = command(*arguments, **environment)
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "expected one of int8, int4, gguf or None, got 'awq'; checkpoints that are quantised already" in said
    assert "are recognised without it" in said


def test_quantisations_are_taken(serve: Serve) -> None:
    assert serve("--quantization", "int4")[1]["quantization"] == "int4"


def test_names_of_other_servers_parsers_are_taken_and_unknown_ones_say_what_to_write(serve: Serve) -> None:
    assert serve("--tool-call-parser", "kimi_k2", "--reasoning-parser", "deepseek_r1")
    result = command("--tool-call-parser", "xlam")
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "got 'xlam'; auto chooses by the chat template, and works for most models" in said


@pytest.mark.parametrize("name", ["serve.toml", "serve.yaml"])
def test_a_file_that_is_not_utf_8_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"model = '\xff'\n")
    with pytest.raises(ValueError, match=f"{name}: expected UTF-8: "):
        read_config_file(path, [ServerConfig])


@pytest.mark.parametrize(
    "text", ["speculative_config = {method = 'tree'}", "[speculative_config]\nmethod = 'tree'"], ids=["inline", "table"]
)
def test_what_is_json_on_the_command_line_is_a_table_in_a_file(serve: Serve, tmp_path: Path, text: str) -> None:
    _, options = serve("--config", write(tmp_path / "serve.toml", f"seed = 3\n{text}\n"))
    assert options["seed"] == 3
    assert EngineConfig(speculative_config=options["speculative_config"]) == EngineConfig(
        speculative_config={"method": "tree"}
    )


def test_a_module_that_a_running_server_lacks_is_not_ascribed_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice was to install `radixkv[ray]`, whatever was missing until the server's end."""
    lacking = ModuleNotFoundError("No module named 'drafts'", name="drafts")
    monkeypatch.setattr(local, "serve_replicas", Mock(side_effect=lacking))
    assert command("--replicas", "2").exception is lacking


def test_without_ray_the_extra_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    error = command("--ray-address", "auto").exception
    assert isinstance(error, MissingPackageError)
    assert str(error) == "ray is not installed: pip install 'radixkv[ray]'"
