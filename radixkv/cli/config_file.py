"""Options from a file, and environment variables that look like an option and are not."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from radixkv.cli.options import ENVIRONMENT_PREFIX, command_line_fields, variable_of
from radixkv.config import Config, EngineConfig, ModelConfig
from radixkv.errors import one_line
from radixkv.option_words import hint, nearest
from radixkv.ray.options import PlacementConfig
from radixkv.server.config import ServerConfig
from radixkv.text_files import read_utf8

CONFIGS: tuple[type[Config], ...] = (ServerConfig, ModelConfig, EngineConfig, PlacementConfig)
"""All whose fields are options of a command that serves."""

SECRET_VARIABLE = "RADIXKV_REPLICA_SECRET"

# Variables that are not options of a command: the cache of converted models (see `radixkv.model.model_cache`), the key of
# stored blocks, and the replicas' secret.
_OTHER_VARIABLES = frozenset({"RADIXKV_CACHE", "RADIXKV_STORE_KEY", SECRET_VARIABLE})
# What Kubernetes sets for a service of this name: its address and ports (documentation, "Service", environment variables).
_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")


def read_config_file(path: Path, configs: Collection[type[Config]]) -> dict[str, Any]:
    """Values of configurations' fields from a TOML or YAML file: one table, the fields by name.

    Each is checked by itself: the command line and the environment may have the options that it needs.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file, holds an unknown name, or an impossible value; with the path and the name.
    """
    values = _read_table(path)
    known = command_line_fields(configs)
    for name, value in values.items():
        if name not in known:
            if isinstance(value, Mapping):
                raise ValueError(f"{path}: {name}: unknown; expected options by name, without a table around them")
            raise ValueError(f"{path}: {name}: unknown{hint(str(name).replace('-', '_'), known)}")
    for config in configs:
        try:
            config.check_each({name: value for name, value in values.items() if name in config.model_fields})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return values


def report_mistyped_variables(options: Collection[str]) -> None:
    """Say on standard error which variables are ignored, and which of those that the ``options`` have was probably meant."""
    for variable, meant in mistyped_variables(os.environ, options).items():
        print(f"radixkv: {variable} is not an option, and is ignored; did you mean {meant}?", file=sys.stderr)


def mistyped_variables(environment: Mapping[str, str], options: Collection[str]) -> dict[str, str]:
    """The environment variables that resemble one of the ``options`` and belong to none, with the one probably meant.

    Others may be there: Kubernetes adds some for a service named radixkv, and an ingress may have its replicas' environment.
    """
    known = {*map(variable_of, (*options, *command_line_fields(CONFIGS))), *_OTHER_VARIABLES}
    found = {}
    for variable in environment:
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name != variable and variable not in known and not _KUBERNETES.fullmatch(name):
            near = nearest(name.lower(), options)
            if near is not None:
                found[variable] = variable_of(near)
    return found


def _read_table(path: Path) -> dict[str, Any]:
    text = read_utf8(path)
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not TOML: {error}") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{path}: expected a name that ends in .toml, .yaml or .yml")
    import yaml

    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {one_line(str(error))}") from None
    if not isinstance(table, dict | None):
        raise ValueError(f"{path}: expected options by name, got a {type(table).__name__}")
    return table or {}
