"""`radixkv replica` and `radixkv ingress`: several engines as one server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from radixkv.cli.config_file import SECRET_VARIABLE, report_mistyped_variables
from radixkv.cli.options import command_line_fields, with_options_of
from radixkv.config import EngineConfig, ModelConfig
from radixkv.extras import needing_extra
from radixkv.llm_options import LLMOptions
from radixkv.server.config import ServerConfig
from radixkv.text_files import read_utf8

SecretFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help=f"File with the secret that replicas and ingresses have in common; by default the variable {SECRET_VARIABLE}.",
    ),
]
# The options of the server that a replica has.
_OF_REPLICA = ("model", "max_queue", "grace_seconds", "step_timeout")
# Those that an ingress has: requests wait, and steps run, on replicas.
_OF_INGRESS = tuple(name for name in ServerConfig.model_fields if name not in ("queue_timeout", "step_timeout"))
# What would have no effect on a replica: ingresses read the answers, and draw the seeds.
_READING = ("tool_call_parser", "reasoning_parser")
_OF_ENGINE = tuple(name for name in command_line_fields((ModelConfig, EngineConfig)) if name not in (*_READING, "seed"))
_REPLICA_OPTIONS = (*_OF_REPLICA, *_OF_ENGINE)
# By default, an ingress has the replicas' chat template.
_OF_TEXT = ("chat_template", *_READING)
_INGRESS_OPTIONS = (*_OF_INGRESS, *_OF_TEXT)


@with_options_of(ServerConfig, ModelConfig, EngineConfig, only=_REPLICA_OPTIONS)
def replica(
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT or unix:PATH on which ingresses reach this replica; users connect to the ingress."
        ),
    ] = "127.0.0.1:8100",
    secret_file: SecretFile = None,
    **options: Any,
) -> None:
    """Run one engine for `radixkv ingress`."""
    report_mistyped_variables(_REPLICA_OPTIONS)
    from radixkv.model.onednn_cache import limit_primitive_cache

    # Before torch is imported; this process is a server and nothing else.
    limit_primitive_cache(os.environ)
    with needing_extra("cluster"):
        from radixkv.cluster.run import run_replica

    secret = _secret(secret_file)
    config = ServerConfig(**{name: options.pop(name) for name in _OF_REPLICA})
    raise typer.Exit(run_replica(config.model, cast(LLMOptions, options), listen, secret, config))


@with_options_of(ServerConfig, ModelConfig, only=_INGRESS_OPTIONS)
def ingress(
    replica: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of a replica: http://host:port or unix:///path. May be repeated.")
    ] = None,
    replicas_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File of more replicas, one NAME=URL per line; read again at SIGHUP."
        ),
    ] = None,
    secret_file: SecretFile = None,
    **options: Any,
) -> None:
    """Serve a model over OpenAI's and Anthropic's HTTP APIs from replicas that run elsewhere.

    MODEL is the hub id or folder of the tokenizer; by default the replicas' model.
    """
    report_mistyped_variables(_INGRESS_OPTIONS)
    from radixkv.model.without_torch import forgo_torch

    forgo_torch()  # this process is an ingress and nothing else
    with needing_extra("cluster"):
        from radixkv.cluster.membership import parse_replica
        from radixkv.cluster.run import run_ingress

    secret = _secret(secret_file)
    model_config = ModelConfig(**{name: options.pop(name) for name in _OF_TEXT})
    replicas = dict(parse_replica(text) for text in replica or ())
    if len(replicas) < len(replica or ()):
        raise ValueError(f"replica: a name is there twice: {', '.join(replica or ())}")
    raise typer.Exit(run_ingress(ServerConfig(**options), model_config, replicas, replicas_file, secret))


def _secret(path: Path | None) -> str:
    given = os.environ.get(SECRET_VARIABLE, "") if path is None else read_utf8(path, "secret_file")
    secret = given.strip()
    if not secret:
        raise ValueError(f"secret_file: expected a file with a secret, or the variable {SECRET_VARIABLE}")
    from radixkv.cluster.connection import check_secret

    try:
        check_secret(secret)
    except ValueError as error:
        raise ValueError(f"{error} in {path or SECRET_VARIABLE}") from None
    return secret
