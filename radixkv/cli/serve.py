"""`radixkv serve`: the options of the server and its engine, from every source, and the start."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from radixkv.cli.config_file import CONFIGS, read_config_file, report_mistyped_variables
from radixkv.cli.options import command_line_fields, with_options_of
from radixkv.extras import needing_extra
from radixkv.llm_options import LLMOptions, llm_configs
from radixkv.ray.options import ApplicationOptions, PlacementConfig
from radixkv.server.config import ServerConfig


def _use_as_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Put a file's values where Typer looks after the command line and the environment."""
    if path is not None:
        values = read_config_file(path, CONFIGS)
        # On the command line, what is a table in a file is written as JSON.
        context.default_map = {
            name: json.dumps(value) if isinstance(value, Mapping) else value for name, value in values.items()
        }
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        envvar="RADIXKV_CONFIG",
        is_eager=True,
        exists=True,
        dir_okay=False,
        callback=_use_as_defaults,
        help="TOML or YAML file with options by name, such as block_size = 32 or api_keys = ['KEY']. Precedence: command "
        "line > environment > file > default.",
    ),
]


@with_options_of(*CONFIGS)
def serve(config: ConfigFile = None, **options: Any) -> None:
    """Serve a model over OpenAI's and Anthropic's HTTP APIs.

    Every option can also be set by its environment variable (RADIXKV_ and its name in capitals) or in the file that
    --config names. Precedence: command line > environment > file > default.
    """
    report_mistyped_variables(["config", *command_line_fields(CONFIGS)])
    if PlacementConfig(**{name: options[name] for name in PlacementConfig.model_fields}).by_ray:
        raise typer.Exit(_serve_replicas(options))
    for name, field in PlacementConfig.model_fields.items():
        if options.pop(name) != field.default:
            raise ValueError(f"{name}: expected replicas, max_replicas or ray_address with it")
    from radixkv.model.onednn_cache import limit_primitive_cache

    # Before torch is imported; this process is a server and nothing else.
    limit_primitive_cache(os.environ)
    with needing_extra("server"):
        from radixkv.server.run import run_server

    server = ServerConfig(**{name: options.pop(name) for name in ServerConfig.model_fields})
    llm_options = cast(LLMOptions, options)
    llm_configs(llm_options)  # refuses what is impossible, before an address is bound and torch is imported
    raise typer.Exit(run_server(server, llm_options))


def _serve_replicas(options: dict[str, Any]) -> int:
    """The exit status of a server whose engines Ray Serve places."""
    application = ApplicationOptions.of_parts(options, own_socket=True)
    with needing_extra("ray"):
        from radixkv.ray.local import serve_replicas

    return serve_replicas(application)
